"""Shipped or live: tables that know where they come from, badges that say it, comparisons that fail a run."""

import pandas as pd
import pytest

from dslib import data
from dslib import notebook as nb
from dslib.notebook.badges import badge_text
from dslib.runs import measurements

ROWS = pd.DataFrame({"arm": ["a", "a", "b", "b"], "seed": [0, 1, 0, 1], "loss": [1.0, 2.0, 3.0, 4.0]})


@pytest.fixture
def tree(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(data, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(data, "path", lambda name: tmp_path / name)
    measurements.write("toy", ROWS, command="dslib run 99 --profile full", corpus="abc")
    return tmp_path


def never():
    raise AssertionError("made although it was to be read")


# --- shipped -------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["smoke", "quick"])
def test_a_shipped_table_is_read_and_tells_who_made_it(tree, capsys, profile):
    table = nb.shipped("toy", never, profile=profile)
    assert table[list(ROWS)].equals(ROWS)
    line = capsys.readouterr().out
    assert line.startswith("toy: shipped, 2 seeds, 4 rows · made 2")
    assert "by dslib run 99 --profile full · Python 3." in line
    assert line.count("\n") == 1


def test_full_makes_the_table_and_writes_nothing_unasked(tree, capsys):
    before = (tree / "measurements" / "toy.csv").read_bytes()
    table = nb.shipped("toy", lambda: ROWS.assign(loss=9.0), profile="full")
    assert table.loss.tolist() == [9.0] * 4
    assert capsys.readouterr().out == "toy: live, 2 seeds, 4 rows · made now, not saved\n"
    assert (tree / "measurements" / "toy.csv").read_bytes() == before


def test_full_with_save_returns_what_a_reader_of_the_file_will_see(tree):
    made = {"profile": "full", "save": True, "command": "again", "corpus": "def"}
    table = nb.shipped("toy", lambda: ROWS[ROWS.arm == "b"].assign(loss=9.0), replacing="arm", **made)
    assert table.equals(measurements.read("toy"))
    assert table[["arm", "loss", "command", "corpus"]].to_numpy().tolist() == [
        ["a", 1.0, "dslib run 99 --profile full", "abc"],
        ["a", 2.0, "dslib run 99 --profile full", "abc"],
        ["b", 9.0, "again", "def"],
        ["b", 9.0, "again", "def"],
    ]
    assert badge_text(table) == "shipped, 2 seeds"


def test_tables_made_together_come_in_the_order_of_their_names(tree):
    both = {"second": ROWS.assign(loss=2.0), "first": [{"loss": 1.0}]}
    for made in (both, (both["first"], both["second"])):
        first, second = nb.shipped(("first", "second"), lambda made=made: made, profile="full")
        assert first.loss.tolist() == [1.0]
        assert second.loss.tolist() == [2.0] * 4


def test_rows_of_a_generator_are_taken_one_by_one_and_in_lists(tree, capsys):
    rows = ROWS.to_dict("records")
    table = nb.shipped("toy", lambda: iter([rows[0], rows[1:]]), profile="full", total=2)
    assert table.equals(ROWS)
    assert capsys.readouterr().err == "toy: 0 %\ntoy: 50 %\ntoy: 100 %\n"


def test_smoke_makes_its_tiny_rows_where_the_notebook_wants_that(tree):
    table = nb.shipped("toy", lambda: ROWS[:1], profile="smoke", make_at=("smoke", "full"))
    assert badge_text(table) == "live, 1 seed"


def test_a_table_of_another_text_says_so(tree, capsys):
    nb.shipped("toy", corpus="abc")
    assert "another corpus" not in capsys.readouterr().out
    nb.shipped("toy", corpus="xyz")
    assert "of another corpus (digest abc) than here (xyz)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"profile": "fast"}, "'fast' is unknown"),
        ({"make_at": ("fulll",)}, "'fulll' is unknown"),
        ({"save": True, "make": never, "command": "x"}, "nothing at profile 'quick'"),
        ({"save": True, "profile": "full", "command": "x"}, "without make"),
        ({"save": True, "profile": "full", "make": never}, "without a command"),
    ],
)
def test_what_could_not_be_saved_is_refused_before_it_is_made(tree, options, words):
    with pytest.raises(ValueError, match=words):
        nb.shipped("toy", **options)


def test_make_that_returns_no_tables_or_too_few_is_refused(tree):
    with pytest.raises(TypeError, match="make returned a float for 'toy'"):
        nb.shipped("toy", lambda: 1.0, profile="full")
    with pytest.raises(ValueError, match="1 tables for the 2 names toy, other"):
        nb.shipped(("toy", "other"), lambda: [ROWS], profile="full")
    with pytest.raises(ValueError, match="no table 'other'; it has toy"):
        nb.shipped(("toy", "other"), lambda: {"toy": ROWS}, profile="full")


# --- badges --------------------------------------------------------------------------------------


def test_a_part_of_a_table_knows_its_own_seeds(tree):
    table = nb.shipped("toy")
    assert badge_text(table[table.seed == 1]) == "shipped, 1 seed"
    assert badge_text(table.set_index(["arm", "seed"]).loc["a"].loss) == "shipped, 2 seeds"
    means = table.groupby("arm").mean(numeric_only=True)
    assert means.seed.tolist() == [0.5, 0.5], "a mean of seeds is no seed"
    assert badge_text(means) == "shipped, 2 seeds"


def test_a_table_without_seeds_says_none_or_what_it_is_told(tree):
    measurements.write("toy", ROWS.drop(columns="seed"), command="x")
    assert badge_text(nb.shipped("toy")) == "shipped"
    assert badge_text(nb.shipped("toy", seeds=8)) == "shipped, 8 seeds"


def test_a_mixed_figure_names_its_parts(tree):
    table = nb.shipped("toy")
    assert badge_text({"lines": table, "dots": "live"}) == "lines: shipped, 2 seeds · dots: live"


def test_a_merge_of_shipped_and_live_does_not_pass_as_shipped(tree):
    table = nb.shipped("toy")
    with pytest.raises(ValueError, match="does not know where its rows come from"):
        badge_text(table.merge(ROWS, on=["arm", "seed"]))


@pytest.mark.parametrize(
    ("origin", "error", "words"),
    [
        ("", ValueError, "says not where"),
        ("lively", ValueError, "begin with 'live', 'shipped', 'formula' or 'paper'"),
        ({}, ValueError, "names no part"),
        ({"dots": "new"}, ValueError, "'new'"),
        (ROWS, ValueError, "built anew"),
        (3, TypeError, "int"),
    ],
)
def test_a_badge_that_says_nothing_is_refused(origin, error, words):
    with pytest.raises(error, match=words):
        badge_text(origin)


@pytest.fixture
def figure():
    import matplotlib
    from matplotlib.figure import Figure

    from dslib.notebook.style import style_parameters

    with matplotlib.rc_context(style_parameters()):
        yield Figure(figsize=(3, 2.5))


def boxes(figure):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    panels = [ax.get_tightbbox(renderer) for ax in figure.axes]
    return panels, [text.get_window_extent(renderer) for text in figure.texts]


@pytest.mark.parametrize("origin", ["live", {"lines": "shipped, 8 seeds", "dots": "live", "dashes": "paper"}])
def test_a_badge_stands_inside_a_narrow_figure_and_below_its_panels(figure, origin):
    for ax in figure.subplots(1, 2):
        ax.set(xlabel="steps", title="loss")
    nb.badge(figure, origin)
    panels, (label,) = boxes(figure)
    assert label.x0 >= 0
    assert label.x1 <= figure.bbox.x1
    assert label.y0 >= 0
    assert all(label.y1 < panel.y0 for panel in panels)


def test_axes_and_inner_figures_stand_for_their_figure_and_a_second_badge_replaces_the_first(figure):
    inner = figure.subfigures(1, 2)[0]
    nb.badge(inner.subplots(), "live")
    nb.badge(inner, "live, seed 3")
    assert [text.get_text() for text in figure.texts] == ["live, seed 3"]
    assert inner.texts == []


def test_without_a_layout_that_keeps_it_free_the_badge_hangs_below_the_figure():
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().set_xlabel("steps")
    nb.badge(figure, "live")
    panels, (label,) = boxes(figure)
    assert label.y1 <= min(panel.y0 for panel in panels)


def test_a_badge_needs_a_figure():
    with pytest.raises(TypeError, match="figure is a list"):
        nb.badge([], "live")


def test_a_tables_badge_stands_behind_its_caption(capsys):
    from dslib.notebook.tables import _as_html

    nb.show_table(pd.DataFrame({"x": [1]}), "Losses", badge={"x": "live"})
    assert capsys.readouterr().out.startswith("Losses [x: live]\n")
    assert ">paper &lt;1&gt;</small></caption>" in _as_html(["x"], [["1"]], [True], "Losses", "paper <1>")
    with pytest.raises(ValueError, match="says not where"):
        nb.show_table(pd.DataFrame({"x": [1]}), "Losses", badge="new")
