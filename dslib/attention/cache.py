"""What decoding remembers of the positions before: keys and values, or a state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KVCache:
    """Keys and values of the positions decoded so far, one pair a layer: (batch, kv_heads, time, dim).

    ``states`` is for what else a layer remembers, whatever it is; ``length`` is the number of positions that
    the model has seen. Without gradients the tensors are views of storage that doubles when it is full: a
    token costs its own numbers, not a copy of all that came before it.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[Any, Any] = {}
        self.length = 0
        self._storage: dict[tuple[int, int], Tensor] = {}

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new positions of a layer; returns all of its keys and values."""
        if layer in self.layers:
            old = self.layers[layer]
            k, v = self._joined((layer, 0), old[0], k), self._joined((layer, 1), old[1], v)
        self.layers[layer] = (k, v)
        return k, v

    def _joined(self, key: tuple[int, int], old: Tensor, new: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return torch.cat((old, new), dim=-2)
        length = old.shape[-2]
        total = length + new.shape[-2]
        storage = self._storage.get(key)
        # Another address: these keys were put here by someone else, or joined while gradients were on.
        if storage is None or storage.shape[-2] < total or storage.data_ptr() != old.data_ptr():
            storage = old.new_empty(*old.shape[:-2], 2 * total, old.shape[-1])
            storage[..., :length, :] = old
            self._storage[key] = storage
        storage[..., length:total, :] = new
        return storage[..., :total, :]
