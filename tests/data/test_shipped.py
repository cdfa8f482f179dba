"""What ships: claims that parse, measurements that say how they were made."""

from pathlib import Path

import pytest

from dslib import data
from dslib.runs import measurements
from dslib.suite.claims import load_claims

READ_NO_TEXT = ("agent", "cold_start", "grpo", "reasoning", "rl")
SHIPPED = sorted((Path(data.__file__).parent / "measurements").glob("*.csv"))


def test_claims_parse_and_name_notebooks_that_exist():
    notebooks = Path(data.__file__).resolve().parent.parent / "notebooks"
    for claim in load_claims().values():
        assert (notebooks / f"{claim.notebook}.ipynb").is_file(), claim.id


def test_missing_file_is_an_error_that_names_what_is_there():
    with pytest.raises(FileNotFoundError, match=r"claims\.toml"):
        data.path("clams.toml")


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_shipped_row_has_the_command_that_made_it(file):
    rows = measurements.read(file.stem)
    assert len(rows)
    assert rows["command"].str.fullmatch(r"dslib run \d\d --profile full --param .+").all()
    assert rows["date"].str.fullmatch(r"\d{4}-\d\d-\d\d").all()
    corpus = "" if file.stem.startswith(READ_NO_TEXT) else r"[0-9a-f]{12}"
    assert rows["corpus"].astype(str).str.fullmatch(corpus).all()
    assert rows["source"].str.fullmatch(r"[0-9a-f]{12}").all()


def test_shipped_models_have_the_sizes_that_their_names_say():
    rows = measurements.read("muon")
    assert (rows["model"] == rows["d_model"].astype(str) + " × " + rows["layers"].astype(str)).all()
    assert rows["model"].nunique() == 3
    assert not rows.duplicated(["model", "kind", "arm", "share", "lr", "rest_lr", "momentum", "seed"]).any()


def test_every_shipped_search_is_bracketed():
    from dslib.experiments import muon as study

    rows = measurements.read("muon")
    for _, part in rows[rows.kind == "search"].groupby(["model", "arm"]):
        study.best_rates(part)


def test_search_and_comparison_share_no_seed():
    rows = measurements.read("muon")
    assert not set(rows[rows.kind == "search"].seed) & set(rows[rows.kind == "final"].seed)
    searched, finals = measurements.read("update_rms_search"), measurements.read("update_rms")
    assert not set(searched.seed) & set(finals.seed)


def test_update_rms_arms_train_at_the_rates_that_the_shipped_search_found():
    from dslib.experiments import muon

    searched, finals = measurements.read("update_rms_search"), measurements.read("update_rms")
    assert finals["model"].nunique() == 3
    for model, part in finals.groupby("model"):
        best = muon.best_rates(searched[searched.model == model])
        chosen = part[part.arm.isin(["AdamW", "Baseline", "Update Norm", "Adjusted LR"])]
        assert set(chosen.lr) == {best.lr}
        assert set(part.rest_lr) == {best.rest_lr}
    same = finals[finals.arm.str.endswith("same product")]
    target = same.arm.str.extract(r"RMS ([\d.]+)")[0].astype(float)
    best = finals[(finals.model == "32 × 2") & (finals.arm == "Adjusted LR")].lr.iloc[0]
    assert (same.lr * target).round(9).unique().tolist() == [round(best * 0.2, 9)]


def test_long_muon_runs_have_eight_seeds_and_all_arms_the_same_marks():
    curves = measurements.read("weight_decay")
    assert curves[curves.optimizer == "muon"].groupby("arm").seed.nunique().tolist() == [8] * 3
    assert curves.groupby(["arm", "seed"])["at"].apply(tuple).nunique() == 1


def test_spectra_and_interchange_were_searched_on_seeds_of_their_own_and_bracketed():
    from dslib.experiments import interchange
    from dslib.experiments.search import best_bracketed

    searched, spectra = measurements.read("spectra_search"), measurements.read("spectra")
    for _, part in searched.groupby(["model", "arm"]):
        best_bracketed(dict(part.groupby("lr").final_loss.mean()))
    assert not set(searched.seed) & set(spectra.seed)
    assert spectra.model.nunique() == searched.model.nunique() == 3
    table = measurements.read("interchange")
    interchange.best_shares(table[table.kind == "search"])
    finals = table[table.kind == "final"]
    assert not set(finals.seed) & set(table[table.kind == "search"].seed)
    assert len(finals) == finals.seed.nunique() * len({*interchange.CELLS, *interchange.NULL_CELLS})


def test_every_matrix_of_smollm2_was_measured():
    rows = measurements.read("smollm2")
    assert len(rows) == 30 * 7
    assert rows.groupby("layer").size().unique().tolist() == [7]
    assert rows.svd_entropy.between(0, 1).all()
    assert (rows.stable_rank <= rows.effective_rank).all()


def test_shipped_sparse_attention_has_every_arm_of_every_seed_and_equal_lengths():
    from dslib.experiments import deepseek_sparse_attention as dsa

    rows = measurements.read("dsa")
    names = {
        dsa.DENSE,
        dsa.WARMED,
        *dsa.ARMS,
    }
    for _, part in rows.groupby(["ratio", "seed"]):
        assert sorted(part.arm) == sorted(names)
        arms = part[part.arm.isin(dsa.ARMS)]
        assert arms.groupby(["steps", "lr", "context", "top_k"]).ngroups == 1
        before, warmed = (part[part.arm == name].text_loss.item() for name in (dsa.DENSE, dsa.WARMED))
        assert before == warmed  # nothing but the indexer was trained
    assert rows.groupby("ratio").seed.nunique().ge(8).all()
    assert (rows.context // rows.top_k == rows.ratio).all()


def test_shipped_scaling_is_bracketed_searched_on_seeds_of_its_own_and_two_rates_are_no_worse_than_one():
    from dslib.experiments import scaling_laws as study

    rows = measurements.read("scaling")
    searched, finals = rows[rows.kind == "search"], rows[rows.kind == "final"]
    assert not set(searched.seed) & set(finals.seed)
    best = {key: study.best_allocation(part) for key, part in searched.groupby(["arm", "budget"])}
    for (arm, budget), part in finals.groupby(["arm", "budget"]):
        chosen = best[study.ARMS[arm].searched_as, budget]
        assert set(part.width) == {chosen.width}
        assert set(part.lr) == {chosen.lr}
        assert part.seed.nunique() == 8
    for _, part in searched.groupby("budget"):
        means = part.groupby(["arm", *study.AXES]).final_loss.mean().groupby("arm").min()
        assert means["AdamW"] <= means[study.ONE_RATE]


def test_shipped_sparse_arms_share_their_seeds_and_rates():
    rows = measurements.read("sparse_attention")
    assert rows.groupby("arm").seed.apply(tuple).nunique() == 1
    assert rows.seed.nunique() == 8
    assert rows.groupby(["steps", "context", "lr", "rest_lr"]).ngroups == 1
    assert not rows.duplicated(["arm", "seed"]).any()
    assert (rows[rows.arm == "window"].far_seen == 0).all()  # far is what it cannot see


def test_shipped_rwkv_was_searched_on_seeds_of_its_own_and_has_eight_seeds_an_arm():
    rows = measurements.read("rwkv")
    searched = rows.kind.str.endswith("search")
    assert not set(rows[searched].seed) & set(rows[~searched].seed)
    for _, part in rows[~searched].groupby(["kind", "arm", "facts", "objects"]):
        assert sorted(part.seed) == list(range(8))
        assert part.groupby(["lr", "rest_lr"]).ngroups == 1


def test_shipped_grpo_runs_are_whole_designs_and_differ_in_nothing_but_switches():
    from dslib.experiments import grpo_and_kl as study

    rows = measurements.read("grpo_runs")
    assert rows.seed.nunique() >= 8
    assert not rows.duplicated(["seed", "control", *study.FACTORS]).any()
    assert rows.groupby(["steps", "lr", "kl", "delta", "top_p"]).ngroups == 1
    assert (rows.groupby("seed").p_correct_base.nunique() == 1).all()  # one base for all runs of a seed
    for outcome in ("p_correct_filtered", "grad_norm", "exact_kl"):
        assert len(study.effects(rows, outcome)) == rows.seed.nunique()
    for control in study.CONTROLS:
        assert len(study.control_effects(rows, control, "p_correct_filtered")) == rows.seed.nunique()


def test_shipped_mismatch_has_every_way_to_score_of_the_same_seeds():
    rows = measurements.read("grpo_mismatch")
    ways = ["dtype", "top_p", "keep_routing", "keep_sampling_mask", "part"]
    assert (rows.groupby("seed").size() == 2**5).all()
    assert not rows.duplicated(["seed", *ways]).any()
    assert set(rows.seed) == set(measurements.read("grpo_runs").seed)


def test_shipped_mismatch_controls_have_every_replay_of_the_same_seeds():
    from dslib.experiments import grpo_tables as tables

    rows = measurements.read("grpo_mismatch_controls")
    assert not rows.duplicated(["seed", "replayed"]).any()
    assert set(rows.replayed) == set(tables.REPLAYED)
    assert set(rows.seed) == set(measurements.read("grpo_mismatch").seed)


def test_shipped_rlvr_has_every_mark_of_every_seed_and_the_rates_that_its_table_averages():
    from dslib.evaluation import exact_pass_at_k
    from dslib.experiments import rlvr_passk as study
    from dslib.experiments import rlvr_tables as tables

    rows, problems = measurements.read("rlvr"), measurements.read("rlvr_problems")
    assert sorted(set(rows.seed)) == list(range(8))
    assert not rows.duplicated(["task", "set", "policy", "step", "seed"]).any()
    for (task, name), part in rows.groupby(["task", "set"]):
        assert part.groupby("seed").step.apply(lambda steps: tuple(sorted(steps))).nunique() == 1
        for policy in ("base", "rl"):
            last = part[part.policy == policy].sort_values(["seed", "step"]).groupby("seed").last()
            rates = tables.rates_of(problems, task, name, policy)
            for k in study.KS:
                found = [exact_pass_at_k(p, k) for p in rates]
                assert found == pytest.approx(last[f"pass_{k}"].tolist(), rel=1e-5)
    assert (Path(data.__file__).parent / "measurements" / "rlvr_problems.csv").stat().st_size < 500_000


def test_shipped_scratchpads_have_every_mark_of_every_seed_and_shares_of_their_right_answers():
    rows = measurements.read("rlvr_scratchpads")
    assert sorted(set(rows.seed)) == list(range(8))
    assert rows.groupby(["seed", "set"]).step.apply(tuple).nunique() == 1
    assert (rows.share_sound + rows.share_unsound <= 1 + 1e-12).all()
    assert (rows.sound_1 <= rows.pass_1).all()


def test_shipped_rl_algorithms_have_eight_seeds_an_arm_and_equal_steps_and_samples_where_they_say_so():
    from dslib.experiments import rl_algorithms as study

    rows, curves = measurements.read("rl_algorithms"), measurements.read("rl_algorithms_curves")
    seeds = list(range(8))
    for arm in {*rows.arm} - {f"{name}, {rate}" for name in study.NAMES for rate in study.RATES}:
        assert sorted(rows[(rows.arm == arm) & (rows["mark"] == "end")].seed) == seeds, arm
    for rate in study.RATES:
        assert sorted(rows[(rows.arm == f"grpo, {rate}") & (rows["mark"] == "end")].seed) == seeds
    ends = rows[rows.arm.isin(study.NAMES) & (rows["mark"] == "end")]
    assert ends.groupby(["step", "lr", "prompts", "group", "beta"]).ngroups == 1
    equal = rows[rows.arm.isin(study.NAMES) & (rows["mark"] == "equal samples")]
    assert sorted(equal.groupby("arm").seed.nunique()) == [8] * len(study.NAMES)
    assert (equal.samples >= equal.prompts * equal.group * ends.step.iloc[0]).all()
    assert not rows.duplicated(["arm", "mark", "step", "seed"]).any()
    assert set(rows.columns) >= {f"{where}_{k}" for where in ("train", "held") for k in study.KS}
    assert set(curves.seed) == set(rows.seed)


def test_shipped_agent_context_has_every_arm_in_the_same_thousand_worlds():
    from dslib.experiments.agent_context import StudyConfig
    from dslib.experiments.agent_context_tables import unpack

    packed = measurements.read("agent_context")
    assert sorted(packed.arm) == sorted(arm.name for arm in StudyConfig().arms)
    assert set(packed.worlds) == {StudyConfig().parts * StudyConfig().part}
    assert packed.worlds.min() >= 1000
    rows = unpack(packed)
    assert (rows.groupby("arm").world.nunique() == packed.worlds.iloc[0]).all()
    assert (rows.solved == (rows.outcome == "solved")).all()
    assert rows.calls.between(0, 40).all()
    assert (Path(data.__file__).parent / "measurements" / "agent_context.csv").stat().st_size < 1_000_000


def test_shipped_search_policies_are_small_and_say_in_which_window_they_were_trained():
    from dslib.experiments.search_policy import shipped_policy

    for name, window in {"search_policy": None, "search_policy_sft": None, "search_policy_128": 128}.items():
        _, _, known = shipped_policy(name)
        assert known["about"]["training_window"] == window
        assert known["command"].startswith("python -m dslib.experiments.train_search_policy")
        assert data.path(f"checkpoints/{name}.safetensors").stat().st_size < 4_000_000


def test_shipped_cold_start_has_every_stage_of_every_seed_and_policies_that_load():
    from dslib.experiments import cold_start as study

    config = study.ColdStartConfig()
    rows, curves = (measurements.read(name) for name in study.TABLES)
    assert rows.seed.nunique() >= 8
    assert set(rows.dose) == set(curves.dose) == set(config.doses)
    assert not rows.duplicated(["dose", "seed", "stage", "prompt"]).any()
    for (dose, _), part in rows.groupby(["dose", "seed"]):
        assert set(part.stage) == {"fine-tuned", "fine-tuned, greedy", *study.stages_of(config, dose)}
        assert set(part.prompt) == set(study.PROMPTS)
    for (dose, _), part in curves.groupby(["dose", "seed"]):
        assert part.groupby("stage").step.max().to_dict() == dict.fromkeys(
            study.stages_of(config, dose), config.rl_steps
        )
    assert rows[["interleaved", "solved"]].stack().between(0, 1).all()
    for stage in study.SHIPPED:
        assert study.shipped(config, stage)


def test_shipped_reasoning_has_every_stage_of_every_seed_and_models_that_load():
    from dslib.experiments import reasoning_pipeline as study

    config = study.StudyConfig()
    stages, curves, efforts = (measurements.read(name) for name in study.TABLES)
    for _, part in stages.groupby("seed"):
        assert sorted(part.stage) == sorted(set(study.STAGES) - set(study.EFFORTS))
    assert set(stages.seed) == set(curves.seed) == set(efforts.seed)
    assert stages.seed.nunique() >= 5
    assert set(efforts.effort) == set(config.asked)
    assert set(efforts[efforts.trained == 1].effort) == set(config.penalty.levels)
    assert set(study.shipped(config)) == set(study.SHIPPED)
