"""Data that is read from this machine or generated, never downloaded."""

from dslib.tasks.corpus import DOCSTRINGS, Corpus, batches, evaluation_windows, load_corpus

__all__ = ["DOCSTRINGS", "Corpus", "batches", "evaluation_windows", "load_corpus"]
