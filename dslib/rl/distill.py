"""Learning from verified solutions, one's own or a teacher's, and from a teacher's probabilities.

DeepSeek-R1 (arXiv:2501.12948, §2.3.3) samples its RL checkpoint, keeps what a verifier accepts, and fine-tunes the
*base* model on it, not the checkpoint. Its distilled models (§2.4) are other bases fine-tuned on the same data:
:func:`rejection_sample` with the teacher, :func:`dslib.rl.sft.sft` with the student.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dslib.rl.rollout import Rollout, SamplingConfig, completion_states
from dslib.rl.samples import sample_groups
from dslib.rl.sft import Examples
from dslib.tasks.verifiable import Task

#: (indices, completions, mask) → which completions to keep, (n,) bool.
Keep = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class VerifiedExamples:
    """``examples`` that a task's verifier accepted and the problem of each, ``indices`` (n,) int64; ``tried`` counts
    the completions that were checked and ``problems`` those that were asked."""

    examples: Examples
    indices: Tensor
    tried: int
    problems: int

    @property
    def solved(self) -> float:
        """The share of the problems that have an example."""
        return len(self.indices.unique()) / self.problems

    @property
    def yielded(self) -> float:
        """Examples a completion tried."""
        return len(self.indices) / self.tried


def rejection_sample(
    model: nn.Module,
    task: Task,
    indices: Tensor | Sequence[int],
    samples: int,
    generator: torch.Generator | None = None,
    sampling: SamplingConfig | None = None,
    threshold: float = 1.0,
    per_problem: int | None = None,
    keep: Keep | None = None,
    batch: int = 64,
) -> VerifiedExamples:
    """``samples`` completions of each problem, of which those with a reward of at least ``threshold`` are kept.

    Of equal completions of a problem one is kept, and of the rest the first ``per_problem`` (None: all). ``keep``
    refuses right answers in the wrong form, as R1 drops mixed languages. ``sampling``: by default the task's
    length at temperature 1. ``batch`` problems are sampled at a time. Raises ValueError for no problems and for
    counts below 1.
    """
    indices = torch.as_tensor(indices)
    for name, value in (("samples", samples), ("per_problem", per_problem), ("batch", batch)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if not len(indices):
        raise ValueError("indices are empty; name at least one problem")
    if sampling is None:
        sampling = SamplingConfig(task.max_new_tokens, end=task.end)
    completions, masks, rewards = [], [], []
    for some in indices.split(batch):
        rollout, earned = sample_groups(model, task, some, sampling, generator, samples)
        completions.append(rollout.completions.cpu())
        masks.append(rollout.mask.cpu())
        rewards.append(earned.flatten())
    return _accepted(
        task,
        indices.repeat_interleave(samples),
        torch.cat(completions),
        torch.cat(masks),
        torch.cat(rewards),
        threshold,
        per_problem,
        keep,
    )


def solver_examples(
    task: Task,
    indices: Tensor | Sequence[int],
    solve: Callable[[int], Tensor | Sequence[int]],
    threshold: float = 1.0,
) -> VerifiedExamples:
    """One solution of each problem by a teacher that is a program: ``solve(index)`` → tokens, the end included
    where the task has one; what the task's verifier does not accept is left out.

    Raises ValueError for no problems, and for a solution that is empty or longer than the task allows.
    """
    indices = torch.as_tensor(indices)
    if not len(indices):
        raise ValueError("indices are empty; name at least one problem")
    completions = torch.full((len(indices), task.max_new_tokens), task.end)
    mask = torch.zeros_like(completions, dtype=torch.bool)
    for row, index in enumerate(indices.tolist()):
        solution = torch.as_tensor(solve(index))
        if not 1 <= len(solution) <= task.max_new_tokens:
            raise ValueError(
                f"the solution of problem {index} has {len(solution)} tokens; the task takes 1 to {task.max_new_tokens}"
            )
        completions[row, : len(solution)], mask[row, : len(solution)] = solution, True
    rewards = task.rewards(indices, completions, mask)
    return _accepted(task, indices, completions, mask, rewards, threshold)


def _accepted(
    task: Task,
    indices: Tensor,
    completions: Tensor,
    mask: Tensor,
    rewards: Tensor,
    threshold: float,
    per_problem: int | None = None,
    keep: Keep | None = None,
) -> VerifiedExamples:
    good = rewards >= threshold  # NaN is not
    if keep is not None:
        good = good & keep(indices, completions, mask)
    texts = torch.where(mask, completions, -1).tolist()
    rows: list[int] = []
    seen: dict[int, set[tuple[int, ...]]] = {}
    for row in good.nonzero().flatten().tolist():
        own = seen.setdefault(int(indices[row]), set())
        text = tuple(texts[row])
        if text not in own and (per_problem is None or len(own) < per_problem):
            own.add(text)
            rows.append(row)
    chosen = torch.tensor(rows, dtype=torch.long)
    examples = Examples(task.prompts(indices[chosen]), completions[chosen], mask[chosen])
    return VerifiedExamples(examples, indices[chosen], len(indices), len(indices.unique()))


def distillation_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    direction: str = "reverse",
    top_k: int | None = None,
    tail: bool = True,
) -> Tensor:
    """KL between the next-token distributions of student q and teacher p, (..., vocabulary) → (...), with the
    student's gradient.

        reverse:  Σ q·log(q/p)     on-policy distillation (arXiv:2306.08543), seeks one of the teacher's modes
        forward:  Σ p·log(p/q)     what fine-tuning on the teacher's samples estimates, covers all of them

    ``top_k`` takes the sum over the k likeliest tokens only — the student's for the reverse KL, the teacher's for
    the forward one — and with ``tail`` over all others together as one more: still a KL, at most the full one.
    Without the tail it is none, and may be negative. In float32 at least. Raises ValueError for vocabularies that
    differ, another direction and a top_k outside 1 … vocabulary.
    """
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"student_logits {tuple(student_logits.shape)} and teacher_logits {tuple(teacher_logits.shape)} must "
            "have one shape; the vocabularies must be the same"
        )
    if direction not in ("reverse", "forward"):
        raise ValueError(f"direction={direction!r} is unknown; use 'reverse' or 'forward'")
    vocabulary = student_logits.shape[-1]
    if top_k is not None and not 1 <= top_k <= vocabulary:
        raise ValueError(f"top_k={top_k} must lie in 1 … {vocabulary}, the vocabulary")
    kind = torch.promote_types(student_logits.dtype, torch.float32)
    log_q = student_logits.to(kind).log_softmax(-1)
    log_p = teacher_logits.detach().to(kind).log_softmax(-1)
    log_from, log_to = (log_q, log_p) if direction == "reverse" else (log_p, log_q)
    if top_k is None or top_k == vocabulary:
        return (log_from.exp() * (log_from - log_to)).sum(-1)
    best = log_from.detach().topk(top_k, dim=-1).indices
    from_k, to_k = log_from.gather(-1, best), log_to.gather(-1, best)
    kl = (from_k.exp() * (from_k - to_k)).sum(-1)
    if tail:
        # The others' sum itself: 1 − Σ of the best has no digits left where the others are few.
        outside = torch.zeros_like(log_q, dtype=torch.bool).scatter(-1, best, True)
        rest_from, rest_to = (x.masked_fill(outside, float("-inf")).logsumexp(-1) for x in (log_from, log_to))
        kl = kl + rest_from.exp() * (rest_from - rest_to)
    return kl


def distillation_loss(
    student: nn.Module,
    teacher: nn.Module,
    rollout: Rollout,
    direction: str = "reverse",
    temperature: float = 1.0,
    top_k: int | None = None,
    tail: bool = True,
) -> Tensor:
    """Mean over a rollout's scored tokens of :func:`distillation_kl`: with samples of the student's own, on-policy
    distillation over the full vocabulary; with the teacher's, the ordinary kind. A scalar with gradient.

    Raises ValueError for a temperature that is not above 0, nothing to learn from, and differing vocabularies.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0")
    if not rollout.mask.any():
        raise ValueError("the rollout has no scored token")
    logits = student.lm_head(completion_states(student, rollout, rollout.routes)[rollout.mask])
    with torch.no_grad():
        taught = teacher.lm_head(completion_states(teacher, rollout)[rollout.mask])
    return distillation_kl(logits / temperature, taught / temperature, direction, top_k, tail).mean()
