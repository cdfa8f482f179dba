import json

import pytest

from dslib.suite import lint, lint_style
from dslib.suite._nbformat import nbformat

REPORT = "from dslib.suite import report\nreport('toy.mean', [1.0])"


@pytest.fixture
def claims(make_claim):
    claim = make_claim()
    return {claim.id: claim}


@pytest.fixture
def file(tmp_path, write_notebook):
    return write_notebook(tmp_path / "01_toy.ipynb", REPORT)


def change(file, edit):
    raw = json.loads(file.read_text())
    edit(raw)
    file.write_text(json.dumps(raw))


def messages(file, claims):
    return [str(finding) for finding in lint.lint_notebook(file, claims)]


def test_a_clean_notebook_has_no_findings(file, claims):
    assert messages(file, claims) == []


EDITS = {
    "saved outputs": lambda raw: raw["cells"][2].update(
        outputs=[{"output_type": "stream", "name": "stdout", "text": "x"}]
    ),
    "execution count 3": lambda raw: raw["cells"][2].update(execution_count=3),
    "saved widget state": lambda raw: raw["metadata"].update(widgets={}),
    "not 4.5": lambda raw: raw.update(nbformat_minor=4),
    "asks for the kernel 'julia'": lambda raw: raw["metadata"].update(kernelspec={"name": "julia"}),
    "asks for the kernel None": lambda raw: raw["metadata"].pop("kernelspec"),
    "executed copy": lambda raw: raw["metadata"].update(papermill={}),
    "no valid cell id": lambda raw: raw["cells"][2].pop("id"),
    "has the id 'parameters' of cell 2": lambda raw: raw["cells"][2].update(id="parameters"),
    "no cell is tagged 'parameters'": lambda raw: raw["cells"][1]["metadata"].pop("tags"),
    "no literal": lambda raw: raw["cells"][1].update(source="a = max(1, 2)"),
    "16 lines of code": lambda raw: raw["cells"][2].update(source=REPORT + "\nx = 1\n\n" * 14),
    "imports relatively": lambda raw: raw["cells"][2].update(source=REPORT + "\nfrom . import x"),
    "installs or downloads: '%pip": lambda raw: raw["cells"][2].update(source=REPORT + "\n%pip install x"),
    "installs or downloads: 'urlopen": lambda raw: raw["cells"][2].update(source=REPORT + "\nurlopen('x')"),
    "registered for it, but it does not report it": lambda raw: raw["cells"][2].update(source="x = 1"),
    "which no claim registers; did you mean 'toy.mean'": lambda raw: raw["cells"][2].update(
        source=REPORT + "\nreport(id='toy.men', samples=[1])"
    ),
    "was injected by a run": lambda raw: raw["cells"][2]["metadata"].update(tags=["injected-parameters"]),
}


@pytest.mark.parametrize("message", EDITS)
def test_each_fault_is_found(file, claims, message):
    change(file, EDITS[message])
    found = messages(file, claims)
    assert len(found) == 1
    assert message in found[0]


def test_magics_do_not_hide_what_the_rest_of_a_cell_reports(file, claims):
    change(file, lambda raw: raw["cells"][2].update(source="%time x = 1\n" + REPORT))
    assert messages(file, claims) == []


def test_an_id_computed_in_a_loop_is_left_to_the_runner(file, claims):
    source = "for name in names:\n    report(f'toy.{name}', x)"
    change(file, lambda raw: raw["cells"][2].update(source=source))
    assert messages(file, claims) == []


def test_a_claim_of_another_notebook_is_named(file, make_claim):
    other = make_claim(notebook="02_other")
    assert "registered for 02_other" in messages(file, {other.id: other})[0]
    assert "not there" in str(lint.lint_unowned_claims([file], {other.id: other})[0])


def test_a_file_that_is_no_notebook_is_a_finding(tmp_path, claims):
    broken = tmp_path / "01_toy.ipynb"
    broken.write_text("[]")
    assert "cannot be read" in messages(broken, claims)[0]
    assert lint.fix(broken) is False


def test_a_long_notebook_is_a_warning_only(tmp_path, write_notebook, claims):
    file = write_notebook(tmp_path / "01_toy.ipynb", REPORT, *["x = 1"] * 50)
    (finding,) = lint.lint_notebook(file, claims)
    assert finding.warning
    assert finding.message.startswith("53 cells")


def style(file, source):
    change(file, lambda raw: raw["cells"][2].update(source=REPORT + "\n" + source))
    return [(finding.warning, finding.message) for finding in lint.lint_notebook(file, {})][1:]


def test_cells_up_to_the_limit_are_no_finding(tmp_path, write_notebook, claims):
    own = 2  # the title and the parameters
    file = write_notebook(tmp_path / "01_toy.ipynb", REPORT, *["x = 1"] * (lint_style.CELLS - own - 1))
    assert messages(file, claims) == []


def test_lines_of_79_characters_are_counted_and_those_of_78_are_not(file):
    wide, fits = "x = '" + "a" * 73 + "'", "x = '" + "a" * 72 + "'"
    assert (len(wide), len(fits)) == (79, 78)
    (found,) = style(file, f"{wide}\n{fits}\n{wide}")
    assert found[0]
    assert found[1].startswith("2 lines of code are wider than 78 characters")
    assert found[1].endswith(": cell 3")


BARE = {
    "figures without nb.badge": [
        "fig, ax = plt.subplots()",
        "rows, (fig, axs) = [], plt.subplots(1, 2)",
        "def panel(x):\n    plt.figure()",
        "fig = plt.figure()\nnb.show_table(frame, 'Losses', badge=table)",
    ],
    "tables without badge=": [
        "nb.show_table(frame, 'Losses')",
        "nb.show_table(frame, 'Losses', {'x': '.2f'})",
    ],
}


@pytest.mark.parametrize(("words", "source"), [(words, each) for words in BARE for each in BARE[words]])
def test_a_figure_or_table_that_hides_whether_it_is_live_is_found(file, words, source):
    (found,) = style(file, source)
    assert found[0]
    assert found[1].startswith(words)


@pytest.mark.parametrize(
    "source",
    [
        "fig, ax = plt.subplots()\nnb.badge(fig, table)",
        "fig = plt.figure()\nbadge(fig, 'live')",
        "nb.show_table(frame, 'Losses', badge='live')",
        "nb.show_table(frame, 'Losses', None, 'live')",
        "report.figure(3)",
        "ax.plot(x)",
    ],
)
def test_what_says_where_it_comes_from_and_what_is_no_figure_are_clean(file, source):
    assert style(file, source) == []


GOLF = {
    "[ax.grid(False) for ax in axs]\nx = 1": "runs a comprehension",
    "for o.rate in rates:\n    pass": "loops over 'o.rate'",
    "x = [1 for a[0] in rates]": "loops over 'a[0]'",
    "nb.say('{a}', **{'a': 1})": "unpacks \"{'a': 1}\"",
}


@pytest.mark.parametrize("source", GOLF)
def test_golf_is_found(file, source):
    (found,) = style(file, source)
    assert found[0]
    assert found[1].startswith(GOLF[source])


@pytest.mark.parametrize(
    "source",
    [
        "[x + 1 for x in xs]",  # the cell's value, displayed
        "f(**settings)",
        "f(**{name: 1 for name in names})",
        "f(**{'not a name': 1}, **{'lambda': 2})",
        "for i, (a, b) in enumerate(pairs):\n    pass",
    ],
)
def test_plain_code_is_not_taken_for_golf(file, source):
    assert style(file, source) == []


@pytest.mark.parametrize("text", ["a loss in nats a byte.", "label='MB a token'", "nats an answer and more"])
def test_a_for_per_is_found_in_text_and_code(file, text):
    change(file, lambda raw: raw["cells"][0].update(source=text))
    assert any("'per' between its units" in message for message in messages(file, {}))


@pytest.mark.parametrize(
    "text", ["the bytes a token occupies", "nats per byte", "bits a reader needs", "a byte."]
)
def test_a_before_what_is_no_rate_is_left_alone(file, claims, text):
    change(file, lambda raw: raw["cells"][0].update(source=text))
    assert messages(file, claims) == []


def test_a_rule_taken_out_of_the_warnings_fails_the_lint(file, monkeypatch):
    monkeypatch.setattr(lint, "ONLY_WARN", lint_style.ONLY_WARN - {"width"})
    assert style(file, "x = '" + "a" * 80 + "'")[0][0] is False


def test_fix_clears_everything_a_run_left_and_nothing_else(file, claims):
    def dirty(raw):
        for name, edit in EDITS.items():
            if name.startswith(
                ("saved", "execution", "not 4.5", "asks for the kernel 'j", "executed", "no valid")
            ):
                edit(raw)

    change(file, dirty)
    sources = ["".join(cell["source"]) for cell in json.loads(file.read_text())["cells"]]
    assert lint.fix(file)
    assert messages(file, claims) == []
    notebook = nbformat.read(file, 4)
    nbformat.validate(notebook)
    assert [cell.source for cell in notebook.cells] == sources
    assert notebook.cells[1].metadata.tags == ["parameters"]
    once = file.read_bytes()
    assert lint.fix(file) is False, "a clean notebook is not written again"
    assert file.read_bytes() == once


def test_new_ids_are_the_same_everywhere(file):
    def forget(raw):
        for cell in raw["cells"]:
            cell.pop("id")

    change(file, forget)
    copy = file.with_name("02_copy.ipynb")
    copy.write_bytes(file.read_bytes())
    lint.fix(file)
    lint.fix(copy)
    assert file.read_bytes() == copy.read_bytes()


def test_a_pass_that_was_registered_as_a_failure_is_a_finding():
    row = {"id": "toy.mean", "notebook": "01_toy", "verdict": "held", "expected": "did not reproduce"}
    (finding,) = lint.lint_scoreboard({"claims": [row]})
    assert "registered as 'did not reproduce', but it held" in str(finding)
    assert not finding.warning
    assert lint.lint_scoreboard({"claims": [row | {"verdict": "did not reproduce"}]}) == []
    assert lint.lint_scoreboard(None) == []


def test_an_open_question_that_held_is_a_warning_since_it_may_end_either_way():
    row = {"id": "toy.mean", "notebook": "01_toy", "verdict": "held", "expected": "inconclusive"}
    (finding,) = lint.lint_scoreboard({"claims": [row]})
    assert finding.warning


def test_a_board_that_knows_no_expectations_has_no_findings():
    assert lint.lint_scoreboard({"claims": [{"id": "a.b", "notebook": "01_toy", "verdict": "held"}]}) == []


@pytest.mark.parametrize(
    ("lines", "tags", "said"), [(16, [], 1), (16, ["hide-input"], 0), (31, ["hide-input"], 1)]
)
def test_a_folded_figure_may_take_more_lines_than_code_that_is_read(lines, tags, said):
    source = "import matplotlib.pyplot as plt\n" + "plt.plot()\n" * (lines - 1)
    found = lint_style.style_findings([{"cell_type": "code", "source": source, "metadata": {"tags": tags}}])
    assert sum(rule == "lines" for _, rule, _ in found) == said


def test_only_what_draws_is_folded_away():
    cell = {"cell_type": "code", "source": "x = 1", "metadata": {"tags": ["hide-input"]}}
    assert [rule for _, rule, _ in lint_style.style_findings([cell])] == ["folded"]
