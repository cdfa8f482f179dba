"""The scaling study: budgets kept, optima bracketed on every axis, rows that hold what was counted."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from dslib.experiments import scaling_laws as study
from dslib.experiments import scaling_laws_tables as tables
from dslib.models import Decoder, TrainConfig, flops_per_step
from dslib.optim import PowerLaw, bowl_minimum, fit_power_law

BASE = TrainConfig(context=16, evaluations=1, evaluation_windows=2)
BUDGETS = (1e8, 4e8, 1.6e9)


def valley(width=24, batch_size=4, lr=0.03, rest_lr=0.1):
    """A stand-in for training: the budget's power law plus squared distances from a point, in octaves."""

    def run(configs):
        for config in configs:
            rest = config.lr if config.rest_lr is None else config.rest_lr
            compute = config.steps * sum(study.budget_per_step(config))
            loss = (
                20 * compute**-0.1
                + 0.1 * (study.WIDTHS.index(config.model.d_model) - study.WIDTHS.index(width)) ** 2
                + 0.1 * math.log2(config.batch_size / batch_size) ** 2
                + 0.1 * math.log2(config.lr / lr) ** 2
                + 0.1 * math.log2(rest / rest_lr) ** 2
                + 1e-3 * (config.seed % 5)
            )
            yield SimpleNamespace(config=config, final_loss=loss, flops=2.0 * compute)

    return run


def frame(results):
    return pd.DataFrame(study.rows(results, kind="search", arm="x", budget=1e9))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_budget_counts_six_n_a_byte_and_newton_schulz(optimizer):
    arm, settings = study.Law(optimizer, "x"), study.Allocation(12, 4, 0.01, 0.1)
    config = study.allocated(BASE, arm, settings, 1e9)
    model, own = study.budget_per_step(config)
    N, embedding = study.parameter_counts(config.model)
    assert model == 6 * N * 4 * 16
    assert N + embedding == sum(p.numel() for p in Decoder(config.model).parameters())
    assert embedding == 256 * 12
    assert (own > 0) == (optimizer == "muon")
    assert config.steps * (model + own) <= 1e9 < (config.steps + 1) * (model + own)
    attention = 6 * study.LAYERS * 16 * 12 * 4 * 16  # what C = 6ND leaves out
    assert flops_per_step(config) == model + own + attention


def test_budget_too_small_for_a_step_is_refused():
    with pytest.raises(ValueError, match="pays for no step"):
        study.at_budget(BASE, 10.0)


def test_every_width_of_the_ladder_makes_a_model_and_sizes_grow_smoothly():
    sizes = [study.parameter_counts(study.model_of(width))[0] for width in study.WIDTHS]
    ratios = [b / a for a, b in itertools.pairwise(sizes)]
    assert 1.4 < min(ratios)
    assert max(ratios) < 2.3


@pytest.mark.parametrize(("width", "batch_size", "lr", "rest_lr"), [(24, 4, 0.03, 0.1), (64, 32, 0.5, 0.01)])
def test_optimum_is_found_and_bracketed_on_every_axis(width, batch_size, lr, rest_lr):
    start = study.Allocation(32, 8, 2**-6, 2**-2)
    results = study.search(
        BASE, study.Law("muon", "x"), 1e10, [start], run=valley(width, batch_size, lr, rest_lr)
    )
    table = frame(results)
    best = study.best_allocation(table)
    assert (best.width, best.batch_size) == (width, batch_size)
    assert 0.8 < best.lr / lr < 1.25
    assert 0.8 < best.rest_lr / rest_lr < 1.25
    for axis in study.AXES:
        found = study.along(table, best, axis)
        assert min(found) < getattr(best, axis) < max(found)
    sizes, losses = study.bowl(table)
    assert len(sizes) >= 5
    assert sizes == sorted(sizes)
    assert losses == list(study.along(table, best, "width").values())
    bowl_minimum(sizes, losses)
    assert not table.duplicated(["width", "batch_size", "lr", "rest_lr", "seed"]).any()


def two_valleys(configs):
    """A deep valley at small rates and a shallow one at large rates, with a ridge between them."""
    deep, shallow = valley(24, 4, 2**-8, 2**-8), valley(24, 4, 2**-2, 2**-2)
    for one, other in zip(deep(configs), shallow(configs), strict=True):
        yield one if one.final_loss < other.final_loss + 0.3 else replace_loss(other, 0.3)


def replace_loss(result, more):
    return SimpleNamespace(config=result.config, final_loss=result.final_loss + more, flops=result.flops)


def test_second_start_leads_out_of_a_side_valley_and_the_better_end_counts():
    arm = study.Law("muon", "x")
    far, near = study.Allocation(24, 4, 2**-2, 2**-2), study.Allocation(24, 4, 2**-7, 2**-7)
    stuck = study.best_allocation(frame(study.search(BASE, arm, 1e9, [far], run=two_valleys)))
    assert stuck.lr == 2**-2
    for starts in ([far, near], [near, far]):
        best = study.best_allocation(frame(study.search(BASE, arm, 1e9, starts, run=two_valleys)))
        assert (best.lr, best.rest_lr) == (2**-8, 2**-8)


def test_two_rates_never_end_worse_than_one(table):
    searched = table[table["kind"] == "search"]
    for _, part in searched.groupby("budget"):
        best = part.groupby("arm").apply(lambda rows: rows.groupby(list(study.AXES)).final_loss.mean().min())
        assert best["AdamW"] <= best[study.ONE_RATE]


def test_one_axis_alone_can_be_searched_although_one_rate_stands_elsewhere():
    table = pd.DataFrame(study.measure(BASE, BUDGETS, range(2), ("lr",), study.SEARCH_SEEDS[:1], valley()))
    for _, part in table[table["kind"] == "search"].groupby(["arm", "budget"]):
        assert part["width"].nunique() == part["batch_size"].nunique() == 1


def test_one_rate_stays_one_rate():
    start = study.Allocation(24, 4, 2**-6, None)
    table = frame(study.search(BASE, study.Law("adamw", "x"), 1e9, [start], run=valley()))
    assert (table["lr"] == table["rest_lr"]).all()
    best = study.best_allocation(table)
    assert best.rest_lr is None
    assert 0.03 < best.lr < 0.1


def test_optimum_at_an_edge_is_refused():
    table = frame(study.search(BASE, study.Law("adamw", "x"), 1e9, [study.ARMS["AdamW"].start], run=valley()))
    best = study.best_allocation(table)
    with pytest.raises(ValueError, match="edge"):
        study.best_allocation(table[table["width"] <= best.width])
    with pytest.raises(ValueError, match="longer ladder"):
        study.search(
            BASE, study.Law("adamw", "x"), 1e9, [replace(best, width=study.WIDTHS[-1])], run=valley(width=192)
        )
    with pytest.raises(ValueError, match="shorter context"):
        study.search(
            BASE, study.Law("adamw", "x"), 1e9, [replace(best, batch_size=1)], run=valley(batch_size=1)
        )


def test_moving_optimum_ends_in_an_error():
    def run(configs):  # every new run is better than all before
        for config in configs:
            run.loss -= 1.0
            yield SimpleNamespace(config=config, final_loss=run.loss, flops=1.0)

    run.loss = 1000.0
    with pytest.raises((RuntimeError, ValueError), match=r"bracket|move|ladder|pays"):
        study.search(BASE, study.Law("adamw", "x"), 1e12, [study.ARMS["AdamW"].start], run=run)


@pytest.fixture(scope="module")
def table():
    return pd.DataFrame(study.measure(BASE, BUDGETS, range(3), run=valley()))


def test_everything_that_ships_is_measured_by_one_call(table):
    assert not table.isna().any().any()
    finals = table[table["kind"] == "final"]
    assert set(finals.groupby(["arm", "budget"]).size()) == {3}
    assert set(finals["arm"]) == set(study.ARMS)
    assert not set(finals["seed"]) & set(study.SEARCH_SEEDS)
    searched = table[table["kind"] == "search"]
    assert set(searched["arm"]) == {name for name, law in study.ARMS.items() if law.searched_as == name}
    assert set(searched["seed"]) == set(study.SEARCH_SEEDS)
    assert (table["compute"] <= table["budget"]).all()
    per_step = table["compute"] / table["steps"]
    assert (table["compute"] + per_step > table["budget"]).all()


def test_reused_arms_run_on_the_searched_as_the_arm_they_reuse(table):
    final = study.tuned(BASE, table[table["kind"] == "search"])
    assert set(final) == {(arm, budget) for arm in study.ARMS for budget in BUDGETS}
    for reused in (name for name, law in study.ARMS.items() if law.searched_as != name):
        own, source = final[reused, 4e8], final[study.ARMS[reused].searched_as, 4e8]
        assert (own.lr, own.rest_lr, own.batch_size) == (source.lr, source.rest_lr, source.batch_size)
        assert own.model == source.model
        assert (own.optimizer, own.momentum) == ("muon", 0.95)
        assert own.steps < source.steps  # Newton–Schulz is paid in steps


def test_curve_is_what_a_law_is_fitted_to(table):
    C, L = study.curve(table, "AdamW")
    assert L.shape == (3, len(BUDGETS))
    assert fit_power_law(C, L, resamples=0).b > 0
    np.testing.assert_array_less(study.curve(table, "Muon", "six_nd")[0], study.curve(table, "Muon")[0])
    np.testing.assert_array_equal(C, study.curve(table, "AdamW", "six_nd")[0])
    first = (table["kind"] == "final") & (table["seed"] == 0) & (table["budget"] == 1e8)
    with pytest.raises(ValueError, match="every seed"):
        study.curve(table[~first], "AdamW")
    with pytest.raises(ValueError, match="AdamX"):
        study.curve(table, "AdamX")


def test_real_runs_give_rows_that_add_up(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be " * 200)
    base = replace(BASE, corpus=str(tmp_path / "text.txt"))
    config = study.allocated(base, study.ARMS["Muon"], study.Allocation(4, 2, 0.03, 0.1), 3e6)
    from dslib.models import train

    (row,) = study.rows([train(config)], kind="final", arm="Muon", budget=3e6)
    assert row["six_nd"] == 6 * row["parameters"] * row["bytes"]
    assert row["six_nd"] < row["compute"] < row["flops"]
    assert 0 < row["final_loss"] < 10


def test_tables_say_what_searches_found_and_where_bowls_end(table):
    searches = tables.searched(table)
    found = tables.optima(searches).set_index(["law", "budget"])
    assert set(found.index) == set(searches)
    assert found["runs"].sum() == (table["kind"] == "search").sum()
    best = study.best_allocation(searches["Muon", 4e8])
    assert found.loc[("Muon", 4e8), "width"] == best.width
    ends = tables.bottoms(searches, "Muon")
    assert ends["budget"].tolist() == sorted(BUDGETS)
    assert (ends["N"].iloc[1], ends["loss"].iloc[1]) == bowl_minimum(*study.bowl(searches["Muon", 4e8]))
    one_width = searches["Muon", 4e8].query("width == @best.width")
    assert tables.bottoms({("Muon", 4e8): one_width}, "Muon").empty


def test_neighbours_stop_at_the_end_of_the_ladder():
    assert tables.neighbours(study.Allocation(6, 8, 0.1, None)) == [4, 6, 8]
    assert tables.neighbours(study.Allocation(study.WIDTHS[0], 8, 0.1, None)) == [2, 4]


def test_known_losses_are_those_of_the_same_runs_and_points_their_means(table):
    part = tables.searched(table)["Muon", 4e8]
    best = study.best_allocation(part)
    configs = [
        replace(study.allocated(BASE, study.ARMS["Muon"], replace(best, width=width), 4e8), seed=seed)
        for width in tables.neighbours(best)
        for seed in study.SEARCH_SEEDS
    ]
    results = list(valley()(configs))
    known = tables.known_losses(part, results)
    assert known == pytest.approx([result.final_loss for result in results])
    points = tables.points(results)
    assert points.index.tolist() == tables.neighbours(best)
    assert points[best.width] == pytest.approx(study.along(part, best, "width")[best.width])
    pd.testing.assert_series_equal(tables.points(results, known), points)
    other = SimpleNamespace(config=replace(configs[0], lr=123.0), final_loss=1.0)
    with pytest.raises(ValueError, match="made no run"):
        tables.known_losses(part, [other])


def test_ratio_and_prediction_of_exact_power_laws_are_the_closed_forms():
    C = np.array([1.0, 2.0, 5.0])
    one, other = 3.0 * C**-0.2, 4.0 * C**-0.2
    curves = {"Muon": (C, np.stack([one, one])), "AdamW": (C, np.stack([other, other]))}
    expected = np.full((2, 2), (3 / 4) ** (1 / 0.2))
    np.testing.assert_allclose(tables.ratios(curves, "Muon", "AdamW", np.array([1.0, 5.0])), expected)
    np.testing.assert_allclose(tables.prediction_errors(*curves["Muon"]), [0.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(tables.carried_errors(*curves["Muon"]), [2.5**0.2 - 1] * 2)


def test_ways_of_counting_have_a_row_each(table):
    ways = {"free": "six_nd", "paid": "compute"}
    found = tables.counted_ratios(table, "Muon", "AdamW", ways).set_index("counted")
    assert found.shape == (2, len(BUDGETS))
    assert (found.loc["free"] < found.loc["paid"]).all()


def test_parameter_is_told_with_its_interval():
    law = PowerLaw(2.0, 0.1, resampled=np.array([[2.0, 0.1, 0.0]] * 3))
    assert tables.interval_text(law, "b") == "0.100 [0.100, 0.100]"
