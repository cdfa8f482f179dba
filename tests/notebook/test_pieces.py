"""The small pieces of a notebook, each tested where it once went wrong or easily would."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from dslib.notebook import PALETTE, attempt, progress, results, say, setup, show_source, show_table, sizes
from dslib.notebook.style import INK
from dslib.runs.workers import THREAD_VARIABLES


def test_importing_loads_nothing_heavy():
    heavy = ("torch", "matplotlib", "pandas", "IPython", "ipywidgets", "joblib", "numpy")
    code = f"import sys, dslib.notebook, dslib.runs.cache; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# --- style ---------------------------------------------------------------------------------------


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_axes_are_readable_on_white_and_on_the_dark_theme():
    assert contrast(INK, "#ffffff") > 4.3
    assert contrast(INK, "#111111") > 4.2


def test_first_colours_differ_in_greyscale_and_show_on_both_grounds():
    first = PALETTE[:3]
    assert all(contrast(a, b) > 1.3 for i, a in enumerate(first) for b in first[:i])
    assert all(contrast(c, ground) > 2 for c in first for ground in ("#ffffff", "#111111"))


def test_a_figure_is_the_same_bytes_every_time():
    import io

    import matplotlib
    from matplotlib.figure import Figure

    from dslib.notebook import band, paper_line
    from dslib.notebook.style import style_parameters

    def draw() -> bytes:
        with matplotlib.rc_context(style_parameters()):
            figure = Figure()
            ax = figure.subplots()
            band(ax, [1, 2, 3], [[1, 2, 3], [2, 3, 5]], label="muon")
            paper_line(ax, 2.0, "paper: 2.0")
            ax.legend()
            file = io.BytesIO()
            figure.savefig(file, format="svg", metadata={"Date": None})
            return file.getvalue()

    assert draw() == draw()
    assert b"<text" not in draw()  # text as outlines: nothing depends on the reader's fonts


def test_band_is_the_t_interval_over_seeds():
    from matplotlib.figure import Figure
    from scipy import stats

    from dslib.notebook import band

    ax = Figure().subplots()
    samples = np.array([[1.0, 2.0], [2.0, 4.0], [6.0, 3.0]])
    line = band(ax, [0, 1], samples)
    low, high = stats.t.interval(0.95, 2, samples[:, 0].mean(), stats.sem(samples[:, 0]))
    corners = ax.collections[0].get_paths()[0].vertices
    assert line.get_ydata()[0] == pytest.approx(3.0)
    assert sorted({round(y, 6) for x, y in corners if x == 0}) == pytest.approx([low, high], abs=1e-5)


@pytest.mark.parametrize("samples", [[1.0, 2.0], [[1.0, 2.0, 3.0]], [[np.nan, 1.0]]])
def test_band_refuses_what_it_would_draw_wrong(samples):
    from matplotlib.figure import Figure

    from dslib.notebook import band

    with pytest.raises(ValueError, match="samples"):
        band(Figure().subplots(), [0, 1], samples)


# --- source --------------------------------------------------------------------------------------


def test_source_is_shown_without_docstring_and_with_its_place(capsys):
    show_source(say)
    shown = capsys.readouterr().out
    assert shown.startswith("# dslib.notebook.prose.say\ndef say(")
    assert "Raises ValueError" not in shown
    show_source(say, docstring=True)
    assert "Raises ValueError" in capsys.readouterr().out


def test_chosen_lines_are_shown_and_lines_outside_refused(capsys):
    show_source(say, lines=(1, 1))
    assert capsys.readouterr().out.splitlines()[1].startswith("def say(")
    with pytest.raises(ValueError, match="has the lines 1 to"):
        show_source(say, lines=(1, 999))


def test_an_object_without_source_is_refused_by_name():
    with pytest.raises(TypeError, match="len"):
        show_source(len)


# --- prose and tables ----------------------------------------------------------------------------


def test_numbers_come_from_values_and_formula_braces_survive(capsys):
    say("{name}: ${{x}} = {loss:.2f}$", name="Muon", loss=np.float32(1.239))
    assert capsys.readouterr().out == "Muon: ${x} = 1.24$\n"


@pytest.mark.parametrize(
    ("template", "values", "match"),
    [
        ("{loss:.3f}", {}, "loss"),
        ("{loss:.3f}", {"loss": float("nan")}, "loss=nan"),
        ("{loss:.3f}", {"loss": None}, "loss=None"),
        ("{loss:.3f}", {"loss": np.array([1.0, 2.0])}, "loss"),
        ("{loss:.3f}", {"loss": "x"}, "cannot format"),
        ("{}", {"loss": 1.0}, "name"),
        ("nothing", {"loss": 1.0}, "does not use"),
    ],
)
def test_a_sentence_without_its_measurement_is_an_error(template, values, match):
    with pytest.raises(ValueError, match=match):
        say(template, **values)


def test_table_has_caption_formats_and_escaped_cells(capsys):
    from dslib.notebook.tables import _as_html

    show_table(pd.DataFrame({"m": ["a<b", "c"], "x": [0.12345, np.nan]}), "Losses", {"x": ".2f"})
    assert capsys.readouterr().out == "Losses\nm       x\na<b  0.12\nc       –\n"
    assert "a&lt;b" in _as_html(["m"], [["a<b"]], [False], "t")


def test_table_refuses_a_format_for_a_column_that_is_not_there():
    with pytest.raises(ValueError, match="'y'"):
        show_table(pd.DataFrame({"x": [1]}), "t", {"y": ".2f"})


# --- setup ---------------------------------------------------------------------------------------


def test_setup_names_versions_on_one_line(capsys, monkeypatch):
    import matplotlib

    for name in THREAD_VARIABLES:  # put back what setup changes for good
        monkeypatch.setenv(name, "1")

    with matplotlib.rc_context():
        setup("smoke", 0)
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert all(word in line for word in ("dslib", "Python", "torch", "core", "smoke", "seed 0"))


def test_a_readers_numbers_are_made_on_one_thread_whatever_the_machine_and_the_order_of_imports():
    code = "import os; os.environ['OMP_NUM_THREADS'] = '2'; {}; from dslib.notebook import setup; setup('smoke', 0)"
    code += "; import torch; print(torch.get_num_threads(), os.environ['OPENBLAS_NUM_THREADS'])"
    for first in ("import torch", "pass"):
        out = subprocess.check_output([sys.executable, "-c", code.format(first)], text=True)
        assert out.splitlines()[-1] == "1 1", first


def test_wrong_profile_and_seed_are_named():
    with pytest.raises(ValueError, match="'fast' must be one of smoke, quick, full"):
        setup("fast", 0)
    with pytest.raises(TypeError, match="seed='3'"):  # what papermill makes of a numpy integer
        setup("smoke", "3")


def test_sizes_picks_the_row_and_names_a_missing_one():
    assert sizes({"smoke": 2, "quick": 3}, "quick") == 3
    with pytest.raises(ValueError, match="no row for profile='full'"):
        sizes({"smoke": 2}, "full")


# --- progress ------------------------------------------------------------------------------------


def test_a_log_gets_five_lines_however_long_the_loop(capsys):
    assert list(progress((i for i in range(1000)), total=1000, label="train")) == list(range(1000))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"train: {p} %" for p in (0, 25, 50, 75, 100)]


def test_headless_progress_is_silent(capsys, monkeypatch):
    monkeypatch.setenv("DSLIB_HEADLESS", "1")
    assert list(progress([1, 2])) == [1, 2]
    assert capsys.readouterr() == ("", "")


def test_exceptions_of_a_generator_propagate():
    def broken():
        yield 1
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        list(progress(broken(), total=2))


def test_progress_refuses_at_the_call_and_not_at_the_first_item():
    with pytest.raises(TypeError, match="iterable=3"):
        progress(3)
    with pytest.raises(ValueError, match="total=-1"):
        progress([], total=-1)


# --- exercises -----------------------------------------------------------------------------------


def test_stub_leaves_an_exercise_open_and_a_solution_solves_it(capsys):
    def stub():
        raise NotImplementedError

    with attempt("t1"):
        stub()
    assert results()["t1"] == "open"
    assert "not solved yet" in capsys.readouterr().out
    with attempt("t1"):
        assert True
    assert results()["t1"] == "solved"


def test_wrong_solution_is_an_error_not_an_open_exercise():
    with pytest.raises(AssertionError), attempt("t2"):
        assert False  # noqa: B011, PT015
    assert results()["t2"] == "failed"


def test_a_librarys_not_implemented_error_is_no_open_exercise():
    import torch

    with pytest.raises(NotImplementedError), attempt("t3"):
        torch.nn.Module()(1)
    with pytest.raises(NotImplementedError), attempt("t3"):
        torch.linalg.svd(torch.ones(2, 2, dtype=torch.int32).to_sparse())
