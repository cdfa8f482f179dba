"""Looking into a model without changing it: losses on held-out text, sizes inside, what goes through a module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dslib.models.decoder import Decoder
from dslib.optim import param_groups_for_muon
from dslib.tasks.recall import RECALL, TEXT

#: Attention logits past this in size are counted by :func:`probe`. (MuonClip's threshold is 100, at a
#: thousand billion parameters.)
LOGIT_THRESHOLD = 20.0


@dataclass(frozen=True)
class ForwardCall:
    """One forward pass of a module."""

    module: nn.Module
    #: Its first argument.
    input: Tensor
    output: Tensor


@contextmanager
def recorded_calls(modules: Iterable[nn.Module]) -> Iterator[list[ForwardCall]]:
    """The forward passes of ``modules`` made inside, in their order; a list that grows.

    with recorded_calls(block.attention for block in model.blocks) as calls:
        model(tokens)
    calls[0].input  # (batch, time, d_model)
    """
    calls: list[ForwardCall] = []
    hooks = [
        module.register_forward_hook(
            lambda module, inputs, output: calls.append(ForwardCall(module, inputs[0], output))
        )
        for module in modules
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def named_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that Muon would train, by name, in the order of the model's parameters."""
    matrices = set(param_groups_for_muon(model)[0])
    return {name: p for name, p in model.named_parameters() if p in matrices}


@torch.no_grad()
def probe(model: Decoder, tokens: Tensor) -> dict[str, float]:
    """Sizes inside a model on ``tokens`` (batch, time): ``weight_rms`` over all of Muon's matrices,
    ``activation_rms`` over the outputs of all attention and MLP modules, ``largest_logit``: the largest
    absolute value of an attention logit of a key that may be seen, and ``logits_above``: the share of
    these whose absolute value is past ``LOGIT_THRESHOLD``. Not finite where the model is not."""
    matrices, _ = param_groups_for_muon(model)
    squares = sum(weight.square().sum().item() for weight in matrices)
    with recorded_calls(module for block in model.blocks for module in (block.attention, block.mlp)) as calls:
        model(tokens)
    attentions = [block.attention for block in model.blocks if hasattr(block.attention, "logits")]
    logits = [call.module.logits(call.input) for call in calls if call.module in attentions]
    visible = torch.cat([layer[layer != -math.inf].abs() for layer in logits]) if logits else torch.zeros(1)
    return {
        "weight_rms": math.sqrt(squares / sum(weight.numel() for weight in matrices)),
        "activation_rms": torch.stack([call.output.square().mean() for call in calls]).mean().sqrt().item(),
        "largest_logit": visible.max().item(),
        "logits_above": (visible > LOGIT_THRESHOLD).double().mean().item(),
    }


@torch.no_grad()
def validation_loss(model: Decoder, windows: tuple[Tensor, Tensor], batch_size: int = 32) -> float:
    """Mean loss over ``windows`` = (inputs, targets), (count, context) int64, in nats a token."""
    inputs, targets = windows
    total = 0.0
    for start in range(0, len(inputs), batch_size):
        part = slice(start, start + batch_size)
        total += model.loss(inputs[part], targets[part]).item() * len(inputs[part])
    return total / len(inputs)


@torch.no_grad()
def recall_losses(
    model: Decoder, planted: tuple[Tensor, Tensor, Tensor], batch_size: int = 32
) -> dict[str, float]:
    """Means over ``planted`` = (inputs, targets, kinds), (count, context) int64, of
    :meth:`dslib.tasks.RecallTask.evaluation`: ``"loss"`` of the text's tokens and ``"recall_loss"`` of the
    recalled, nats a token, and ``"recall_accuracy"``, the share of the recalled that are the likeliest."""
    losses, hits = [], []
    for inputs, targets in zip(*(part.split(batch_size) for part in planted[:2]), strict=True):
        logits = model(inputs)
        losses.append(torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none"))
        hits.append(logits.argmax(-1) == targets)
    loss, recall = torch.cat(losses), planted[2] == RECALL
    return {
        "loss": loss[planted[2] == TEXT].mean().item(),
        "recall_loss": loss[recall].mean().item(),
        "recall_accuracy": torch.cat(hits)[recall].double().mean().item(),
    }
