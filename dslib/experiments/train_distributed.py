"""Train the small decoder on many ranks, with distributed Muon for its matrices and AdamW for the rest.

torchrun --nproc-per-node 2 -m dslib.experiments.train_distributed --steps 20
python -m dslib.experiments.train_distributed --steps 20          # the same losses, in one process
"""

from __future__ import annotations

import os
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from dslib.experiments.distributed_muon import train_rank
from dslib.models.decoder import DecoderConfig
from dslib.models.training import TrainConfig


def main(
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 20,
    batch_size: Annotated[int, typer.Option(help="windows in a step, shared by the ranks")] = 8,
    context: Annotated[int, typer.Option(help="bytes in a window")] = 64,
    d_model: Annotated[int, typer.Option(help="width of the model")] = 32,
    layers: Annotated[int, typer.Option(help="layers of the model")] = 2,
    lr: Annotated[float, typer.Option(help="peak learning rate of the matrices")] = 0.016,
    rest_lr: Annotated[float, typer.Option(help="peak learning rate of embedding, head and norms")] = 0.032,
    seed: Annotated[int, typer.Option(help="of the weights and the batches")] = 0,
    corpus: Annotated[str, typer.Option(help="a text file or folder; empty: the standard library")] = "",
    overlap: Annotated[bool, typer.Option(help="gather while iterating")] = False,
    fp32: Annotated[bool, typer.Option(help="iterate in float32 instead of bfloat16")] = False,
) -> None:
    """Train, and print the loss of every step (rank 0 prints)."""
    _join()
    config = TrainConfig(
        DecoderConfig(d_model=d_model, heads=2, layers=layers),
        optimizer="muon",
        steps=steps,
        batch_size=batch_size,
        context=context,
        lr=lr,
        rest_lr=rest_lr,
        seed=seed,
        corpus=corpus or None,
    )
    try:
        run = train_rank(config, {"overlap": overlap, "ns_dtype": torch.float32 if fp32 else None})
        if dist.get_rank() == 0:
            for step, loss in enumerate(run.losses, start=1):
                print(f"step {step}: {loss:.5f} nats a byte")
            sent = sum(run.sent["matrices"].values())
            print(
                f"{run.ranks} ranks; rank 0 sent {sent} bytes for the matrices and keeps {run.state_bytes} of state"
            )
    finally:
        dist.destroy_process_group()


def _join() -> None:
    """The process group that torchrun describes, or one of this process alone."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


if __name__ == "__main__":
    typer.run(main)
