"""The exact laboratory: what a policy does on average, computed from its probabilities and not by sampling.

Where the correct answers to a problem can be listed, the chance to answer it is the sum of their probabilities,
p = Σ π(answer | problem), and pass@k = 1 − (1 − p)^k for every k. With gradients on, p has the exact
gradient of the expected reward. Distributions are those that a sampler draws from: temperature first, then
top-k and top-p, as in :func:`dslib.models.filter_logits`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from dslib.attention import KVCache
from dslib.evaluation.passk import checked_rates, rates_to_pass_at_k
from dslib.models.generation import filter_logits
from dslib.tasks.verifiable import EnumerableTask

#: Mass outside the listed answers below this is rounding, and taken for none.
NO_MASS = 1e-9


@dataclass(frozen=True)
class Distribution:
    """Temperature and filters of the distribution that is examined; the temperature is positive."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be positive and finite")
        filter_logits(torch.zeros(1), self.top_k, self.top_p)

    def logp(self, logits: Tensor) -> Tensor:
        """(..., vocabulary) logits → log-probabilities, float64; −inf for what the filters leave out."""
        return filter_logits(logits.double() / self.temperature, self.top_k, self.top_p).log_softmax(dim=-1)


PLAIN = Distribution()


def sequence_logp(
    model: nn.Module,
    prompts: Tensor,
    completions: Tensor,
    mask: Tensor | None = None,
    distribution: Distribution = PLAIN,
) -> Tensor:
    """log π(y_t | x, y_<t) of every token by one teacher-forced pass, with gradient where it is on.

    prompts: (sequences, time) int64; completions: (sequences, new) int64; mask: the same, bool, None for all.
    Tokens that are masked out are never read. Returns (sequences, new) float64, 0 where masked out.
    Raises ValueError for shapes that do not fit, an empty prompt, or tokens outside the model's vocabulary.
    """
    mask = torch.ones_like(completions, dtype=torch.bool) if mask is None else mask
    if prompts.ndim != 2 or completions.shape != mask.shape or len(prompts) != len(completions):
        raise ValueError(
            f"prompts {tuple(prompts.shape)} must be (sequences, time), completions "
            f"{tuple(completions.shape)} and mask {tuple(mask.shape)} (sequences, new)"
        )
    if 0 in (*prompts.shape, *completions.shape):
        raise ValueError(
            f"prompts {tuple(prompts.shape)} and completions {tuple(completions.shape)} must not be empty"
        )
    tokens = torch.where(mask, completions, 0)
    _check_tokens(model, prompts, tokens)
    with _evaluating(model):
        logits = model(torch.cat((prompts, tokens[:, :-1]), dim=1))[:, prompts.shape[1] - 1 :]
    found = distribution.logp(logits).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return torch.where(mask, found, 0.0)


def answer_logp(
    model: nn.Module,
    prompts: Tensor,
    answers: Tensor,
    owner: Tensor,
    distribution: Distribution = PLAIN,
    rows: int = 1024,
    share_prefixes: bool = True,
) -> Tensor:
    """log π(answer | prompt) of many answers to few prompts: (m,) float64, with gradient where it is on.

    prompts: (n, time) int64; answers: (m, length) int64, −1 after the end of a shorter one; owner: (m,) int64,
    which prompt each answers. Prefixes that answers share are computed once, with a KV cache, ``rows`` answers
    at a time; ``share_prefixes=False``, or a model whose cache keeps more than keys and values, gives each
    answer a teacher-forced row of its own. Raises ValueError for shapes that do not fit or tokens outside the
    model's vocabulary.
    """
    if prompts.ndim != 2 or 0 in prompts.shape or answers.ndim != 2 or owner.shape != answers.shape[:1]:
        raise ValueError(
            f"prompts {tuple(prompts.shape)} must be (n, time), answers {tuple(answers.shape)} (m, length), "
            f"owner {tuple(owner.shape)} (m,)"
        )
    if rows < 1:
        raise ValueError(f"rows={rows} must be at least 1")
    if answers.numel() == 0:
        return torch.zeros(0, dtype=torch.float64, device=prompts.device)
    if int(owner.min()) < 0 or int(owner.max()) >= len(prompts):
        raise ValueError(f"owner holds numbers outside 0 … {len(prompts) - 1}, the prompts")
    live = answers >= 0
    if not live[:, 0].all() or (live[:, 1:] & ~live[:, :-1]).any():
        raise ValueError("an answer is empty or goes on after −1, which stands only after its end")
    _check_tokens(model, prompts, torch.where(live, answers, 0))
    # In lexicographic order answers with a common prefix stand together, and few chunks cut through one.
    order = torch.from_numpy(np.lexsort((*answers.T.flip(0).cpu().numpy(), owner.cpu().numpy())))
    found = []
    with _evaluating(model):
        for part in order.to(answers.device).split(rows):
            logp = (
                _by_prefixes(model, prompts, answers[part], owner[part], distribution)
                if share_prefixes
                else None
            )
            if logp is None:
                share_prefixes = False
                own = prompts[owner[part]]
                logp = sequence_logp(model, own, answers[part], live[part], distribution).sum(dim=1)
            found.append(logp)
    return torch.cat(found)[order.argsort().to(answers.device)]


def correct_probability(
    model: nn.Module,
    task: EnumerableTask,
    indices: Tensor | Sequence[int],
    distribution: Distribution = PLAIN,
    rows: int = 1024,
) -> Tensor:
    """p(correct | problem) = Σ π(answer | problem) over the task's correct answers: (n,) float64.

    A completion is taken to be exactly one of these, as from a sampler with the task's ``max_new_tokens``.
    With gradients on, the mean of p has the exact policy gradient of a reward of 0 or 1.
    Raises ValueError for no index, a vocabulary smaller than the task's, or an answer listed twice.
    """
    prompts, answers, owner = _listed(model, task, indices, task.correct_answers)
    logp = answer_logp(model, prompts, answers, owner, distribution, rows)
    return logp.new_zeros(len(prompts)).index_add(0, owner, logp.exp())


def guesser_rates(task: EnumerableTask, indices: Tensor | Sequence[int]) -> np.ndarray:
    """p(correct | problem) of a guesser to whom all well-formed answers are equally likely: (n,) float64.

    A pass@k says something only where it differs from the guesser's. Raises ValueError for no index.
    """
    indices = _nonempty(indices)
    return np.array([len(task.correct_answers(index)) / task.answer_space for index in indices])


def exact_pass_at_k(rates: ArrayLike | Tensor, k: ArrayLike) -> float | np.ndarray:
    """E[1 − (1 − p)^k], the mean over problems, for one k or many.

    rates: (problems,) exact rates; k: a whole number, or several of them (ks,) → float, or float64 (ks,).
    Raises as :func:`~dslib.evaluation.passk.rates_to_pass_at_k`, and ValueError for rates of another shape.
    """
    rates = checked_rates("rates", rates)
    if rates.ndim != 1 or np.ndim(k) > 1:
        raise ValueError(
            f"rates of {rates.ndim} and k of {np.ndim(k)} dimensions; give (problems,) and (ks,)"
        )
    found = rates_to_pass_at_k(rates[:, None], k)
    means = found.mean(axis=0)
    return float(means[0]) if np.ndim(k) == 0 else means


def answer_entropy(
    model: nn.Module,
    task: EnumerableTask,
    indices: Tensor | Sequence[int],
    distribution: Distribution = PLAIN,
    rows: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Entropy in nats of the answer to each problem, and the probability of anything but a well-formed one.

    Returns (entropy, outside), each (n,) float64. What is not well formed counts as one outcome, so the entropy
    is a lower bound of that of the text, and equal to it where ``outside`` is 0.
    Raises as :func:`correct_probability`.
    """
    logp, owner, n = _all_answers(model, task, indices, distribution, rows)
    outside = _outside(logp, owner, n)
    terms = -logp.exp() * torch.where(logp > -torch.inf, logp, 0.0)
    return logp.new_zeros(n).index_add(0, owner, terms) - torch.xlogy(outside, outside), outside


def answer_kl(
    policy: nn.Module,
    reference: nn.Module,
    task: EnumerableTask,
    indices: Tensor | Sequence[int],
    distribution: Distribution = PLAIN,
    rows: int = 1024,
) -> tuple[Tensor, Tensor]:
    """KL(policy ‖ reference) in nats over the answer to each problem: (kl, the policy's mass outside).

    Each (n,) float64; outcomes as in :func:`answer_entropy`: without the one for the rest ("tail") the sum could
    be negative. Infinite where the reference never says what the policy says. With gradients on, the KL has its
    exact gradient. Raises as :func:`correct_probability`, and ValueError for two vocabularies.
    """
    sizes = [_vocabulary(model, task) for model in (policy, reference)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the policy has a vocabulary of {sizes[0]} tokens and the reference of {sizes[1]}")
    logp, owner, n = _all_answers(policy, task, indices, distribution, rows)
    logq, _, _ = _all_answers(reference, task, indices, distribution, rows)
    return grouped_kl(logp, logq, owner, n), _outside(logp, owner, n)


def grouped_kl(logp: Tensor, logq: Tensor, owner: Tensor, n: int) -> Tensor:
    """Σ p·log(p/q) over the listed outcomes of each owner and one for the rest: (m,) float64 → (n,)."""
    # Where p is 0 both logarithms are replaced before they are used: 0·∞ would be NaN, in the gradient as well.
    said = logp > -torch.inf
    terms = logp.exp() * (torch.where(said, logp, 0.0) - torch.where(said, logq, 0.0))
    p, q = _outside(logp, owner, n), _outside(logq, owner, n)
    rest = p * (torch.where(p > 0, p, 1.0).log() - torch.where(p > 0, q, 1.0).log())
    return logp.new_zeros(n).index_add(0, owner, terms) + rest


def _outside(logp: Tensor, owner: Tensor, n: int) -> Tensor:
    rest = 1 - logp.new_zeros(n).index_add(0, owner, logp.exp())
    return torch.where(rest < NO_MASS, 0.0, rest)


def _all_answers(
    model: nn.Module,
    task: EnumerableTask,
    indices: Tensor | Sequence[int],
    distribution: Distribution,
    rows: int,
) -> tuple[Tensor, Tensor, int]:
    prompts, answers, owner = _listed(model, task, indices, task.answers)
    return answer_logp(model, prompts, answers, owner, distribution, rows), owner, len(prompts)


def _listed(model, task: EnumerableTask, indices, listing) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts (n, time), the answers that ``listing`` has for them, all (m, length), and their owners (m,)."""
    indices = _nonempty(indices)
    _vocabulary(model, task)
    lists = [listing(index) for index in indices]
    length = max(answers.shape[1] for answers in lists)
    padded = [nn.functional.pad(answers, (0, length - answers.shape[1]), value=-1) for answers in lists]
    for index, answers in zip(indices, padded, strict=True):
        if len(answers.unique(dim=0)) < len(answers):
            raise ValueError(f"the task lists an answer to problem {index} twice, and it would count twice")
    owner = torch.arange(len(lists)).repeat_interleave(torch.tensor([len(answers) for answers in lists]))
    device = next(model.parameters()).device
    return task.prompts(indices).to(device), torch.cat(padded).to(device), owner.to(device)


def _nonempty(indices: Tensor | Sequence[int]) -> list[int]:
    indices = indices.tolist() if isinstance(indices, Tensor) else list(indices)
    if not indices:
        raise ValueError("indices are empty; name at least one problem")
    return indices


def _vocabulary(model: nn.Module, task: EnumerableTask) -> int:
    """The size of the model's vocabulary; raises ValueError where it is smaller than the task's."""
    size = model.lm_head.out_features
    if size < task.vocab_size:
        raise ValueError(f"the model has a vocabulary of {size} tokens and the task of {task.vocab_size}")
    return size


def _check_tokens(model: nn.Module, *tokens: Tensor) -> None:
    size = model.lm_head.out_features
    for found in tokens:
        wrong = found[(found < 0) | (found >= size)]
        if wrong.numel():
            raise ValueError(f"token {int(wrong[0])} lies outside the model's vocabulary of {size}")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _by_prefixes(
    model: nn.Module, prompts: Tensor, answers: Tensor, owner: Tensor, distribution: Distribution
) -> Tensor | None:
    """log π of each answer, from a tree of their prefixes, level by level; None for caches with states."""
    asked, node = owner.unique(return_inverse=True)
    cache = KVCache()
    logits = model(prompts[asked], cache=cache)[:, -1]
    if cache.states or not cache.layers:
        return None
    vocabulary = logits.shape[-1]
    live = answers >= 0
    tokens = torch.where(live, answers, 0)
    total = torch.zeros(len(answers), dtype=torch.float64, device=answers.device)
    for place in range(answers.shape[1]):
        gained = distribution.logp(logits)[node, tokens[:, place]]
        total = total + torch.where(live[:, place], gained, 0.0)
        if place + 1 < answers.shape[1]:
            prefixes, node = (node * vocabulary + tokens[:, place]).unique(return_inverse=True)
            parents = prefixes // vocabulary
            cache = _of_parents(cache, parents)
            logits = model((prefixes % vocabulary).unsqueeze(1), cache=cache)[:, -1]
    return total


def _of_parents(cache: KVCache, parents: Tensor) -> KVCache:
    """A cache with one row for each of ``parents``, a copy of that row."""
    found = KVCache()
    found.layers = {layer: (k[parents], v[parents]) for layer, (k, v) in cache.layers.items()}
    found.length = cache.length
    return found
