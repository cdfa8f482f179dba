"""Answers: words, text, and numbers that are equal exactly, whatever an expression tries to cost."""

import threading
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dslib.evaluation import (
    answer_f1,
    boxed_answer,
    exact_match,
    normalize_answer,
    parse_number,
    same_answer,
    tagged_answer,
    verify,
    word_set_f1,
)
from dslib.evaluation.expressions import MAX_CHARACTERS


@pytest.mark.parametrize(
    ("prediction", "reference", "f1", "em"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0, 1.0),
        ("the tower in Paris", "Eiffel Tower", 0.4, 0.0),  # P = 1/3, R = 1/2
        ("cat cat cat", "cat dog", 0.4, 0.0),  # repetition counts: P = 1/3, R = 1/2
        ("yes it is", "yes", 0.0, 0.0),
        ("no", "yes", 0.0, 0.0),
        ("Yes.", "yes", 1.0, 1.0),
        ("", "Paris", 0.0, 0.0),
        ("the", "a", 0.0, 1.0),  # nothing is left of either: F1 as in SQuAD 1.1
        ("London", "Paris", 0.0, 0.0),
    ],
)
def test_words_in_common(prediction, reference, f1, em):
    assert answer_f1(prediction, reference) == pytest.approx(f1)
    assert exact_match(prediction, reference) == em


def test_the_best_of_several_references_counts():
    assert answer_f1("New York City", ["Boston", "New York", "NYC"]) == pytest.approx(0.8)
    assert exact_match("NYC", ["New York", "nyc"]) == 1.0
    for function in (answer_f1, exact_match):
        with pytest.raises(ValueError, match="references are empty"):
            function("x", [])


@given(st.text(alphabet="ab c", max_size=12), st.text(alphabet="ab c", max_size=12))
def test_f1_is_symmetric_and_exact_matches_are_its_ones_up_to_order(a, b):
    assert answer_f1(a, b) == answer_f1(b, a)
    assert 0 <= answer_f1(a, b) <= 1
    assert answer_f1(a, b) == 1 or exact_match(a, b) == 0 or not normalize_answer(a)


def test_normalisation_of_words_drops_signs_so_numbers_have_a_rule_of_their_own():
    assert normalize_answer("  A man, the\tplan ") == "man plan"
    assert exact_match("-5", "5") == 1.0
    assert not same_answer("-5", "5")
    assert not same_answer("3.5", "35")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", Fraction(42)),
        (" -1,234.50. ", Fraction(-2469, 2)),
        ("1{,}000", Fraction(1000)),
        ("2e-3", Fraction(1, 500)),
        (".5", Fraction(1, 2)),
        ("50%", Fraction(1, 2)),
        (r"50\%", Fraction(1, 2)),
        (r"$\frac{1}{3}$", Fraction(1, 3)),
        (r"-\dfrac{2}{4}", Fraction(-1, 2)),
        (r"\frac12", Fraction(1, 2)),
        (r"\frac{3}4", Fraction(3, 4)),
        (r"\frac{1}{2}^2", Fraction(1, 4)),
        (r"\left(1+2\right)\times 3", Fraction(9)),
        ("2 + 3 × 4", Fraction(14)),
        ("1/3 + 1/6", Fraction(1, 2)),
        ("-2^2", Fraction(-4)),
        ("2^3^2", Fraction(512)),
        ("2^{-1}", Fraction(1, 2)),
        ("2**3", Fraction(8)),
        ("5!/3!", Fraction(20)),
        ("−7", Fraction(-7)),
        ("--7", Fraction(7)),
        ("0!", Fraction(1)),
        ("0^0", Fraction(1)),
        ("1^99999999999999999999", Fraction(1)),
        ("(-1)^99999999999999999999", Fraction(-1)),
        ("0^99999999999999999999", Fraction(0)),
    ],
)
def test_numbers_are_read_exactly(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1 2",
        "1,23",
        "1,2345",
        "2(3)",
        "(1",
        "1)",
        "(1}",
        "1/0",
        "0^-3",
        "2^0.5",
        "(-3)!",
        "0.5!",
        "+",
        "()",
        r"\frac{1}",
    ],
)
def test_what_is_no_number_is_none(text):
    assert parse_number(text) is None


@given(st.fractions(max_denominator=50), st.fractions(max_denominator=50), st.sampled_from("+-*/"))
def test_arithmetic_agrees_with_fractions(a, b, operator):
    if operator == "/" and b == 0:
        return
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[operator]
    assert parse_number(f"({a}) {operator} ({b})") == value


@given(st.text(alphabet="0123456789+-*/^!%(){}. \\frac,e", max_size=30))
def test_any_text_is_a_fraction_or_none(text):
    assert isinstance(parse_number(text), (Fraction, type(None)))


def test_tiny_numbers_that_a_float_takes_for_zero_stay_apart():
    assert not same_answer("1/2004!", "1/2006!")
    assert same_answer("1/2006!", "1/(2006*2005*2004!)")
    assert not same_answer("1/10^400", "0")


HOSTILE = [
    "9^9^9^9",
    "9" * 150 + "!",
    "99999!",
    "(9!)!",
    "2^99999",
    "(" * 199,
    "1e9999*1e9999*1e9999",
    "9!!!!!!!!!!",
    "1" * 10**6,
    "2^" * 90 + "2",
    "-" * 150,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12])
def test_work_is_refused_before_it_is_done_in_any_thread(text):
    found = []
    thread = threading.Thread(target=lambda: found.append(verify(text, "1", extract="all")), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert found == [False]


def test_longest_expression_still_ends():
    text = "+".join(["1/999!"] * (MAX_CHARACTERS // 7))
    assert parse_number(text) == parse_number(f"{MAX_CHARACTERS // 7}/999!")


def test_texts_that_are_no_numbers_are_compared_as_text():
    assert same_answer("$ (1, 2) $", "(1,2)")
    assert same_answer("Blue.", "blue")
    assert not same_answer("(1,2)", "(12)")
    assert not same_answer("five", "5")
    assert not same_answer("", "0")


def test_answers_are_found_where_they_stand():
    assert boxed_answer(r"first \boxed{1}, then \boxed{\frac{1}{2}} end") == r"\frac{1}{2}"
    assert boxed_answer(r"\boxed{1} and \boxed{2") is None
    assert boxed_answer("nothing") is None
    assert tagged_answer("<answer>1</answer> no: <answer> 2\n</answer>") == "2"
    assert tagged_answer("<answer>1") is None
    assert tagged_answer("<think>4</think>", tag="think") == "4"


@pytest.mark.parametrize(
    ("completion", "extract", "right"),
    [
        (r"so it is \boxed{0.5}", "boxed", True),
        (r"0.5", "boxed", False),
        ("<answer>1/2</answer>", "answer", True),
        ("2/4", "all", True),
        (r"\boxed{}", "boxed", False),
    ],
)
def test_verifier_looks_at_the_final_answer_alone(completion, extract, right):
    assert verify(completion, "1/2", extract) is right


def test_unknown_place_is_named():
    with pytest.raises(ValueError, match="extract='bxed' is unknown"):
        verify("1", "1", "bxed")


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("(0,100)", "100", False),  # a pair is no thousand
        ("0,100", "100", False),
        ("(0,100)", "(0, 100)", True),
        (r"\left(0,1\right)", "(0,1)", True),
        ("(1,2)", "(2,1)", False),
        ("[0,1)", "(0,1)", False),
        (r"$\left(\frac12, 3\right]$", "(0.5, 3]", True),
        ("(1,234)", "1234", False),
        ("(1,234)", "(1, 234)", True),
        (r"\{1,2\}", "{2, 1}", True),
        ("{1,1,2}", "{1,2}", True),
        ("1, 2", "2,1", True),  # solutions come in any order
        ("1,1,2", "1,2", True),  # nor does it matter how often one is named
        ("((1,2),3)", "((1, 2), 3)", True),
        ("(1,2", "1,2", False),
        ("Paris, France", "France, Paris", False),
        ("(a, b)", "(A,b)", True),
        (r"\$32,348", "32348", True),
        (r"1\frac79", r"\frac{16}{9}", True),
        ("10 1/2", "10.5", True),
        ("-10 1/2", "-10.5", True),
        (r"\dfrac{x}{2}", r"\frac{x}{2}", True),
        ("“café’s”", '"cafe\u0301\'s"', True),
    ],
)
def test_tuples_sets_intervals_and_spellings_have_one_grammar(answer, reference, same):
    assert same_answer(answer, reference) is same
    assert same_answer(reference, answer) is same


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed 2", "2"),
        (r"\boxed {2}", "2"),
        (r"\fbox{2}", "2"),
        (r"$\boxed 2$ ends it", "2"),
        (r"\boxed{1} and \fbox{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed", None),
        (r"\boxedx", None),
        (r"\boxed{2", None),
    ],
)
def test_boxes_are_found_as_people_write_them(text, answer):
    assert boxed_answer(text) == answer


def test_words_are_the_same_with_typographic_quotes_and_decomposed_accents():
    assert exact_match("O’Brien’s cafe\u0301", "O'Brien's café") == 1.0
    assert answer_f1("“naïve”", "nai\u0308ve") == 1.0


_NUMBERS = st.sampled_from(["1", "-2", "0.5", r"\frac{1}{3}", "1,234", r"\frac12", "50", "7/9"])
_ANSWERS = st.one_of(
    _NUMBERS,
    st.builds(
        lambda numbers, brackets: brackets[0] + ", ".join(numbers) + brackets[1],
        # Of two it is an interval to math-verify, empty if it falls; of three it is a tuple.
        st.lists(_NUMBERS.filter(lambda text: "," not in text), min_size=3, max_size=3),
        st.sampled_from([("(", ")"), ("\\{", "\\}"), ("", "")]),
    ),
)


def _form(text):
    """Its bracket and how many commas it has."""
    plain = text.replace("\\{", "{").replace("\\}", "}")
    return plain[0] if plain[0] in "({" else "", plain.count(", ")


@given(_ANSWERS, _ANSWERS)
def test_answers_of_one_form_are_the_same_where_math_verify_says_so(one, other):
    math_verify = pytest.importorskip("math_verify")
    assume(_form(one) == _form(other))
    found = [math_verify.parse(f"${text}$", parsing_timeout=None) for text in (one, other)]
    assert same_answer(one, other) == math_verify.verify(*found, timeout_seconds=None)


@pytest.mark.parametrize(
    ("prediction", "reference", "em", "sets", "words"),
    [
        ("The Beatles", "Beatles", 1, 2 / 3, 1),
        ("New York, New York", "New York", 0, 1, 2 / 3),
        ("Jean-Luc", "Jean Luc", 0, 1, 0),
        ("yes, it is", "yes", 0, 1 / 2, 0),
        ("1,000", "1000", 1, 0, 1),
        ("a cat cat dog", "cat dog dog", 0, 0.8, 2 / 3),
        ("", "", 1, 0, 0),
        ("?!", "x", 0, 0, 0),
    ],
)
def test_the_three_measures_of_equal_words_differ_where_their_sources_do(
    prediction, reference, em, sets, words
):
    assert exact_match(prediction, reference) == em
    assert word_set_f1(prediction, reference) == pytest.approx(sets)
    assert answer_f1(prediction, reference) == pytest.approx(words)
