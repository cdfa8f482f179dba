"""The base model of a task: it knows how an answer looks, and a little of what makes it right.

Every experiment with reinforcement learning on a verifiable task starts from one of these, made here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from dslib.models.decoder import Decoder, DecoderConfig
from dslib.rl.sft import SFTConfig, demonstrations, sft
from dslib.runs import checkpoints
from dslib.runs.cache import cached
from dslib.runs.workers import one_thread
from dslib.tasks.countdown import Countdown
from dslib.tasks.pointer_chasing import PointerChasing
from dslib.tasks.reversed_addition import ReversedAddition
from dslib.tasks.scripts import TwoScripts

#: The base is trained on problems 0 … 59 999 of its task; RL trains on the next ones, and nothing trains on held-out.
TRAINING, HELD_OUT = (60_000, 400), (70_000, 200)

TASK = Countdown()
MODEL = DecoderConfig(TASK.vocab_size, d_model=96, layers=3, heads=4)
TUNING = SFTConfig(steps=700, batch_size=256)

#: Tasks with demonstrations that a base can be made of.
Demonstrated = Countdown | PointerChasing | ReversedAddition | TwoScripts


@dataclass(frozen=True)
class BaseConfig:
    """A base model: a decoder fine-tuned on demonstrations of its task, a part of which are random answers.

    Raises ValueError for a model that lacks tokens of the task.
    """

    #: What it has seen demonstrations of.
    task: Demonstrated = TASK
    #: The decoder; its vocabulary may have more tokens than the task's.
    model: DecoderConfig = MODEL
    #: The fine-tuning, whose seed is that of the base.
    sft: SFTConfig = TUNING

    def __post_init__(self) -> None:
        if self.model.vocab_size < self.task.vocab_size:
            raise ValueError(
                f"the model's vocabulary of {self.model.vocab_size} lacks tokens of the task's {self.task.vocab_size}"
            )

    def problems(self, held_out: bool = False) -> Demonstrated:
        """What RL trains on, or what nothing was trained on; not of :class:`TwoScripts`."""
        skip, count = HELD_OUT if held_out else TRAINING
        return replace(self.task, skip=skip, problems=count)


def base_model(config: BaseConfig, seed: int) -> Decoder:
    """The base of ``seed``, trained once, on one thread, and kept in the cache; its weights are rounded to what a
    shipped file keeps of them."""
    model = config.model.build(seed)
    model.load_state_dict(_base_weights(config, seed))
    return model


@cached
def _base_weights(config: BaseConfig, seed: int) -> dict[str, Tensor]:
    with one_thread():
        model = config.model.build(seed)
        sft(model, demonstrations(config.task), replace(config.sft, seed=seed))
    return checkpoints.rounded(model).state_dict()
