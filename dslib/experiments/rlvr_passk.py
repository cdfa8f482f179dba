"""What RL with verifiable rewards does to what a model can solve: a base, its copies in training, a guesser.

Countdown and reversed addition have answers that can be listed, so all of their rates are exact. Pointer chasing has
a scratchpad of any length, is sampled, and tells whether what was written before a right answer leads to it.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dslib.evaluation.coverage import best_of_n, consensus_at_k
from dslib.evaluation.exact import (
    PLAIN,
    Distribution,
    answer_logp,
    correct_probability,
    exact_pass_at_k,
    guesser_rates,
)
from dslib.evaluation.passk import pass_at_k
from dslib.evaluation.perplexity import response_perplexity
from dslib.evaluation.temperature import matched_temperature
from dslib.experiments.bases import BaseConfig, base_model
from dslib.models.decoder import Decoder, DecoderConfig
from dslib.rl.config import RLConfig
from dslib.rl.rollout import Rollout, SamplingConfig, sample
from dslib.rl.samples import sample_groups
from dslib.rl.sft import SFTConfig
from dslib.rl.trainer import Trainer
from dslib.runs.cache import cached
from dslib.tasks.pointer_chasing import PointerChasing
from dslib.tasks.reversed_addition import ReversedAddition

R = TypeVar("R")

#: pass@k is written down at these, for exact rates and for sampled scratchpads.
KS, SAMPLED_KS = (1, 4, 16, 64, 256, 1024), (1, 4, 16, 64)

#: How sharp a base can be made without training: at this temperature it is nearly greedy.
SHARP = 0.2

#: Entropies are matched by temperatures up to this one.
HIGHEST = 8.0


@dataclass(frozen=True)
class StudyConfig:
    """A base, the run of RL that starts from it, and when and on how many problems both are measured.

    Raises ValueError for marks that do not rise and for numbers out of range, naming them.
    """

    #: Where RL starts.
    base: BaseConfig
    #: How it trains.
    trainer: RLConfig
    #: Steps after which the policy is measured, increasing; the last is the end of the run.
    marks: tuple[int, ...]
    #: So many of the training problems are measured, and of the held-out ones.
    problems: int = 200
    #: Completions of each where rates are sampled.
    samples: int = 128

    def __post_init__(self) -> None:
        if not self.marks or self.marks[0] < 1 or list(self.marks) != sorted(set(self.marks)):
            raise ValueError(f"marks={self.marks} must be increasing numbers of steps, the first at least 1")
        most = min(len(self.base.problems(held_out)) for held_out in (False, True))
        if not 1 <= self.problems <= most:
            raise ValueError(f"problems={self.problems} must be 1 to {most}")
        if self.samples < SAMPLED_KS[-1]:
            raise ValueError(f"samples={self.samples} must be at least {SAMPLED_KS[-1]}, the largest k")

    def measured(self, held_out: bool = False) -> Any:
        """The problems that are measured: the first of those that RL trains on, or of the held-out ones."""
        return replace(self.base.problems(held_out), problems=self.problems)


def countdown() -> StudyConfig:
    """Many answers to a problem, ten thousand to choose from, and one set of weights for all problems."""
    return StudyConfig(BaseConfig(), RLConfig(lr=3e-4), marks=(25, 50, 100, 200, 300))


def addition() -> StudyConfig:
    """The control: one rule and one answer of ten thousand, which the base spoils digit by digit, independently."""
    task = ReversedAddition(problems=60_000, digits=3, noise=0.5)
    model = DecoderConfig(task.vocab_size, d_model=48, layers=2, heads=4)
    base = BaseConfig(task, model, SFTConfig(steps=800, batch_size=128))
    return StudyConfig(base, RLConfig(lr=4e-4), marks=(25, 50, 100), problems=100)


def pointers() -> StudyConfig:
    """A scratchpad that a machine checks; the reward looks at the answer alone."""
    task = PointerChasing(symbols=7, most_hops=6, strides=(0, 1, 1, 2, 3))
    model = DecoderConfig(task.vocab_size, d_model=64, layers=2, heads=4, rope_base=100.0)
    base = BaseConfig(task, model, SFTConfig(steps=1000, batch_size=128, lr=1e-2, rest_lr=4e-3))
    return StudyConfig(base, RLConfig("grpo_no_std", lr=4e-4), marks=(20, 40, 80), problems=100)


def trainer(study: StudyConfig, base: Decoder, seed: int) -> Trainer:
    """The run of ``seed``, before its first step, on a copy of ``base``."""
    return Trainer(copy.deepcopy(base), study.base.problems(), replace(study.trainer, seed=seed))


def rates(model: nn.Module, task: Any, temperature: float = 1.0) -> np.ndarray:
    """p(correct) of every problem of ``task``, exact: (problems,) float32, as precise as the model's logits."""
    with torch.no_grad():
        found = correct_probability(model, task, range(len(task)), Distribution(temperature))
    return found.numpy().astype(np.float32)


def answer_probabilities(model: nn.Module, task: Any, index: int) -> np.ndarray:
    """π(answer | problem) of every correct answer to one problem: (answers,) float64."""
    right = task.correct_answers(index)
    owner = torch.zeros(len(right), dtype=torch.long)
    with torch.no_grad():
        return answer_logp(model, task.prompts([index]), right, owner).exp().numpy()


def wrong_target_rates(model: nn.Module, task: Any) -> np.ndarray:
    """The same of a model that is asked the wrong question: each problem's correct answers, where the end of its prompt
    (Countdown's target, addition's second number) is that of the problem before. What is left of a rate is owed
    to what answers have in common, and not to working out this one. (problems,) float32."""
    prompts = task.prompts(range(len(task)))
    asked = task.digits + isinstance(task, ReversedAddition)  # its = stands after the number
    prompts[:, -asked:] = prompts[:, -asked:].roll(1, dims=0)
    answers = [task.correct_answers(index) for index in range(len(task))]
    owner = torch.arange(len(answers)).repeat_interleave(torch.tensor([len(a) for a in answers]))
    with torch.no_grad():
        p = answer_logp(model, prompts, torch.cat(answers), owner).exp()
    return p.new_zeros(len(answers)).index_add(0, owner, p).numpy().astype(np.float32)


def sampled(
    model: nn.Module, task: Any, group_size: int, temperature: float = 1.0, limit: int = 64, seed: int = 0
) -> Rollout:
    """``group_size`` completions of each of the first ``limit`` problems; the same random numbers for every model."""
    sampling = SamplingConfig(task.max_new_tokens, temperature, end=task.end)
    prompts = task.prompts(range(min(limit, len(task))))
    return sample(model, prompts, sampling, torch.Generator().manual_seed(seed), group_size)


def entropy(model: nn.Module, task: Any, temperature: float = 1.0, group_size: int = 8) -> float:
    """Entropy of an answer in nats, mean over 64 problems: the entropies of its tokens, added up along samples."""
    return sampled(model, task, group_size, temperature).entropy.double().sum(1).mean().item()


def base_entropy_temperature(model: nn.Module, base: nn.Module, task: Any) -> float:
    """The temperature, 1 to :data:`HIGHEST`, at which the model's :func:`entropy` is the base's; else a bound."""
    target = entropy(base, task)
    return matched_temperature(lambda t: entropy(model, task, t), target, 1.0, HIGHEST, halvings=10)


def median_perplexity(base: nn.Module, task: Any, rollout: Rollout) -> float:
    """PPL_base of sampled responses: the median of each problem's, and the mean of these over the problems, as in
    arXiv:2504.13837, Appendix C.4. The rows of a problem stand together, as :func:`sampled` returns them."""
    prompts = rollout.tokens[:, : rollout.prompt_length]
    found = response_perplexity(base, prompts, rollout.completions, rollout.mask)
    problems = len(prompts.unique(dim=0))
    return found.view(problems, -1).quantile(0.5, dim=1).mean().item()


def guessed_perplexity(base: nn.Module, task: Any, group_size: int = 16, limit: int = 64) -> float:
    """PPL_base of a uniform guesser's responses, summarised as :func:`median_perplexity` does."""
    share = "random_share" if hasattr(task, "random_share") else "noise"
    indices = torch.arange(min(limit, len(task))).repeat_interleave(group_size)
    guesser = replace(task, **{share: 1.0})
    completions, mask = guesser.demonstrations(indices, torch.Generator().manual_seed(0))
    found = response_perplexity(base, task.prompts(indices), completions, mask)
    return found.view(-1, group_size).quantile(0.5, dim=1).mean().item()


@dataclass(frozen=True)
class ExactRun:
    """A run on a task whose answers are listed."""

    #: One a mark and set of problems.
    rows: list[dict[str, Any]]
    #: (set, policy) → (problems,): ``base``, ``rl`` at the end, ``matched`` to the base's entropy, ``guesser``, and the
    #: base ``sharp`` and asked for the ``wrong_target``.
    rates: dict[tuple[str, str], np.ndarray]
    #: Of the ``base`` and of the end, ``rl``.
    weights: dict[str, dict[str, Tensor]]


def pass_columns(found: np.ndarray) -> dict[str, float]:
    """pass@k at :data:`KS` of exact rates."""
    return dict(zip([f"pass_{k}" for k in KS], exact_pass_at_k(found, KS).tolist(), strict=True))


def exact_row(
    policy: nn.Module, base: nn.Module, task: Any, found: np.ndarray, temperature: float = 1.0
) -> dict[str, float]:
    """pass@k of exact rates; entropy of an answer, and what its samples cost the base."""
    row = {"temperature": temperature} | pass_columns(found)
    drawn = sampled(policy, task, 16, temperature)
    row["entropy"] = drawn.entropy.double().sum(1).mean().item()
    return row | {"perplexity": median_perplexity(base, task, drawn)}


SETS = {"training": False, "held-out": True}


@cached
def exact_run(study: StudyConfig, seed: int) -> ExactRun:
    """Base, RL, and the rates of both at every mark, on training and on held-out problems."""
    base = base_model(study.base, seed)
    run = trainer(study, base, seed)
    tasks = {name: study.measured(held_out) for name, held_out in SETS.items()}
    rows, found = [], {}
    for step in (0, *study.marks):
        run.run(step)
        for name, task in tasks.items():
            policy, now = "rl" if step else "base", rates(run.model, task)
            rows.append(
                {"policy": policy, "step": step, "set": name, **exact_row(run.model, base, task, now)}
            )
            found[name, policy] = now
    for name, task in tasks.items():
        about = {"step": study.marks[-1], "set": name}
        temperature = base_entropy_temperature(run.model, base, task)
        matched = found[name, "matched"] = rates(run.model, task, temperature)
        rows.append({"policy": "matched", **about, **exact_row(run.model, base, task, matched, temperature)})
        guesses = guesser_rates(task, range(len(task))).astype(np.float32)
        guessed = {"entropy": math.log(task.answer_space), "perplexity": guessed_perplexity(base, task)}
        rows.append({"policy": "guesser", **about, "temperature": 1.0, **pass_columns(guesses), **guessed})
        found[name, "guesser"] = guesses
        found[name, "sharp"] = rates(base, task, SHARP)
        found[name, "wrong_target"] = wrong_target_rates(base, task)
    weights = {"base": base.state_dict(), "rl": run.model.state_dict()}
    return ExactRun([{"seed": seed, **row} for row in rows], found, weights)


def read_scratchpads(task: PointerChasing, rollout: Rollout, group_size: int) -> dict[str, np.ndarray]:
    """What completions say, each (problems, group_size): ``correct``; ``length`` of the thought; ``sound``, correct and
    after a thought, not empty, that leads to the answer; ``unsound``, correct after one that does not; ``chance``,
    correct after a thought that would be sound in the problem before: the soundness of a thought at random."""
    indices = torch.arange(len(rollout) // group_size).repeat_interleave(group_size)
    pads = task.read(indices, rollout.completions, rollout.mask)
    others = task.read(indices.roll(group_size), rollout.completions, rollout.mask)
    table = [
        (
            pad.correct,
            len(pad.thought),
            pad.correct and len(pad.thought) > 0 and pad.valid,
            pad.correct and len(pad.thought) > 0 and not pad.valid,
            pad.correct and len(pad.thought) > 0 and other.valid,
        )
        for pad, other in zip(pads, others, strict=True)
    ]
    columns = np.array(table, dtype=np.int64).T.reshape(5, -1, group_size)
    return dict(zip(("correct", "length", "sound", "unsound", "chance"), columns, strict=True))


def direct_rates(model: nn.Module, task: PointerChasing) -> np.ndarray:
    """p(correct) of an answer without any thought, exact: (problems,) float64."""
    indices = torch.arange(len(task))
    traces, _ = task.traces(indices, torch.zeros_like(indices))
    given = torch.cat((task.prompts(indices), traces[:, :2]), dim=1)  # the two tags
    with torch.no_grad():
        logp = PLAIN.logp(model(given)[:, -1])
    return logp.gather(1, traces[:, 2:3]).exp().squeeze(1).numpy()


def greedy_rate(model: nn.Module, task: Any) -> float:
    """The share of the problems that the likeliest token at a time solves."""
    greedy = SamplingConfig(task.max_new_tokens, temperature=0.0, end=task.end)
    return sample_groups(model, task, torch.arange(len(task)), greedy)[1].mean().item()


def scratchpad_row(policy: nn.Module, task: PointerChasing, group_size: int) -> dict[str, float]:
    """pass@k at :data:`SAMPLED_KS` of right answers and of soundly found ones; means over right answers of how they
    were found; the greedy answer's rate; length of the thought."""
    rollout = sampled(policy, task, group_size, limit=len(task))
    read = read_scratchpads(task, rollout, group_size)
    row = {"length": float(read["length"].mean())}
    for name, key in (("correct", "pass"), ("sound", "sound")):
        counts = read[name].sum(axis=1)
        row |= {f"{key}_{k}": float(np.mean(pass_at_k(group_size, counts, k))) for k in SAMPLED_KS}
    right = max(1, read["correct"].sum())
    row |= {f"share_{name}": float(read[name].sum() / right) for name in ("sound", "unsound", "chance")}
    return row | {"greedy": greedy_rate(policy, task), "direct": float(direct_rates(policy, task).mean())}


def choices(
    model: nn.Module,
    task: PointerChasing,
    group_size: int = 64,
    seed: int = 0,
    kept: np.ndarray | None = None,
) -> dict[str, list[float]]:
    """How often k of ``group_size`` samples hold a right answer, how often their majority is right, and how often the
    likeliest of them to the model itself is: for each k of :data:`SAMPLED_KS`, means over the problems, or over
    those ``kept``, (problems,) bool. Raises ValueError where none is."""
    if kept is not None and not kept.any():
        raise ValueError("kept leaves no problem; keep one at least")
    rollout = sampled(model, task, group_size, limit=len(task), seed=seed)
    indices = torch.arange(len(task)).repeat_interleave(group_size)
    pads = task.read(indices, rollout.completions, rollout.mask)
    answers = [[pad.answer for pad in pads[i : i + group_size]] for i in range(0, len(pads), group_size)]
    right = np.array([pad.correct for pad in pads]).reshape(-1, group_size)
    truth = [task.problem(i).answer for i in range(len(task))]
    scores = rollout.logp.sum(1).view(-1, group_size)
    found = {
        "pass@k": [pass_at_k(group_size, right.sum(axis=1), k) for k in SAMPLED_KS],
        "cons@k": [consensus_at_k(answers, truth, k, resamples=200) for k in SAMPLED_KS],
        "best of k": [best_of_n(scores, right, k) for k in SAMPLED_KS],
    }
    chosen = slice(None) if kept is None else kept
    return {
        name: [float(np.mean(np.asarray(values)[chosen])) for values in columns]
        for name, columns in found.items()
    }


@dataclass(frozen=True)
class ScratchpadRun:
    """A run on pointer chasing: ``rows``, one a mark and set of problems; ``weights`` of the base and of the end."""

    rows: list[dict[str, Any]]
    weights: dict[str, dict[str, Tensor]]


@cached
def scratchpad_run(study: StudyConfig, seed: int) -> ScratchpadRun:
    """Base, RL, and what both write at every mark, on training and on held-out problems."""
    base = base_model(study.base, seed)
    run = trainer(study, base, seed)
    rows = []
    for step in (0, *study.marks):
        run.run(step)
        for name, held_out in SETS.items():
            row = scratchpad_row(run.model, study.measured(held_out), study.samples)
            rows.append({"seed": seed, "step": step, "set": name, **row})
    return ScratchpadRun(rows, {"base": base.state_dict(), "rl": run.model.state_dict()})


def crossing(first: np.ndarray, second: np.ndarray, most: int = 2**14) -> int:
    """The smallest k at which the pass@k of the rates ``second`` passes that of ``first``; 0 where it never does up to
    ``most``. Rates (problems,) of the same problems."""
    ks = np.arange(1, most + 1)
    ahead = np.zeros(most)
    for p, q in zip(first, second, strict=True):
        ahead += (1 - np.float64(p)) ** ks - (1 - np.float64(q)) ** ks
    later = ahead > 0
    return int(ks[later][0]) if later.any() and not later[0] else 0
