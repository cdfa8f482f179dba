"""Optimizers: Newton–Schulz iterations, Muon, and the size of an update."""

from dslib.optim.distributed import ZeroMuon
from dslib.optim.distributed_adamw import ZeroAdamW
from dslib.optim.distributed_launch import RankFailed, run_processes
from dslib.optim.muon import Muon
from dslib.optim.newton_schulz import newton_schulz, newton_schulz_flops, scalar_map, svd_orthogonalize
from dslib.optim.param_groups import param_groups_for_muon
from dslib.optim.scaling_law import (
    PFLOPS_DAY,
    PowerLaw,
    bowl_minimum,
    compute_ratio,
    compute_ratio_interval,
    fit_power_law,
)
from dslib.optim.steepest_descent import matrix_norm, solve_steepest_direction, steepest_direction
from dslib.optim.update_rms import UpdateMeter, adjusted_lr_factor, theoretical_update_rms, update_rms

__all__ = [
    "PFLOPS_DAY",
    "Muon",
    "PowerLaw",
    "RankFailed",
    "UpdateMeter",
    "ZeroAdamW",
    "ZeroMuon",
    "adjusted_lr_factor",
    "bowl_minimum",
    "compute_ratio",
    "compute_ratio_interval",
    "fit_power_law",
    "matrix_norm",
    "newton_schulz",
    "newton_schulz_flops",
    "param_groups_for_muon",
    "run_processes",
    "scalar_map",
    "solve_steepest_direction",
    "steepest_direction",
    "svd_orthogonalize",
    "theoretical_update_rms",
    "update_rms",
]
