"""Reinforcement learning with verifiable rewards."""

from dslib.rl.advantages import gae, group_advantages, token_rewards, whiten
from dslib.rl.algorithms import ALGORITHMS, Algorithm
from dslib.rl.config import RLConfig
from dslib.rl.distill import distillation_kl, distillation_loss, rejection_sample, solver_examples
from dslib.rl.effort import EffortTask, subgroup_advantages
from dslib.rl.episodes import Episode, EpisodeTask, EpisodeTrainer, PlayedEpisodes, play
from dslib.rl.kl import kl_estimate
from dslib.rl.masks import informative_groups, off_policy_sequence_mask
from dslib.rl.objectives import (
    LossConfig,
    PolicyBatch,
    PolicyLoss,
    loss_normalizer,
    merged_metrics,
    policy_loss,
)
from dslib.rl.rewards import (
    EffortPenalty,
    Rubric,
    exact_answer,
    f1_times_format,
    format_tags,
    language_consistency,
    length_penalty,
    overlong_penalty,
    rubric_reward,
    split_thought,
)
from dslib.rl.rollout import Rollout, SamplingConfig, sample, score
from dslib.rl.rollout_store import load_rollout, save_rollout
from dslib.rl.samples import Samples, sample_groups
from dslib.rl.selective import chunked_log_probs, chunked_policy_loss, selective_log_softmax
from dslib.rl.sft import Examples, SFTConfig, demonstrations, sft
from dslib.rl.trainer import Trainer

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "EffortPenalty",
    "EffortTask",
    "Episode",
    "EpisodeTask",
    "EpisodeTrainer",
    "Examples",
    "LossConfig",
    "PlayedEpisodes",
    "PolicyBatch",
    "PolicyLoss",
    "RLConfig",
    "Rollout",
    "Rubric",
    "SFTConfig",
    "Samples",
    "SamplingConfig",
    "Trainer",
    "chunked_log_probs",
    "chunked_policy_loss",
    "demonstrations",
    "distillation_kl",
    "distillation_loss",
    "exact_answer",
    "f1_times_format",
    "format_tags",
    "gae",
    "group_advantages",
    "informative_groups",
    "kl_estimate",
    "language_consistency",
    "length_penalty",
    "load_rollout",
    "loss_normalizer",
    "merged_metrics",
    "off_policy_sequence_mask",
    "overlong_penalty",
    "play",
    "policy_loss",
    "rejection_sample",
    "rubric_reward",
    "sample",
    "sample_groups",
    "save_rollout",
    "score",
    "selective_log_softmax",
    "sft",
    "solver_examples",
    "split_thought",
    "subgroup_advantages",
    "token_rewards",
    "whiten",
]
