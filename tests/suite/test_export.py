"""An exported page must be complete without a network, and must not show anything wrong."""

import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from dslib.suite import export
from dslib.suite.export import ExportError, export_html, render_page

FETCHED = re.compile(
    r"<(?:script|link|iframe|object|embed|img|source|video|audio)\b[^>]*(?:src|href|data)\s*=\s*['\"]?(?:https?:)?//"
    r"|@import|url\(\s*['\"]?(?:https?:)?//",
    re.IGNORECASE,
)


def page(*cells, **options):
    return render_page(new_notebook(cells=list(cells)), **options)


def code(source="x", *outputs, tags=()):
    return new_code_cell(source, outputs=list(outputs), metadata={"tags": list(tags)})


def shown(**data):
    kinds = {"html": "text/html", "markdown": "text/markdown", "svg": "image/svg+xml", "latex": "text/latex"}
    kinds |= {"plain": "text/plain", "view": export.WIDGET_VIEW}
    return new_output("display_data", {kinds[k]: v for k, v in data.items()})


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A notebook with our widgets and progress, run headlessly by papermill, and its page."""
    import papermill

    folder = tmp_path_factory.mktemp("häuser und räume")
    draw = "def draw(k):\n    plt.plot([0, k])\n    print('k is', k)\n\ninteract(draw, k=(1, 9, 1, 4))"
    cells = [
        new_markdown_cell("# A title with $x^2$\n\n## One\n\n$$a = b \\tag{1}$$"),
        code("seed = 0", tags=["parameters"]),
        code("import matplotlib.pyplot as plt\nfrom dslib.notebook import *\nuse_style()"),
        code(draw),
        code("for step in progress(range(2000), label='train'):\n    pass"),
        code("say('Loss $L = {loss:.2f}$.', loss=1.25)"),
        code("plt.plot([1, 2])\nplt.show()"),
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), folder / "in.ipynb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSLIB_HEADLESS", "1")
        patch.setenv("MPLBACKEND", "Agg")  # a kernel that inherits this showed no figures
        papermill.execute_notebook(
            folder / "in.ipynb", folder / "out.ipynb", {"seed": 7}, progress_bar=False, execution_timeout=60
        )
    export_html(folder / "out.ipynb", folder / "out.html")
    return nbformat.read(folder / "out.ipynb", 4), (folder / "out.html").read_text(encoding="utf-8")


def test_headless_run_shows_the_panel_once_and_no_widget(executed):
    notebook, text = executed
    outputs = notebook.cells[4].outputs
    assert [o.output_type for o in outputs] == ["stream", "display_data"]
    assert outputs[0].text == "k is 4\n"
    assert "widgets" not in notebook.metadata
    assert "VBox" not in text


def test_headless_progress_leaves_nothing_in_the_notebook(executed):
    assert executed[0].cells[5].outputs == []


def test_page_fetches_nothing_and_holds_no_script(executed):
    _, text = executed
    assert not FETCHED.search(text)
    assert "<script" not in text
    assert len(text.encode()) < 500_000


def test_page_has_title_contents_figures_and_formulae(executed):
    _, text = executed
    assert "<title>A title with x2</title>" in text
    assert '<li class="level-2"><a href="#one">One</a></li>' in text
    assert text.count("<svg") == 2
    assert "equation-tag" in text
    assert 'alttext="L = 1.25"' in text
    assert "This run" in text


def test_figures_follow_the_pages_ink_and_do_not_share_ids(executed):
    _, text = executed
    assert "currentColor" in text
    assert "#787878" not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for used in re.findall(r'url\(#([^)]+)\)|href="#(f\d[^"]*)"', text):
        assert "".join(used) in ids


def test_dollars_in_code_are_not_formulae():
    text = page(
        new_markdown_cell("Use `$HOME and $x$` or `$$y$$`, costs \\$5.\n\n```\n$a$ $$b$$\n```\n"),
        code("'$x$'"),
    )
    assert "<math" not in text
    assert "<code>$HOME and $x$</code>" in text
    assert "$a$ $$b$$" in text


@pytest.mark.parametrize(
    "markdown",
    [
        "text $x$ text",
        "$$\nx\n$$",
        "before\n$$x$$\nafter",
        "before $$x$$ after",
        "\\begin{align}\nx &= 1\n\\end{align}",
        "\\begin{equation*} x \\end{equation*}",
        "- item $x$",
        "> quote $$x$$",
        "| $x$ | b |\n|---|---|\n| 1 | 2 |",
        "## heading $x$",
    ],
)
def test_formulae_are_found_wherever_markdown_allows_them(markdown):
    body = page(new_markdown_cell(markdown)).partition("<main>")[2]
    assert body.count("<math") == 1
    assert "$" not in body


def test_formulae_of_outputs_are_rendered_too():
    assert "<math" in page(code("x", shown(markdown="so $x$", plain="so")))
    assert "<math" in page(code("x", shown(latex="$\\displaystyle x$")))


def test_a_formula_that_cannot_be_shown_names_itself_and_its_cell(tmp_path):
    nbformat.write(new_notebook(cells=[new_markdown_cell("Momentum\n$\\wrong{x}$")]), tmp_path / "n.ipynb")
    with pytest.raises(ExportError, match=r"n\.ipynb: cell 'Momentum': .*\\wrong"):
        export_html(tmp_path / "n.ipynb", tmp_path / "n.html")
    assert [p.name for p in tmp_path.iterdir()] == ["n.ipynb"]  # no half page, no left-over


def test_scripts_and_remote_parts_of_outputs_are_dropped_and_links_stay():
    remote = (
        "<script src='https://cdn.example/x.js'></script><link rel=stylesheet href=https://e.example/a.css>"
        "<iframe src='https://e.example'></iframe><style>@import 'https://e.example';</style>"
        "<a href='https://arxiv.org/abs/2502.16982'>paper</a>"
    )
    text = page(code("x", shown(html=remote)))
    assert not FETCHED.search(text)
    assert 'href="https://arxiv.org/abs/2502.16982"' in text


def test_an_image_outside_the_notebook_is_an_error_not_a_hole():
    with pytest.raises(ExportError, match=r"figure\.png"):
        page(new_markdown_cell("![a figure](figure.png)"))


def test_the_last_value_of_a_cell_is_shown():
    result = new_output(
        "execute_result", {"text/html": "<b>frame</b>", "text/plain": "frame"}, execution_count=1
    )
    assert "<b>frame</b>" in page(code("x", result))


def test_widgets_become_what_they_showed_last():
    notebook = new_notebook(cells=[code("x", shown(view={"model_id": "box"}, plain="VBox(children=...)"))])
    held = {"outputs": [{"output_type": "stream", "name": "stdout", "text": "kept"}]}
    state = {"box": {"state": {"children": ["IPY_MODEL_out"]}}, "out": {"state": held}}
    notebook.metadata["widgets"] = {export.WIDGET_STATE: {"state": state}}
    text = render_page(notebook)
    assert "kept" in text
    assert "VBox" not in text


def test_a_rewritten_line_shows_its_last_state_and_streams_are_joined():
    parts = [new_output("stream", name="stdout", text=t) for t in ("1 %\r", "50 %\r", "100 %\nend")]
    text = page(code("x", *parts))
    assert "100 %\nend" in text
    assert "50 %" not in text


def test_input_is_folded_only_where_a_tag_says_so():
    assert "<details" not in page(code("visible")).partition("<main>")[2]
    assert "<details" in page(code("folded", tags=["hide-input"])).partition("<main>")[2]


def test_errors_are_shown_without_terminal_codes():
    error = new_output("error", ename="E", evalue="v", traceback=["\x1b[31mE\x1b[0m: <v>"])
    text = page(code("x", error))
    assert "\x1b" not in text
    assert "&lt;v&gt;" in text


def test_headings_of_one_name_get_different_ids_and_outputs_add_none():
    text = page(new_markdown_cell("## Claim\n\n## Claim"), code("x", shown(markdown="## Claim")))
    assert re.findall(r'<h2 id="([^"]+)"', text) == ["claim", "claim-2"]


def test_cell_text_that_looks_like_the_templates_marks_is_kept():
    text = page(new_markdown_cell("# T\n\n@LINKS@ @STYLE@ <!--figure 0-->"), following=("02", "02.html"))
    assert "@LINKS@ @STYLE@" in text
    assert '<a href="02.html">02 →</a>' in text


def test_the_same_notebook_gives_the_same_page(executed):
    notebook, text = executed
    assert render_page(notebook) == text


def test_what_is_no_notebook_is_named(tmp_path):
    (tmp_path / "n.ipynb").write_text("{")
    with pytest.raises(ExportError, match=r"n\.ipynb is not a notebook"):
        export_html(tmp_path / "n.ipynb", tmp_path / "n.html")
    with pytest.raises(FileNotFoundError, match="none"):
        export_html(tmp_path / "none.ipynb", tmp_path / "n.html")
