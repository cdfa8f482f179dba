"""What one answer of a group weighs under each algorithm: its advantage, and that of one of its tokens."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import torch
from torch import Tensor

from dslib.experiments.rl_algorithms import NAMES
from dslib.rl.advantages import group_advantages
from dslib.rl.algorithms import ALGORITHMS, GAE
from dslib.rl.objectives import LossConfig, PolicyBatch, policy_loss, token_weights

#: The algorithms of the comparison, and two whose runs would be GRPO's here, by their names in print.
LABELS = NAMES | {"dr_grpo": "Dr. GRPO", "gspo": "GSPO"}
#: The longest answer that fits, tokens.
LONGEST = 30


def answer_weights(
    right: int,
    n: int,
    long_right: int,
    long_wrong: int,
    elsewhere: int,
    greedy_right: bool,
    critic: float,
) -> pd.DataFrame:
    """The first group of a batch of eight, of ``n`` answers each: ``right`` are right in it and ``elsewhere`` in every
    other, ``long_right`` and ``long_wrong`` tokens long.

    A row an algorithm and kind of answer that is there, ``answer`` "right" or "wrong": its ``advantage``, and that
    times the ``weight`` of a token in the loss. ReMax's greedy answers are all right or wrong, PPO's critic says
    ``critic`` of every token. A group that DAPO would draw again has 0.
    """
    counts = torch.tensor([min(right, n)] + 7 * [min(elsewhere, n)])
    rewards = (torch.arange(n) < counts[:, None]).float()
    lengths = torch.where(rewards > 0, long_right, long_wrong).flatten()
    mask = torch.arange(LONGEST) < lengths[:, None]
    found = []
    for name, label in LABELS.items():
        recipe = ALGORITHMS[name]
        if recipe.advantage == GAE:
            advantages = rewards[0] - critic  # γ = λ = 1
        else:
            greedy = torch.full((8,), float(greedy_right)) if recipe.advantage == "remax" else None
            advantages = group_advantages(rewards, recipe.advantage, greedy)[0]
        weights = token_weights(mask, replace(recipe.loss, max_length=LONGEST))[:n, 0]
        for answer, reward in (("right", 1.0), ("wrong", 0.0)):
            chosen = rewards[0] == reward
            if chosen.any():
                about = {"algorithm": label, "answer": answer, "advantage": advantages[chosen].mean().item()}
                found.append(about | {"weight": (weights * advantages)[chosen].mean().item()})
    return pd.DataFrame(found)


def policy_gradient(
    loss: LossConfig, logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """The gradient of :func:`dslib.rl.policy_loss` with respect to ``logp``, of its shape (sequences, tokens);
    advantages: (sequences,)."""
    leaf = logp.detach().clone().requires_grad_()
    found = policy_loss(PolicyBatch(leaf, logp_old, advantages, mask), loss)
    return torch.autograd.grad(found.loss, leaf)[0]
