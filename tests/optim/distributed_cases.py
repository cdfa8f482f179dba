"""What the ranks of test_distributed.py do. A module of its own, because new processes import it."""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn

from dslib.optim import Muon, ZeroAdamW, ZeroMuon
from dslib.optim.distributed_launch import run_processes

MICRO_BATCHES = 4

#: name, shape, options of its group. 1 × 9 and a convolution, blocks of a fused weight, odd sizes.
UNEVEN = [
    ("wide", (5, 7), {}),
    ("tall", (18, 5), {}),
    ("row", (1, 9), {}),
    ("conv", (7, 3, 2, 2), {}),
    ("fused", (12, 5), {"split_sizes": (6, 3, 3), "lr": 0.03}),
    ("square", (16, 16), {"nesterov": False, "momentum": 0.8}),
    ("normed", (4, 6), {"adjust_lr": "update_norm"}),
]
FEW_ENTRIES = [("three", (1, 3), {}), ("nothing", (0, 5), {})]  # four ranks: one shard is empty
OPTIONS = {"lr": 0.02, "weight_decay": 0.5}


def parameters(specification, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for _, s, _ in specification]
    formats = {4: torch.channels_last}  # not contiguous in the order of its entries
    return [
        (name, nn.Parameter(value.to(memory_format=formats.get(value.ndim, torch.contiguous_format))))
        for (name, _, _), value in zip(specification, values, strict=True)
    ]


def groups(named, specification):
    return [{"params": [pair], **options} for pair, (_, _, options) in zip(named, specification, strict=True)]


def micro_gradient(step, micro, index, shape, dtype, dyadic=True):
    """None for some; multiples of 1/64, whose sums are exact in any order, so that every number of ranks
    gets the same mean to the last bit; or any numbers."""
    if (step + micro + index) % 5 == 0 or (step % 4 == 1 and index % 3 == 1):
        return None
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + index)
    if dyadic:
        return torch.randint(-64, 65, shape, generator=generator).to(dtype) / 64
    return torch.randn(shape, generator=generator).to(dtype)


def set_gradients(named, step, rank, ranks, dyadic=True):
    """The mean over the micro batches of a rank: those without a gradient count as zero."""
    share = MICRO_BATCHES // ranks
    for index, (_, p) in enumerate(named):
        found = [
            micro_gradient(step, micro, index, p.shape, p.dtype, dyadic)
            for micro in range(rank * share, (rank + 1) * share)
        ]
        found = [gradient for gradient in found if gradient is not None]
        p.grad = sum(found) / share if found else None


def one_process(specification, steps, dtype=torch.float32, dyadic=True, **options):
    named = parameters(specification, dtype)
    optimizer = Muon(groups(named, specification), **{**OPTIONS, **options})
    for step in range(steps):
        set_gradients(named, step, 0, 1, dyadic)
        optimizer.step()
    return [p.detach() for _, p in named], optimizer


def sharded(specification, steps, dtype=torch.float32, dyadic=True, **options):
    named = parameters(specification, dtype)
    optimizer = ZeroMuon(groups(named, specification), **{**OPTIONS, **options})
    for step in range(steps):
        set_gradients(named, step, dist.get_rank(), dist.get_world_size(), dyadic)
        optimizer.step()
    return [p.detach() for _, p in named], optimizer


def equality(cases):
    """For each (specification, steps, options): the parameters, and what else a rank can tell."""
    told = []
    for specification, steps, options in cases:
        values, optimizer = sharded(specification, steps, **options)
        whole = optimizer.state_dict()
        told.append(
            {
                "values": values,
                "sent": dict(optimizer.traffic.sent),
                "calls": dict(optimizer.traffic.calls),
                "state_bytes": optimizer.state_bytes(),
                "checkpoint": whole,
            }
        )
    return told


def on_gpu():
    """Sharded and whole on this rank's GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    results = []
    for cls, rank, ranks in ((ZeroMuon, dist.get_rank(), dist.get_world_size()), (Muon, 0, 1)):
        named = [(name, nn.Parameter(p.detach().to(device))) for name, p in parameters(UNEVEN)]
        optimizer = cls(groups(named, UNEVEN), **OPTIONS, ns_dtype=torch.float32, batched=False)
        for step in range(5):
            on_cpu = [(name, nn.Parameter(p.detach().cpu())) for name, p in named]
            set_gradients(on_cpu, step, rank, ranks)
            for (_, p), (_, q) in zip(named, on_cpu, strict=True):
                p.grad = None if q.grad is None else q.grad.to(device)
            optimizer.step()
        results.append([p.detach().cpu() for _, p in named])
    return results


def resume(checkpoint, values, first, stop, **options):
    """From step ``first`` on with a checkpoint that any number of ranks wrote."""
    named = parameters(UNEVEN)
    with torch.no_grad():
        for (_, p), value in zip(named, values, strict=True):
            p.copy_(value)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    optimizer = (ZeroMuon if dist.is_initialized() else Muon)(groups(named, UNEVEN), lr=9.0, batched=False)
    optimizer.load_state_dict(checkpoint)
    for step in range(first, stop):
        set_gradients(named, step, rank, ranks)
        optimizer.step()
    return [p.detach() for _, p in named]


def adamw(steps):
    """ZeroAdamW and torch's AdamW on the same parameters and mean gradients, momentum handed over midway."""
    specification = [*UNEVEN, ("vector", (5,), {}), ("scalar", (), {})]
    plain = [{"lr": 0.01}, {"lr": 0.02, "weight_decay": 0.3}]
    results = []
    for cls, rank, ranks in (
        (ZeroAdamW, dist.get_rank(), dist.get_world_size()),
        (torch.optim.AdamW, 0, 1),
    ):
        named = parameters(specification)
        split = [{"params": named[:4], **plain[0]}, {"params": named[4:], **plain[1]}]
        optimizer = cls(split, betas=(0.8, 0.9))
        for step in range(steps):
            set_gradients(named, step, rank, ranks)
            optimizer.step()
            if step == steps // 2:
                saved = optimizer.state_dict()
                optimizer = cls([{"params": named[:4]}, {"params": named[4:]}])
                optimizer.load_state_dict(saved)
        results.append([p.detach() for _, p in named])
    return results


def growing():
    """A group added after some steps: the cuts move, and the momentum with them."""
    results = []
    for cls, rank, ranks in ((ZeroMuon, dist.get_rank(), dist.get_world_size()), (Muon, 0, 1)):
        named = parameters(UNEVEN)
        optimizer = cls(groups(named, UNEVEN)[:3], **OPTIONS, batched=False)
        for step in range(6):
            if step == 3:
                for group in groups(named, UNEVEN)[3:]:
                    optimizer.add_param_group(group)
            set_gradients(named, step, rank, ranks)
            optimizer.step()
        results.append([p.detach() for _, p in named])
    return results


def message(action):
    try:
        action()
    except (ValueError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def faults():
    """What each rank says to bad input; none may hang."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    rank, ranks = dist.get_rank(), dist.get_world_size()

    def construct(specification, **options):
        named = parameters(specification)
        return ZeroMuon(groups(named, specification), **{**OPTIONS, **options}), named

    swapped = [UNEVEN[1], UNEVEN[0], *UNEVEN[2:]] if rank == 1 else UNEVEN
    other_shape = [*UNEVEN[:3], ("conv", (7, 3, 2, 3), {}), *UNEVEN[4:]] if rank == 1 else UNEVEN
    told = {
        "order": message(lambda: construct(swapped)),
        "shape": message(lambda: construct(other_shape)),
        "missing": message(lambda: construct(UNEVEN[:-1] if rank == 1 else UNEVEN)),
        "option": message(lambda: construct(UNEVEN, weight_decay=0.1 * (rank == 1))),
        "overlap": message(lambda: construct(UNEVEN, overlap=rank == 1)),
        "size": message(lambda: construct(UNEVEN, ranks=ranks + 1)),
        "gather_dtype": message(lambda: construct(UNEVEN, gather_dtype=torch.int8)),
        "no group": message(lambda: construct(UNEVEN, process_group="all")),
        "no member": message(lambda: construct(UNEVEN, process_group=dist.new_group([0]))),
    }

    def other_values():
        named = parameters(UNEVEN)
        with torch.no_grad():
            named[3][1].mul_(1 + (rank == 1))
        ZeroMuon(groups(named, UNEVEN), **OPTIONS)

    told["values"] = message(other_values)

    optimizer, named = construct(UNEVEN)
    set_gradients(named, 0, rank, ranks)
    if rank == 1:
        named[1][1].grad = torch.ones(18, 5).to_sparse()
    told["sparse"] = message(optimizer.step)
    saved = optimizer.state_dict()
    saved["state"] = {0: {"momentum_buffer": torch.zeros(7, 5)}}
    told["checkpoint"] = message(lambda: optimizer.load_state_dict(saved))
    told["flat"] = message(
        lambda: optimizer.add_param_group({"params": [("gain", nn.Parameter(torch.ones(3)))]})
    )
    mesh = init_device_mesh("cpu", (ranks,))
    sharded = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    told["dtensor"] = message(lambda: ZeroMuon([("sharded", sharded)], lr=0.1))
    told["nothing"] = message(lambda: ZeroMuon([{"params": []}], lr=0.1).step())
    return told


def dtensors():
    """Muon on parameters that FSDP2, or a mesh, has sharded, and on whole ones: differences, by name."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    options = {**OPTIONS, "ns_dtype": torch.float32, "batched": False}

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 3, bias=False))

    whole, parted = model(), model()
    fully_shard(parted, mesh=mesh)
    optimizers = [Muon(m.parameters(), **options) for m in (whole, parted)]
    for step in range(5):
        inputs = torch.randn(ranks, 4, 5, generator=torch.Generator().manual_seed(step))
        whole(inputs).square().mean().backward()
        parted(inputs[rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(whole.parameters(), parted.parameters(), strict=True)
    found = {"fsdp": max((a - b.full_tensor()).abs().max().item() for a, b in pairs)}
    state = optimizers[1].state[next(parted.parameters())]["momentum_buffer"]
    found["local momentum"] = state.to_local().numel()
    saved = optimizers[1].state_dict()
    optimizers[1].load_state_dict(saved)

    for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("copies", Replicate())):
        for index, (kind, shape, group) in enumerate(UNEVEN):
            p = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(index)))
            q = nn.Parameter(distribute_tensor(p.detach(), mesh, [placement]))
            ours, theirs = (Muon([{"params": [t], **group}], **options) for t in (p, q))
            for step in range(3):
                p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(100 + step))
                q.grad = distribute_tensor(p.grad, mesh, [placement])
                ours.step()
                theirs.step()
            found[f"{kind} by {name}"] = (p - q.full_tensor()).abs().max().item()
    return found


def everything(cases, checkpoint, values):
    """All of the above in one start of processes."""
    return {
        "equality": equality(cases),
        "resumed": resume(checkpoint, values, 10, 20),
        "adamw": adamw(7),
        "growing": growing(),
        "faults": faults(),
        "dtensors": dtensors(),
        "rank": dist.get_rank(),
    }


def killed(rank, step):
    """Steps until a rank is killed without a word."""
    named = parameters(UNEVEN)
    optimizer = ZeroMuon(groups(named, UNEVEN), **OPTIONS)
    for done in range(1_000_000):
        if dist.get_rank() == rank and done == step:
            os.kill(os.getpid(), signal.SIGKILL)
        set_gradients(named, done % 7, dist.get_rank(), dist.get_world_size())
        optimizer.step()


def one_raises_and_one_waits():
    if dist.get_rank() == 1:
        raise ArithmeticError("of rank 1")
    dist.barrier()


def one_waits_too_long():
    """Neither dead nor there: the other's collective has to run out of time."""
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def leave_without_a_word():
    os._exit(0)


def ignore_everything(folder):
    """Notes who it is, then would go on for ever."""
    with open(os.path.join(folder, f"{dist.get_rank()}.pid"), "w") as file:
        file.write(str(os.getpid()))
    dist.barrier()
    time.sleep(600)


if __name__ == "__main__":
    import sys

    import distributed_cases

    run_processes(distributed_cases.ignore_everything, 2, sys.argv[1])
