"""Context management, measured: every arm plays the same worlds with the same luck.

An arm is a strategy in a window, a policy, a way to think. Its episodes come in parts of as many worlds each, so that
a part which is played again alone has the same batches, and with them the same numbers to the last digit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dslib import data
from dslib.experiments.search_policy import (
    CHECKPOINT,
    HELD_OUT,
    SFT_CHECKPOINT,
    PolicyConfig,
    evaluate,
    rl_policy,
    sft_policy,
    shipped_policy,
)
from dslib.models.decoder import Decoder
from dslib.runs import checkpoints
from dslib.runs.cache import cached
from dslib.runs.workers import in_workers
from dslib.tasks.search_episode import (
    STRATEGIES,
    History,
    SearchEpisode,
    SearchTask,
    Strategy,
    is_page,
)
from dslib.tasks.search_tokens import SearchVocabulary
from dslib.tasks.search_world import SearchWorlds

if TYPE_CHECKING:
    import pandas

#: policy → its shipped weights; the last is trained in the main window, and need not be there.
POLICIES = {"rl": CHECKPOINT, "sft": SFT_CHECKPOINT, "window": "search_policy_128"}
THINKING = ("on", "off", "random", "scrambled")


def random_75(history: History, words: SearchVocabulary) -> History:
    """As :func:`~dslib.tasks.search_episode.discard_75`, but which turns leave is drawn at random; the newest stays.

    The draw is seeded by the view, so that an episode can be played again.
    """
    *older, newest = history.turns
    kept = len(history.turns) - int(0.75 * len(history.turns)) - 1
    draw = np.random.default_rng(history.tokens(words))
    places = sorted(draw.permutation(len(older))[:kept].tolist())
    return replace(history, turns=(*(older[place] for place in places), newest))


NAMED: dict[str, Strategy] = {**STRATEGIES, "random_75": random_75}


class RandomThoughts(SearchEpisode):
    """The policy must write as many verdicts after a page as ever, and each is drawn at random."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._force(0)

    def ended(self, written: Sequence[int]) -> bool:
        """As in :class:`SearchEpisode`; sets what the next token may be."""
        self._force(len(written))
        return super().ended(written)

    def write(self, written: Sequence[int]) -> None:
        """As in :class:`SearchEpisode`."""
        super().write(written)
        self._force(0)

    def _force(self, place: int) -> None:
        words = self.words
        self.forbidden = list(words.verdicts)
        if self.turns and is_page(self.turns[-1], words) and place < words.worlds.attributes:
            draw = np.random.default_rng((*self.session.world.key, len(self.turns), place))
            forced = int(draw.choice(words.verdicts))
            self.forbidden = [token for token in range(len(words)) if token != forced]


class ScrambledThoughts(SearchEpisode):
    """The policy thinks as it likes, and remembers something else: once a turn is over, its verdicts are drawn anew."""

    def _look(self) -> None:
        *before, newest = self.history.turns
        draw = np.random.default_rng((*self.session.world.key, len(self.turns)))
        thought = tuple(draw.choice(self.words.verdicts, len(newest.thought)).tolist())
        self.history = replace(self.history, turns=(*before, replace(newest, thought=thought)))
        super()._look()


@dataclass(frozen=True)
class VariantTask(SearchTask):
    """Episodes of another ``kind``."""

    kind: type[SearchEpisode] = SearchEpisode

    def episode(self, index: int) -> SearchEpisode:
        """A new episode in a world."""
        options = (self.window, self.strategy, self.reasoning, self.thinking)
        return self.kind(self.worlds, index, self.words, *options)


@dataclass(frozen=True)
class Arm:
    """One way to play. Raises ValueError for another strategy, thinking or policy."""

    #: Tokens that the policy can read (None: nothing overflows).
    window: int | None = None
    #: Of :data:`NAMED`, or None.
    strategy: str | None = None
    #: Which thoughts stay, as in :class:`SearchEpisode`.
    reasoning: str = "v32"
    #: Of :data:`THINKING`.
    thinking: str = "on"
    #: Of :data:`POLICIES`.
    policy: str = "rl"
    #: Of the sampler; 0 is greedy.
    temperature: float = 1.0
    #: The number of an independent repeat.
    sample: int = 0

    def __post_init__(self) -> None:
        for name, known in (("strategy", (None, *NAMED)), ("thinking", THINKING), ("policy", POLICIES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {', '.join(map(str, known))}")

    @property
    def name(self) -> str:
        """Such as ``discard_all@128`` or ``none@free, thinking off``."""
        parts = [f"{self.strategy or 'none'}@{self.window or 'free'}"]
        parts += [self.reasoning] * (self.reasoning != "v32")
        parts += [f"thinking {self.thinking}"] * (self.thinking != "on")
        parts += [f"policy {self.policy}"] * (self.policy != "rl")
        parts += ["greedy"] * (self.temperature == 0)
        return ", ".join(parts + [f"sample {self.sample}"] * (self.sample > 0))

    def task(self, worlds: SearchWorlds) -> SearchTask:
        """The episodes of this arm."""
        kind = {"random": RandomThoughts, "scrambled": ScrambledThoughts}.get(self.thinking, SearchEpisode)
        strategy = NAMED[self.strategy] if self.strategy else None
        return VariantTask(worlds, self.window, strategy, self.reasoning, self.thinking != "off", kind)


@dataclass(frozen=True)
class StudyConfig:
    """Sizes of the study. Raises ValueError for a main window that is not among the windows."""

    #: Parts that the held-out worlds come in.
    parts: int = 5
    #: Worlds in a part.
    part: int = 200
    #: Windows, in tokens.
    windows: tuple[int, ...] = (96, 128, 192)
    #: The window in which most is measured.
    main: int = 128
    #: Episodes a world in it without a strategy.
    samples: int = 4
    #: Calls that an episode may make (None: as the policy was trained).
    max_calls: int | None = None
    #: How the policies are to be trained here; None takes those that ship.
    trained: PolicyConfig | None = None

    def __post_init__(self) -> None:
        if self.main not in self.windows:
            raise ValueError(f"main={self.main} is not among the windows {self.windows}")

    @property
    def live(self) -> tuple[Arm, ...]:
        """The arms that are played again wherever the table is read."""
        return (Arm(), *(Arm(self.main, strategy) for strategy in (None, *STRATEGIES)))

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All arms; those of the policy that is trained in the main window only where its weights are."""
        main = self.main
        found = [Arm(), *(Arm(w, s) for w in self.windows for s in (None, *STRATEGIES))]
        found += [Arm(main, sample=sample) for sample in range(1, self.samples)]
        found += [Arm(main, "random_75")]
        for place in ((None, None), (main, None), (main, "discard_all")):
            found += [Arm(*place, thinking="off"), Arm(*place, thinking="random")]
            found += [Arm(*place, thinking="scrambled"), Arm(*place, reasoning="drop_all")]
            if self.trained is None and _is_shipped("window"):
                found.append(Arm(*place, policy="window"))
        return (
            *found,
            Arm(sample=1),
            Arm(policy="sft"),
            Arm(policy="sft", temperature=0.0),
            Arm(temperature=0.0),
            Arm(main, "discard_all", policy="sft"),
        )


def _is_shipped(policy: str) -> bool:
    try:
        data.path(f"checkpoints/{POLICIES[policy]}.safetensors")
    except FileNotFoundError:
        return False
    return True


@cached
def trained_weights(config: PolicyConfig, seed: int) -> dict[str, dict[str, Any]]:
    """Weights after fine-tuning and after GRPO: what the documented command ships."""
    model, _ = sft_policy(config, seed)
    found = {"sft": {name: weight.clone() for name, weight in model.state_dict().items()}}
    rl_policy(config, model, seed)
    return {**found, "rl": model.state_dict()}


def policy_of(config: StudyConfig, policy: str = "rl", seed: int = 0) -> tuple[Decoder, SearchWorlds]:
    """A policy and the held-out worlds that all arms are measured in. Raises FileNotFoundError for one that is
    neither shipped nor trained here."""
    if config.trained is None:
        model, worlds, _ = shipped_policy(POLICIES[policy])
    else:
        model, worlds = config.trained.model.build(), config.trained.worlds
        model.load_state_dict(trained_weights(config.trained, seed)[policy])
    skip, count = worlds.skip + HELD_OUT[0], HELD_OUT[1]
    calls = worlds.max_calls if config.max_calls is None else config.max_calls
    return checkpoints.rounded(model).eval(), replace(worlds, skip=skip, worlds=count, max_calls=calls)


def fingerprint(config: StudyConfig, policy: str) -> str:
    """Of the shipped weights, for the key of what is kept; empty where they are trained here."""
    if config.trained is not None:
        return ""
    return hashlib.sha256(data.path(f"checkpoints/{POLICIES[policy]}.safetensors").read_bytes()).hexdigest()[
        :12
    ]


@cached
def played(config: StudyConfig, arm: Arm, part: int, seed: int, weights: str) -> list[dict[str, Any]]:
    """The episodes of an arm in one part of the worlds, as :func:`evaluate`; ``weights``: :func:`fingerprint`."""
    model, worlds = policy_of(config, arm.policy, seed)
    indices = range(part * config.part, (part + 1) * config.part)
    rows = evaluate(model, arm.task(worlds), indices, arm.sample, seed, arm.temperature, config.part)
    return [{"arm": arm.name, **row} for row in rows]


def measure(
    config: StudyConfig,
    arms: Iterable[Arm],
    parts: Iterable[int],
    seed: int = 0,
    jobs: int = 1,
    progress: Callable[..., Any] = lambda steps, **_: steps,
) -> pandas.DataFrame:
    """The rows of arms in parts of the worlds, ``jobs`` parts at a time; ``progress``: as
    :func:`dslib.notebook.progress`."""
    import pandas

    arms, parts = list(arms), list(parts)
    prints = {policy: fingerprint(config, policy) for policy in {arm.policy for arm in arms}}
    if config.trained is not None:
        trained_weights(config.trained, seed)
    calls = [(config, arm, part, seed, prints[arm.policy]) for arm in arms for part in parts]
    found = progress(in_workers(played, calls, jobs), total=len(calls), label="episodes")
    return pandas.DataFrame([row for rows in found for row in rows])
