"""Data that is read from this machine or generated, never downloaded."""

from dslib.tasks.corpus import DOCSTRINGS, Corpus, batches, evaluation_windows, load_corpus
from dslib.tasks.recall import RecallTask
from dslib.tasks.state_tracking import StateTracking

__all__ = [
    "DOCSTRINGS",
    "Corpus",
    "RecallTask",
    "StateTracking",
    "batches",
    "evaluation_windows",
    "load_corpus",
]
