import errno
import json
import os
import re

import pytest

from dslib.suite import rundir, session
from dslib.suite.rundir import RunDirectory


@pytest.fixture
def place(tmp_path, monkeypatch, write_notebook, write_claims):
    write_notebook(tmp_path / "notebooks" / "01_toy.ipynb", "x = 1", parameters="profile = 'quick'\nseed = 0")
    write_notebook(tmp_path / "notebooks" / "02_bare.ipynb", "x = 1", parameters=None)
    monkeypatch.setenv("DSLIB_CLAIMS", str(write_claims(tmp_path / "claims.toml", [])))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nope"], "no notebook is called 'nope'"),
        (["run", "--profile", "slow"], "slow"),
        (["run", "--jobs", "0"], "jobs=0"),
        (["run", "--timeout", "-1"], "timeout=-1"),
        (["run", "--timeout", "nan"], "timeout=nan"),
        (["run", "1", "--param", "sed=1"], "01_toy: there is no parameter 'sed'; did you mean 'seed'"),
        (["run", "1", "--param", "seed=x"], "parameter 'seed' takes int"),
        (["run", "1", "--param", "seed"], "must read name=value"),
        (["run", "1", "-p", "seed=1", "-p", "seed=2"], "given twice"),
        (["run", "1", "--param", "profile=full"], "--profile full"),
        (["run", "2", "--param", "seed=1"], "no cell is tagged 'parameters'"),
        (["run", "--notebooks", "nowhere"], "nowhere"),
        (["run", "--out", "notebooks"], "directory of the notebooks"),
        (["run", "--out", "."], "holds other files"),
        (["run", "--out", "claims.toml"], "is a file"),
        (["run", "--resume", "--out", "typo"], "there is no run in typo to continue"),
        (["run", "elsewhere/01_toy.ipynb"], "elsewhere/01_toy.ipynb is no such file"),
        (["report"], "there is no run"),
        (["lint", "nope"], "no notebook is called"),
        (["bench", "nope"], "no benchmark 'nope'"),
        (["nope"], "nope"),
    ],
)
def test_a_request_that_makes_no_sense_exits_2_and_runs_nothing(
    place, dslib_command, capsys, arguments, message
):
    assert dslib_command(*arguments) == 2
    # The terminal library may break lines.
    assert message in re.sub(r"\s*\n\s*", " ", capsys.readouterr().err)
    assert not (place / "runs").exists()


def test_broken_claims_stop_a_run_before_it_starts(place, dslib_command, capsys, write_claims, claim_row):
    write_claims(place / "claims.toml", [claim_row(op="==")])
    assert dslib_command("run") == 2
    assert "claim 'toy.mean'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["run"], ["report"], ["lint"], ["lint", "--fix"], ["list"]], ids=" ".join
)
def test_a_claim_of_an_unknown_kind_is_one_line_and_nothing_is_written(
    place, dslib_command, capsys, write_claims, write_notebook, claim_row, arguments
):
    # A run that could be judged again, and a notebook that could be cleaned.
    RunDirectory(place / "runs" / "a").prepare({"profile": "quick", "notebooks": []}, keep=False)
    rundir.point_latest(place / "runs", place / "runs" / "a")
    write_notebook(place / "notebooks" / "01_toy.ipynb", "x = 1", metadata={"widgets": {}})
    write_claims(place / "claims.toml", [claim_row(kind="identity")])
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert dslib_command(*arguments) == 2
    assert capsys.readouterr().err == (
        "dslib: claim 'toy.mean': kind='identity': Input should be 'claim' or 'structural'\n"
    )
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_list_shows_numbers_titles_and_claims(place, dslib_command, capsys):
    assert dslib_command("list") == 0
    out = capsys.readouterr().out
    assert "01_toy" in out
    assert "A stub" in out


def test_lint_exits_1_on_findings_and_0_after_fix(place, dslib_command, capsys):
    file = place / "notebooks" / "01_toy.ipynb"
    raw = json.loads(file.read_text())
    raw["cells"][1]["execution_count"] = 7
    file.write_text(json.dumps(raw))
    assert dslib_command("lint", "1") == 1
    assert "execution count 7" in capsys.readouterr().out
    assert dslib_command("lint", "1", "--fix") == 0


def test_help_is_quick_because_it_imports_nothing_heavy():
    import subprocess
    import sys

    code = (
        "import sys; import dslib.suite.cli; "
        "print([m for m in ('torch', 'papermill', 'pydantic', 'nbformat', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("[]", "['rich']")


def test_a_run_from_inside_notebooks_writes_beside_them_and_report_judges_it_again(
    place, dslib_command, capsys, monkeypatch, write_notebook, write_claims, claim_row
):
    report = (
        "from dslib.suite import report\n_ = report('toy.mean', [-1.0, -1.5, -0.5, -1.0 - seed / 10, -1.0])"
    )
    write_notebook(place / "notebooks" / "01_toy.ipynb", report, parameters="profile = 'quick'\nseed = 0")
    write_claims(place / "claims.toml", [claim_row()])
    monkeypatch.chdir(place / "notebooks")
    assert dslib_command("run", "1", "--param", "seed=3") == 0
    out = capsys.readouterr().out
    assert "1 / 1" in out
    run = rundir.latest(place / "runs")
    assert run is not None
    board = json.loads((run / "scoreboard.json").read_text())
    assert board["claims"][0]["samples"][3] == -1.3
    # The registry changes; the samples stay.
    monkeypatch.chdir(place)
    write_claims(place / "claims.toml", [claim_row(threshold=-5.0)])
    assert dslib_command("report") == 1
    assert "contradicted" in capsys.readouterr().out
    write_claims(place / "claims.toml", [claim_row(), claim_row(id="toy.other")])
    assert dslib_command("report") == 1
    assert "01_toy does not report it" in capsys.readouterr().out
    # The claims a notebook shows inline are part of what it depends on.
    write_claims(place / "claims.toml", [claim_row()])
    assert dslib_command("report") == 0
    assert dslib_command("run", "--resume") == 0
    assert "unchanged, kept" in capsys.readouterr().out
    settings = RunDirectory(run).settings
    assert (settings["given"], settings["profile"]) == ({"seed": "3"}, "quick")


def test_the_same_run_gives_the_same_files_to_the_last_byte_and_may_be_named_relatively(
    place, dslib_command, write_notebook, capsys
):
    code = "import sys\nprint({'a', 'b', 'c', 'd'}, file=sys.stderr)\nprint(profile)\n1 + 1"
    write_notebook(place / "notebooks" / "01_toy.ipynb", code)
    for name in ("a", "b"):
        assert dslib_command("run", "1", "--profile", "smoke", "--out", name) == 0
    for file in ("01_toy.ipynb", "01_toy.html"):
        assert (place / "a" / file).read_bytes() == (place / "b" / file).read_bytes()
    assert not (place / "runs").exists(), "a run with a place of its own does not move the pointer"
    assert dslib_command("run", "1", "--resume", "--out", "a") == 0
    assert RunDirectory(place / "a").settings["profile"] == "smoke", "a run goes on as it was asked for"
    assert dslib_command("run", "1", "--resume", "--out", "a", "--profile", "quick") == 2
    assert "has profile smoke" in capsys.readouterr().err


def test_the_pointer_to_the_newest_run_is_replaced_and_works_without_links(tmp_path, monkeypatch):
    first, second = rundir.new_directory(tmp_path), rundir.new_directory(tmp_path)
    assert first != second, "two runs may start in one second"
    rundir.point_latest(tmp_path, first)
    rundir.point_latest(tmp_path, second)
    assert rundir.latest(tmp_path) == second.resolve()
    (tmp_path / "latest").unlink()

    def impossible(*_, **__):
        raise OSError("no links here")

    monkeypatch.setattr("pathlib.Path.symlink_to", impossible)
    rundir.point_latest(tmp_path, first)
    assert rundir.latest(tmp_path) == first.resolve()
    assert sorted(os.listdir(tmp_path)) == sorted([first.name, second.name, "latest.txt"])


def test_two_runs_cannot_share_a_directory(tmp_path):
    from filelock import FileLock

    from dslib.suite import runner

    with FileLock(tmp_path / ".lock"), pytest.raises(rundir.RunError, match="another run is using"):
        runner.execute(runner.Plan((), "smoke", 1.0, 1), RunDirectory(tmp_path), display=None)


def test_what_was_named_relatively_is_found_by_kernels_too(place, monkeypatch):
    from dslib.suite.processes import worker_environment

    monkeypatch.setenv("DSLIB_CLAIMS", "claims.toml")
    monkeypatch.setenv("DSLIB_CACHE", "off")
    environment = worker_environment("run", "job", 1, "smoke", "runtime")
    assert environment["DSLIB_CLAIMS"] == str(place / "claims.toml")
    assert environment["DSLIB_CACHE"] == "off", "a word, not a directory"
    assert environment["DSLIB_HEADLESS"] == "1", "widgets must know that nobody is there"


def test_a_run_directory_follows_where_we_stand(place, monkeypatch):
    assert session.runs_directory(place / "notebooks") == place / "runs"
    monkeypatch.chdir(place / "notebooks")
    assert session.runs_directory(place / "notebooks") == place / "runs"


def test_a_place_that_cannot_be_written_is_one_line(place, dslib_command, capsys, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dslib.suite.rundir.check_writable", full)
    for arguments in (["run", "1"], ["run", "1", "--out", "there"]):
        assert dslib_command(*arguments) == 2
        said = capsys.readouterr().err
        assert "cannot be written (No space left on device); name a directory that can with --out" in said
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("out", "hint"), [([], "--resume`"), (["--out", "my runs"], "--resume --out 'my runs'`")]
)
def test_an_interrupted_run_says_how_this_very_run_goes_on(
    place, dslib_command, capsys, monkeypatch, out, hint
):
    from dslib.suite import runner

    def interrupted(plan, run, display, **options):
        run.prepare({"profile": "quick", "notebooks": [], "requested": []}, keep=False)
        return runner.Outcome({}, signal=2)

    monkeypatch.setattr(runner, "execute", interrupted)
    assert dslib_command("run", "1", *out) == 130
    assert f"`dslib run {hint} continues" in capsys.readouterr().out
