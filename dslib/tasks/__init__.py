"""Data that is read from this machine or generated, never downloaded."""

from dslib.tasks.corpus import DOCSTRINGS, Corpus, batches, evaluation_windows, load_corpus
from dslib.tasks.countdown import Countdown, CountdownProblem
from dslib.tasks.pointer_chasing import PointerChasing, PointerProblem, Scratchpad
from dslib.tasks.recall import RecallTask
from dslib.tasks.reversed_addition import ReversedAddition
from dslib.tasks.scripts import Reading, TwoScripts
from dslib.tasks.search_episode import STRATEGIES, History, SearchEpisode, SearchTask
from dslib.tasks.search_expert import Demonstrations, expert_turn
from dslib.tasks.search_tokens import SearchVocabulary
from dslib.tasks.search_world import SearchTools, SearchWorlds, World
from dslib.tasks.state_tracking import StateTracking
from dslib.tasks.verifiable import EnumerableTask, Task

__all__ = [
    "DOCSTRINGS",
    "STRATEGIES",
    "Corpus",
    "Countdown",
    "CountdownProblem",
    "Demonstrations",
    "EnumerableTask",
    "History",
    "PointerChasing",
    "PointerProblem",
    "Reading",
    "RecallTask",
    "ReversedAddition",
    "Scratchpad",
    "SearchEpisode",
    "SearchTask",
    "SearchTools",
    "SearchVocabulary",
    "SearchWorlds",
    "StateTracking",
    "Task",
    "TwoScripts",
    "World",
    "batches",
    "evaluation_windows",
    "expert_turn",
    "load_corpus",
]
