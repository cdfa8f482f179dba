"""Data that is read from this machine or generated, never downloaded."""

from dslib.tasks.corpus import Corpus, batches, evaluation_windows, load_corpus

__all__ = ["Corpus", "batches", "evaluation_windows", "load_corpus"]
