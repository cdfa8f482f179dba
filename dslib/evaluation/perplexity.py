"""Perplexity of responses under a model, its own or another's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dslib.evaluation.exact import PLAIN, Distribution, sequence_logp


def perplexity(logp: Tensor, mask: Tensor) -> Tensor:
    """PPL = exp(−1/T Σ log P(y_t | x, y_<t)) over the T scored tokens of each response (arXiv:2504.13837, §4.1).

    logp: (sequences, tokens) float; mask: the same shape, bool; what stands where it is False is never read.
    Returns (sequences,) float64. A token of probability 0 gives infinity.
    Raises ValueError for other shapes or dtypes, no sequence, one without a scored token, and a scored NaN or
    positive logarithm, naming the sequence.
    """
    if logp.ndim != 2 or logp.shape != mask.shape or mask.dtype != torch.bool or len(logp) == 0:
        raise ValueError(
            f"logp {tuple(logp.shape)} and mask {tuple(mask.shape)} {mask.dtype} must both be "
            "(sequences, tokens), the mask bool, with at least one sequence"
        )
    scored = torch.where(mask, logp.double(), 0.0)
    for wrong, what in (
        (~mask.any(dim=1), "has no scored token"),
        (scored.isnan().any(dim=1), "has a logp of NaN"),
        ((scored > 1e-6).any(dim=1), "has a logp above 0, which is no probability"),
    ):
        if wrong.any():
            raise ValueError(f"sequence {int(wrong.nonzero()[0])} {what}")
    return (-scored.sum(dim=1) / mask.sum(dim=1)).exp()


def response_perplexity(
    model: nn.Module, prompts: Tensor, completions: Tensor, mask: Tensor, distribution: Distribution = PLAIN
) -> Tensor:
    """:func:`perplexity` of completions, whoever wrote them, under ``model`` by one teacher-forced pass.

    Arguments as for :func:`~dslib.evaluation.exact.sequence_logp`. Returns (sequences,) float64 without
    gradient.
    """
    with torch.no_grad():
        return perplexity(sequence_logp(model, prompts, completions, mask, distribution), mask)
