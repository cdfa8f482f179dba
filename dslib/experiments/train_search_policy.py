r"""Train the policy of the search world: fine-tuning on the noisy expert, then GRPO.

python -m dslib.experiments.train_search_policy --save                  # the shipped weights
python -m dslib.experiments.train_search_policy --window 128 --name search_policy_128 --save
python -m dslib.experiments.train_search_policy --window 128 --tuned 2 --start search_policy_sft \
    --name search_policy_128 --save

The last goes on from the shipped fine-tuned weights, and trains by GRPO in a window that overflows.
"""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from dslib.experiments.search_policy import (
    CHECKPOINT,
    MODEL,
    TRAINER,
    TUNING,
    WORLDS,
    PolicyConfig,
    evaluate,
    rl_policy,
    sft_policy,
    shipped_policy,
    success,
)
from dslib.rl.episodes import EpisodeTrainer
from dslib.runs import checkpoints
from dslib.tasks.search_tokens import SearchVocabulary


def main(
    sft_steps: Annotated[
        int, typer.Option(help="steps of each round of fine-tuning; 0: the settings' own")
    ] = 0,
    rl_steps: Annotated[int, typer.Option(help="steps of GRPO")] = PolicyConfig.rl_steps,
    window: Annotated[int, typer.Option(help="training window in tokens; 0: nothing overflows")] = 0,
    noise: Annotated[
        float, typer.Option(help="share of the expert's calls that are random")
    ] = PolicyConfig.noise,
    pages: Annotated[int, typer.Option(help="pages of results that a clue fits")] = WORLDS.pages,
    clues: Annotated[int, typer.Option(help="clues of a question")] = WORLDS.clues,
    max_calls: Annotated[int, typer.Option(help="calls that an episode may make")] = WORLDS.max_calls,
    d_model: Annotated[int, typer.Option(help="width of the model")] = MODEL.d_model,
    layers: Annotated[int, typer.Option(help="layers of the model")] = MODEL.layers,
    lr: Annotated[float, typer.Option(help="learning rate of GRPO")] = TRAINER.lr,
    seed: Annotated[int, typer.Option(help="of the weights, the batches and the episodes")] = 0,
    held_out: Annotated[int, typer.Option(min=1, help="worlds that success is measured in")] = 200,
    resume: Annotated[
        Path | None, typer.Option(help="file to save GRPO's state in, and to go on from")
    ] = None,
    save: Annotated[bool, typer.Option(help="write data/checkpoints/NAME_sft and NAME")] = False,
    name: Annotated[str, typer.Option(help="name of the checkpoints")] = CHECKPOINT,
    tuned: Annotated[
        int, typer.Option(min=0, help="rounds of fine-tuning that the weights of START have had")
    ] = 0,
    start: Annotated[str, typer.Option(help="weights to go on from; by default NAME_sft")] = "",
) -> None:
    """Fine-tune, train by GRPO, and print success in held-out worlds, without overflow, before and after."""
    worlds = replace(WORLDS, pages=pages, clues=clues, max_calls=max_calls)
    config = PolicyConfig(
        worlds=worlds,
        model=replace(MODEL, vocab_size=len(SearchVocabulary(worlds)), d_model=d_model, layers=layers),
        window=window or None,
        noise=noise,
        sft=tuple(replace(settings, steps=sft_steps or settings.steps) for settings in TUNING),
        rl=replace(TRAINER, lr=lr),
        rl_steps=rl_steps,
    )
    command = shlex.join(["python", "-m", "dslib.experiments.train_search_policy", *sys.argv[1:]])
    about = {
        "seed": seed,
        "worlds": asdict(worlds),
        "model": {key: value for key, value in asdict(config.model).items() if value is not None},
        "training_window": config.window,
        "noise": noise,
        "resumed": config.resumed,
        "sft_steps": [settings.steps for settings in config.sft],
    }
    began = time.perf_counter()

    def measure(model, what: str) -> float:
        task = config.held_out()
        rates = {t: success(evaluate(model, task, range(held_out), temperature=t)) for t in (1.0, 0.0)}
        seconds = time.perf_counter() - began
        print(
            f"{what}: success {rates[1.0]:.3f} sampled, {rates[0.0]:.3f} greedy ({seconds:.0f} s)", flush=True
        )
        return rates[1.0]

    def progress(losses: list[float]) -> None:
        if losses and len(losses) % 50 == 0:
            seconds = time.perf_counter() - began
            print(
                f"step {len(losses)}: {sum(losses[-50:]) / 50:.3f} nats a token ({seconds:.0f} s)", flush=True
            )

    model = shipped_policy(start or f"{name}_sft")[0] if tuned else None
    model, losses = sft_policy(config, seed, progress, model, slice(tuned, None))
    if losses:
        print(f"fine-tuned: loss {sum(losses[-20:]) / len(losses[-20:]):.3f} nats a token")
    about["success"] = measure(model, "fine-tuned")
    if save and losses:
        print(checkpoints.write(f"{name}_sft", model, command, about))

    def observe(trainer: EpisodeTrainer) -> None:
        row, seconds = trainer.table[-1], time.perf_counter() - began
        print(
            f"step {row['step']}: reward {row['reward']:.3f}, calls {row['calls']:.1f}, "
            f"entropy {row['entropy']:.3f} ({seconds:.0f} s)",
            flush=True,
        )

    if not rl_steps:
        return
    rl_policy(config, model, seed, resume, observe)
    about |= {"rl_steps": rl_steps, "success": measure(model, f"after {rl_steps} steps of GRPO")}
    if save:
        print(checkpoints.write(name, model, command, about))


if __name__ == "__main__":
    typer.run(main)
