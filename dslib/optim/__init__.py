"""Optimizers: Newton–Schulz iterations, Muon, and the size of an update."""

from dslib.optim.muon import Muon
from dslib.optim.newton_schulz import newton_schulz, newton_schulz_flops, scalar_map, svd_orthogonalize
from dslib.optim.param_groups import param_groups_for_muon
from dslib.optim.steepest_descent import matrix_norm, solve_steepest_direction, steepest_direction
from dslib.optim.update_rms import adjusted_lr_factor, theoretical_update_rms, update_rms

__all__ = [
    "Muon",
    "adjusted_lr_factor",
    "matrix_norm",
    "newton_schulz",
    "newton_schulz_flops",
    "param_groups_for_muon",
    "scalar_map",
    "solve_steepest_direction",
    "steepest_direction",
    "svd_orthogonalize",
    "theoretical_update_rms",
    "update_rms",
]
