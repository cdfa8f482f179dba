"""Cold start in symbols: thoughts between tool calls, from data in which no thought is followed by another search.

Data are at hand under system prompts of their own:

    read:                       the record of a search → whether the last page fits: the answer, or ``nothing``
    name:  page:  clues:        the same → the entity of the last page, its facts, what the question asks for
    think: read:  think: name:  … each of these again, a verdict for each attribute of the last page before it
    tools:                      a question → the calls of a hasty agent, which does not check what it reads

So ``think:`` is an instruction that goes with others. A policy learns all of this. The cold start asks for what no
example has, ``think: tools:``, thoughts between calls; reinforcement learning begins with whatever comes of it
(DeepSeek-V3.2, arXiv:2512.02556, §3.2.2, Tables 6 to 8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dslib.experiments.controls import ShuffledEpisodeTrainer
from dslib.experiments.search_policy import FINE_TUNING, HELD_OUT, TRAINING, part_of, tune
from dslib.experiments.search_policy import TRAINER as SEARCH_TRAINER
from dslib.models.decoder import Decoder, DecoderConfig
from dslib.rl.config import RLConfig
from dslib.rl.episodes import EpisodeTrainer, play
from dslib.rl.rollout import SamplingConfig
from dslib.rl.sft import SFTConfig
from dslib.runs import checkpoints
from dslib.runs.cache import cached
from dslib.runs.workers import in_workers, one_thread
from dslib.tasks.search_episode import History, SearchEpisode, SearchTask, is_page
from dslib.tasks.search_expert import expert_turn, hasty_turn, padded
from dslib.tasks.search_tokens import SearchVocabulary
from dslib.tasks.search_world import SearchWorlds

if TYPE_CHECKING:
    import pandas

#: What may be asked about a record that has been read.
READINGS = ("read:", "name:", "page:", "clues:")
#: System prompts that episodes are played under. "both" is the cold start's, and stands in no data; "novel" is as new
#: a pair of words, without the one that asks for thoughts.
PROMPTS = {"tools": "tools:", "both": "think: tools:", "novel": "name: tools:"}
#: What is trained by GRPO: stage → (the prompt it is trained with, whether rewards are shuffled within the batch).
GRPO_STAGES = {
    "GRPO": ("both", False),
    "GRPO, shuffled rewards": ("both", True),
    "GRPO, tools:": ("tools", False),
}
#: Stage → the checkpoint that ships.
SHIPPED = {"fine-tuned": "cold_start_sft", "GRPO": "cold_start"}
#: Names of the shipped tables.
TABLES = ("cold_start", "cold_start_curves")


class PromptedVocabulary(SearchVocabulary):
    """The words of a search world, and after them those of the system prompts."""

    def __init__(self, worlds: SearchWorlds) -> None:
        super().__init__(worlds)
        self.system = self._added(("think:", "tools:", *READINGS))


class PromptedEpisode(SearchEpisode):
    """An episode with the words ``system`` in front of all that the policy reads; nothing overflows."""

    def __init__(self, worlds: SearchWorlds, index: int, words: SearchVocabulary, system: str) -> None:
        super().__init__(worlds, index, words)
        self.system = words.encode(system)
        self.prompt = self.system + self.prompt

    def _look(self) -> None:
        super()._look()
        self.prompt = self.system + self.prompt


@dataclass(frozen=True)
class PromptedTask(SearchTask):
    """Episodes under the prompt of that name in :data:`PROMPTS`; nothing overflows, and nothing is forbidden.

    Raises ValueError for another prompt, and for a window, a strategy or a policy of thoughts.
    """

    prompt: str = "both"

    def __post_init__(self) -> None:
        if self.prompt not in PROMPTS:
            raise ValueError(f"prompt={self.prompt!r} is none of {', '.join(PROMPTS)}")
        options = (self.window, self.strategy, self.reasoning, self.thinking)
        if options != (None, None, "v32", True):
            raise ValueError("window, strategy, reasoning and thinking are not for episodes under a prompt")
        super().__post_init__()

    @cached_property
    def words(self) -> PromptedVocabulary:
        """Words and tokens."""
        return PromptedVocabulary(self.worlds)

    def episode(self, index: int) -> PromptedEpisode:
        """A new episode in a world."""
        return PromptedEpisode(self.worlds, index, self.words, PROMPTS[self.prompt])


def thought_share(episode: SearchEpisode) -> float:
    """Of the pages that an episode has shown, the share after which the policy wrote a thought, right or wrong: a
    verdict for each attribute and nothing else, and then a call. nan for an episode without a page."""
    words, turns = episode.words, episode.turns
    thoughts = [turn.thought for turn in turns[1:]] + [()] * (episode.outcome == "no call")
    after = [thought for turn, thought in zip(turns, thoughts, strict=False) if is_page(turn, words)]
    whole = [len(t) == words.worlds.attributes and set(t) <= set(words.verdicts) for t in after]
    return float(np.mean(whole)) if whole else float("nan")


def is_interleaved(episode: SearchEpisode) -> bool:
    """Whether an episode is a valid interleaved trajectory, in this world's terms: a thought after every page, as in
    :func:`thought_share`, at least one of them followed by a search or another page, and an answer at the end."""
    words, turns = episode.words, episode.turns
    goes_on = any(is_page(turn, words) and after.call[0] != words.answer for turn, after in pairwise(turns))
    return episode.session.answered is not None and goes_on and thought_share(episode) == 1.0


def reading_example(
    worlds: SearchWorlds, index: int, words: PromptedVocabulary, draw: np.random.Generator, prompt: str
) -> tuple[list[int], list[bool]]:
    """(tokens, which are learnt): the record of a search stands in the prompt, and ends with a page, with probability
    a half the right one, else one that fits a clue. Then, if the prompt asks for thinking, verdicts on that page; and
    what it asks for of :data:`READINGS`, about that page alone. Nothing is searched or opened.

    Raises ValueError for a prompt of another form."""
    if prompt.removeprefix("think: ") not in READINGS:
        raise ValueError(f"prompt={prompt!r} is none of {', '.join(READINGS)}, with or without 'think: '")
    episode, world = PromptedEpisode(worlds, index, words, prompt), worlds.world(index)
    turns = int(draw.integers(6))
    while episode.outcome is None and len(episode.turns) < turns:
        episode.write(hasty_turn(episode.history, words, draw, answers=0.0))
    clues = [(attribute, value) for attribute, value in enumerate(world.question) if value is not None]
    fits = world.matches(*clues[draw.integers(len(clues))])
    shown = world.target if draw.random() < 0.5 else int(draw.choice(fits))
    page = [words.fact(attribute, value) for attribute, value in enumerate(world.facts[shown].tolist())]
    read = episode.system + episode.history.tokens(words) + [words.open, words.entities[shown], *page]
    verdicts = words.verdicts_of(episode.history.question, page)
    end = {
        "read:": [words.no_result] if words.other in verdicts else [words.answer, words.entities[shown]],
        "name:": [words.entities[shown]],
        "page:": page,
        "clues:": [words.fact(*clue) for clue in clues],
    }[prompt.split()[-1]]
    written = verdicts * prompt.startswith("think:") + end
    return read + written, [False] * len(read) + [True] * len(written)


def agent_example(
    worlds: SearchWorlds, index: int, words: PromptedVocabulary, draw: np.random.Generator, answers: float
) -> tuple[list[int], list[bool]]:
    """(tokens, which are learnt): an episode of :func:`~dslib.tasks.search_expert.hasty_turn`, without a thought."""
    episode = PromptedEpisode(worlds, index, words, PROMPTS["tools"])
    return _rendered(episode, lambda history: hasty_turn(history, words, draw, answers))


def demonstration(
    worlds: SearchWorlds, index: int, words: PromptedVocabulary, draw: np.random.Generator
) -> tuple[list[int], list[bool]]:
    """(tokens, which are learnt): what the cold start asks for, under its prompt: an episode of
    :func:`~dslib.tasks.search_expert.expert_turn`, thoughts between calls."""
    episode = PromptedEpisode(worlds, index, words, PROMPTS["both"])
    return _rendered(episode, lambda history: expert_turn(history, words, draw))


def _rendered(episode: PromptedEpisode, turn: Callable[[History], list[int]]) -> tuple[list[int], list[bool]]:
    tokens, own = list(episode.prompt), [False] * len(episode.prompt)
    while episode.outcome is None:
        written = turn(episode.history)
        episode.write(written)
        result = episode.turns[-1].result if episode.outcome is None else ()
        tokens += [*written, *result]
        own += [True] * len(written) + [False] * len(result)
    return tokens, own


@dataclass(frozen=True)
class ColdStartData:
    """Examples to fine-tune on. What is neither an agent's nor a demonstration is a :func:`reading_example`, of every
    kind. Without demonstrations no thought is followed by a search or a page.

    Raises ValueError for shares outside 0 … 1.
    """

    #: Where they come from.
    worlds: SearchWorlds
    #: Share of :func:`agent_example`.
    agents: float = 0.2
    #: As in :func:`agent_example`.
    answers: float = 0.3
    #: Share of the reading examples that have thoughts.
    thoughts: float = 0.7
    #: Share of :func:`demonstration`.
    demonstrations: float = 0.0

    def __post_init__(self) -> None:
        for name in ("agents", "answers", "thoughts", "demonstrations"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie between 0 and 1")
        if self.agents + self.demonstrations > 1:
            raise ValueError(
                f"agents={self.agents} and demonstrations={self.demonstrations} are more than all examples"
            )

    def batch(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """``count`` examples, the longest first: prompts, completions and mask as of
        :class:`dslib.rl.sft.Examples`. The kind of each is drawn, so that rare kinds are in few batches."""
        words = PromptedVocabulary(self.worlds)
        indices = torch.randint(len(self.worlds), (count,), generator=generator).tolist()
        draw = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        found = []
        for index, kind in zip(indices, draw.random(count), strict=True):
            if kind < self.demonstrations:
                found.append(demonstration(self.worlds, index, words, draw))
            elif kind < self.demonstrations + self.agents:
                found.append(agent_example(self.worlds, index, words, draw, self.answers))
            else:
                prompt = "think: " * int(draw.random() < self.thoughts) + str(draw.choice(READINGS))
                found.append(reading_example(self.worlds, index, words, draw, prompt))
        return padded(found, 1 + self.worlds.attributes, words.pad)


WORLDS = SearchWorlds(clues=2, pages=2, results=3, attributes=2, values=4, max_calls=16)
TUNING = SFTConfig(steps=600, batch_size=96, lr=6e-3, rest_lr=3e-3)
TRAINER = replace(SEARCH_TRAINER, micro_batch=64)


@dataclass(frozen=True)
class ColdStartConfig:
    """Sizes of the study."""

    #: Where the policy acts: small worlds.
    worlds: SearchWorlds = WORLDS
    #: Width of the policy.
    d_model: int = 64
    #: Layers of the policy.
    layers: int = 3
    #: Fine-tuning on the kinds of data.
    sft: SFTConfig = TUNING
    #: GRPO.
    rl: RLConfig = TRAINER
    #: Steps of it.
    rl_steps: int = 120
    #: Shares of demonstrations among the data, each a policy of its own.
    doses: tuple[float, ...] = (0.0, 0.02)
    #: Worlds that are measured in.
    held_out: int = 400

    @property
    def model(self) -> DecoderConfig:
        """Of the policy."""
        words = PromptedVocabulary(self.worlds)
        return DecoderConfig(len(words), d_model=self.d_model, layers=self.layers, heads=4)


@cached
def fine_tuned(config: ColdStartConfig, dose: float, seed: int) -> dict[str, Tensor]:
    """Weights of the policy that has learnt from the data with ``dose`` demonstrations."""
    model = config.model.build(seed)
    data = ColdStartData(part_of(config.worlds, FINE_TUNING), demonstrations=dose)
    tune(model, data, replace(config.sft, seed=seed), [])
    return model.state_dict()


@cached
def trained(config: ColdStartConfig, dose: float, stage: str, seed: int) -> dict[str, Any]:
    """``weights`` after GRPO, a stage of :data:`GRPO_STAGES` from :func:`fine_tuned`; ``table``, a row a step."""
    prompt, shuffled = GRPO_STAGES[stage]
    model = _loaded(config, fine_tuned(config, dose, seed))
    task = PromptedTask(part_of(config.worlds, TRAINING), prompt=prompt)
    rl = replace(config.rl, seed=seed)
    if shuffled:
        trainer = ShuffledEpisodeTrainer(model, task, rl, within="batch")
    else:
        trainer = EpisodeTrainer(model, task, rl)
    with one_thread():
        trainer.run(config.rl_steps)
    return {"weights": checkpoints.rounded(model).state_dict(), "table": trainer.table}


def _loaded(config: ColdStartConfig, weights: dict[str, Tensor]) -> Decoder:
    model = config.model.build()
    model.load_state_dict(weights)
    return model


def played(
    config: ColdStartConfig, weights: dict[str, Tensor], prompt: str, seed: int, temperature: float = 1.0
) -> list[SearchEpisode]:
    """An episode under a prompt in each of the held-out worlds; what is drawn depends on ``seed`` and the world."""
    task = PromptedTask(part_of(config.worlds, HELD_OUT), prompt=prompt)
    episodes = [task.episode(index) for index in range(config.held_out)]
    streams = [(seed, index, 0) for index in range(config.held_out)]
    with one_thread():
        play(_loaded(config, weights), episodes, streams, SamplingConfig(1, temperature), record=False)
    return episodes


def measured(episodes: Sequence[SearchEpisode]) -> dict[str, float]:
    """The shares that are ``interleaved`` and ``solved``, the mean of their :func:`thought_share`, -1 if none has
    shown a page, as ``thought``, and the mean of their ``calls``. Raises ValueError for no episode."""
    if not episodes:
        raise ValueError("episodes is empty; a share needs at least one")
    shares = np.array([thought_share(episode) for episode in episodes])
    return {
        "interleaved": float(np.mean([is_interleaved(episode) for episode in episodes])),
        "solved": float(np.mean([episode.reward for episode in episodes])),
        "calls": float(np.mean([episode.calls for episode in episodes])),
        "thought": -1.0 if np.isnan(shares).all() else float(np.nanmean(shares)),
    }


def stages_of(config: ColdStartConfig, dose: float) -> tuple[str, ...]:
    """What is trained by GRPO from the policy of a dose; the one with the tools prompt is the first dose's."""
    first = dose == config.doses[0]
    return tuple(stage for stage, (prompt, _) in GRPO_STAGES.items() if prompt == "both" or first)


@cached
def rows_of(config: ColdStartConfig, dose: float, seed: int) -> list[dict[str, Any]]:
    """One policy: a row a stage (fine-tuned, sampled and greedy, then each of :data:`GRPO_STAGES`) and prompt, as
    :func:`measured`."""
    stages = {stage: trained(config, dose, stage, seed)["weights"] for stage in stages_of(config, dose)}
    before, rows = fine_tuned(config, dose, seed), []
    for stage, weights in {"fine-tuned": before, "fine-tuned, greedy": before, **stages}.items():
        for prompt in PROMPTS:
            name = {"dose": dose, "seed": seed, "stage": stage, "prompt": prompt}
            episodes = played(config, weights, prompt, seed, float("greedy" not in stage))
            rows.append(name | measured(episodes))
    return rows


@cached
def curves_of(config: ColdStartConfig, dose: float, seed: int) -> list[dict[str, Any]]:
    """One policy: a row a stage and step of GRPO: the share ``solved`` of its episodes and their mean ``calls``."""
    return [
        {
            "dose": dose,
            "seed": seed,
            "stage": stage,
            "step": row["step"],
            "solved": row["reward"],
            "calls": row["calls"],
        }
        for stage in stages_of(config, dose)
        for row in trained(config, dose, stage, seed)["table"]
    ]


def measure(
    config: ColdStartConfig,
    seeds: Iterable[int],
    jobs: int = 1,
    progress: Callable[..., Any] = lambda steps, **_: steps,
) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """:func:`rows_of` and :func:`curves_of` all doses and seeds, ``jobs`` policies at a time; ``progress`` as
    :func:`dslib.notebook.progress`. They ship as :data:`TABLES`."""
    import pandas

    calls = [(config, dose, seed) for seed in seeds for dose in config.doses]
    found = progress(in_workers(rows_of, calls, jobs), total=len(calls), label="policies")
    rows = pandas.DataFrame([row for part in found for row in part])
    return rows, pandas.DataFrame([row for call in calls for row in curves_of(*call)])


def ship(config: ColdStartConfig, command: str, seed: int = 0) -> list[Path]:
    """Write :data:`SHIPPED`, of the policy without demonstrations, to ``data/checkpoints``."""
    dose, written = config.doses[0], []
    weights = {
        "fine-tuned": fine_tuned(config, dose, seed),
        "GRPO": trained(config, dose, "GRPO", seed)["weights"],
    }
    for stage, name in SHIPPED.items():
        about = {"stage": stage, "dose": dose, "seed": seed, "worlds": asdict(config.worlds)}
        written.append(checkpoints.write(name, _loaded(config, weights[stage]), command, about))
    return written


def shipped(config: ColdStartConfig, stage: str) -> dict[str, Tensor]:
    """The weights of a stage of :data:`SHIPPED`. Raises FileNotFoundError when there are none."""
    model = config.model.build()
    checkpoints.read(SHIPPED[stage], model)
    return model.state_dict()
