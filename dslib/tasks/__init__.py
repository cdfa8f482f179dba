"""Data that is read from this machine or generated, never downloaded."""

from dslib.tasks.corpus import DOCSTRINGS, Corpus, batches, evaluation_windows, load_corpus
from dslib.tasks.countdown import Countdown, CountdownProblem
from dslib.tasks.pointer_chasing import PointerChasing, PointerProblem, Scratchpad
from dslib.tasks.recall import RecallTask
from dslib.tasks.reversed_addition import ReversedAddition
from dslib.tasks.scripts import Reading, TwoScripts
from dslib.tasks.state_tracking import StateTracking
from dslib.tasks.verifiable import EnumerableTask, Task

__all__ = [
    "DOCSTRINGS",
    "Corpus",
    "Countdown",
    "CountdownProblem",
    "EnumerableTask",
    "PointerChasing",
    "PointerProblem",
    "Reading",
    "RecallTask",
    "ReversedAddition",
    "Scratchpad",
    "StateTracking",
    "Task",
    "TwoScripts",
    "batches",
    "evaluation_windows",
    "load_corpus",
]
