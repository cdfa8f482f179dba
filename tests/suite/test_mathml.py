"""Formulae must be shown right or refused: a page with a wrong formula teaches the wrong thing."""

import re
from xml.etree import ElementTree

import pytest

from dslib.suite.mathml import FormulaError, to_mathml


def text_of(markup: str) -> str:
    return "".join(ElementTree.fromstring(markup).itertext())


@pytest.mark.parametrize(
    ("latex", "shown"),
    [
        (r"\lVert W\rVert_F", "‖W‖F"),
        (r"q\sim\mathcal{D}", "q∼𝒟"),  # latex2mathml alone gives an ASCII tilde
        (r"\mathbb{1}[x]", "𝟙[x]"),  # browsers ignore mathvariant: the letter itself is needed
        (r"\mathds{1}[x]", "𝟙[x]"),  # latex2mathml alone drops the command
        (r"\operatorname{rank}(W)", "rank(W)"),
        (r"\operatorname*{arg\,max}_x f", "arg\u2009maxxf"),  # latex2mathml alone prints the star
        (r"\text{if $x>0$}", "if\u00a0x>0"),  # latex2mathml alone prints the dollar signs
        (r"\big\| x \big\|", "‖x‖"),  # latex2mathml alone prints the backslash
        (r"a<b", "a<b"),  # latex2mathml's own serialisation breaks the markup here
        (r"\arg\min", "argmin"),
        (r"a \not= b", "a≠b"),
        (r"50\% \$", "50%$"),
        (r"\operatorname{\mathrm{KL}}(p)", "KL(p)"),  # latex2mathml alone leaves the operator empty
        (r"\text{a {b} top\_k}", "a\u00a0b\u00a0top_k"),
        (r"p\mathbin{\|}q", "p‖q"),
        ("a % a comment\n+ b", "a+b"),
    ],
)
def test_what_is_shown_is_what_was_written(latex, shown):
    assert text_of(to_mathml(latex)) == shown


@pytest.mark.parametrize("environment", ["aligned", "align", "align*", "split"])
def test_aligned_rows_become_a_table_because_latex2mathml_alone_prints_the_ampersands(environment):
    markup = to_mathml(rf"\begin{{{environment}}} a &= b \\ c &= d \end{{{environment}}}", display=True)
    assert markup.count("<mtr>") == 2
    assert "&" not in text_of(markup)


@pytest.mark.parametrize("name", ["matrix", "pmatrix", "bmatrix", "vmatrix", "cases", "gathered"])
def test_grids_keep_their_rows(name):
    assert to_mathml(rf"\begin{{{name}}} a \\ b \end{{{name}}}", display=True).count("<mtr>") == 2


def test_number_of_an_equation_is_kept_at_its_edge():
    assert '<span class="equation-tag">(3)</span>' in to_mathml(r"x = y \tag{3}", display=True)
    assert '<span class="equation-tag">A</span>' in to_mathml(r"x = y \tag*{A}", display=True)


def test_rows_of_align_keep_their_own_numbers_and_get_no_others():
    markup = to_mathml(r"\begin{align} a &= b \tag{1} \\ c &= d \\ e &= f \tag{7} \end{align}", display=True)
    assert re.findall(r"\((\d)\)", markup.split("alttext")[-1].split(">", 1)[1]) == ["1", "7"]


def test_display_sums_carry_limits_below_and_inline_ones_beside():
    assert "<munderover>" in to_mathml(r"\sum_{i=1}^n i", display=True)
    assert "<munder>" in to_mathml(r"\operatorname*{arg\,max}_x", display=True)
    assert "<munder" not in to_mathml(r"\max_x f")


def test_underbrace_and_text_have_their_label():
    assert text_of(to_mathml(r"\underbrace{a+b}_{\text{sum}}")) == "a+b⏟sum"


@pytest.mark.parametrize(
    ("latex", "reason"),
    [
        (r"\foo{x}", r"\foo"),
        (r"\mathfoo{x}", r"\mathfoo"),  # latex2mathml alone drops unknown commands that begin so
        (r"\begin{foo}x\end{foo}", "foo"),
        (r"\begin{cases} x", "not closed"),
        (r"\frac{a}", "argument is missing"),
        ("{x", "not closed"),
        ("x}", "closing brace"),
        (r"\left( x", "left"),
        ("a & b", "&"),
        (r"a \\ b", "line break"),
        (r"\not\leq", r"\neq"),
        (r"\newcommand{\x}{y}", "newcommand"),
        ("  ", "empty"),
        (r"\text{a $x}", "dollar"),
        (r"\cancel{x}", "boxed"),
        ("\\begin{cases} a & b \\\nc & d \\end{cases}", "single backslash"),  # Markdown tools eat one
        (r"\sum\nolimits_i", r"\nolimits"),
    ],
)
def test_what_cannot_be_shown_right_is_refused_with_the_formula(latex, reason):
    with pytest.raises(FormulaError, match=re.escape(reason)) as caught:
        to_mathml(latex, display=True)
    assert latex.strip() in str(caught.value)


def test_a_number_for_an_inline_formula_is_refused():
    with pytest.raises(FormulaError, match="display"):
        to_mathml(r"x \tag{1}")


@pytest.mark.parametrize("environment", ["align", "aligned", "cases", "pmatrix", "gathered"])
def test_a_bracket_that_begins_an_environment_is_part_of_the_formula(environment):
    body = "[a] & b" if environment != "gathered" else "[a] = b"
    markup = to_mathml(f"\\begin{{{environment}}} {body}\\end{{{environment}}}", display=True)
    assert markup.count(">[</mo>") == 1
    assert markup.count(">]</mo>") == 1


def test_the_position_of_a_block_on_its_line_is_no_part_of_it():
    assert "[" not in re.sub(
        "alttext=.*?>", "", to_mathml(r"\begin{aligned}[t] a &= b\end{aligned}", display=True)
    )
