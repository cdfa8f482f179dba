import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslib.suite._nbformat import nbformat
from dslib.suite.parameters import ParameterError, fill, literal, read_parameters, split_assignment

DEFAULTS = """
# what a reader would vary
profile = "quick"
seed = 0
lr: float = 1
flag = False
code = "a"
sizes = (1, 2)
names = ["x"]
chosen = {1, 2}
table = {1: 0.5}
limit: int | None = None
anything = None
"""


def notebook(source, count=1):
    cells = [nbformat.v4.new_code_cell(source, metadata={"tags": ["parameters"]}) for _ in range(count)]
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1"), *cells])


@pytest.fixture(scope="module")
def known():
    return read_parameters(notebook(DEFAULTS))


def test_defaults_and_their_types_are_read(known):
    assert known["seed"].default == 0
    assert known["lr"].kind is float
    assert known["limit"].kind is int


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("seed", "3", 3),
        ("seed", np.int64(3), 3),
        ("seed", torch.tensor(3), 3),
        ("lr", "1e-3", 1e-3),
        ("lr", 2, 2.0),
        ("lr", np.float32(0.5), 0.5),
        ("flag", "false", False),
        ("flag", "True", True),
        ("flag", np.bool_(False), False),
        ("code", "007", "007"),
        ("code", "nan", "nan"),
        ("code", Path("a/b"), str(Path("a/b"))),
        ("sizes", "3,4", (3, 4)),
        ("sizes", [np.int64(3)], (3,)),
        ("sizes", np.array([3, 4]), (3, 4)),
        ("names", ("a", "b"), ["a", "b"]),
        ("chosen", {3}, {3}),
        ("chosen", "{3, 4}", {3, 4}),
        ("table", {2: 1}, {2: 1.0}),
        ("table", "{2: 0.25}", {2: 0.25}),
        ("limit", "7", 7),
        ("limit", "None", None),
        ("limit", None, None),
    ],
)
def test_a_value_arrives_as_the_type_of_its_default(known, name, value, expected):
    got = fill(known, {name: value})[name]
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", "1.5"),
        ("seed", 1.0),
        ("seed", True),
        ("seed", "three"),
        ("seed", None),
        ("lr", "nan"),
        ("lr", float("inf")),
        ("lr", False),
        ("flag", "maybe"),
        ("flag", 1),
        ("code", 7),
        ("sizes", "3"),
        ("sizes", "(1, 'a')"),
        ("sizes", {1, 2}),
        ("names", "[1]"),
        ("chosen", [1]),
        ("table", {"2": 1.0}),
        ("table", "{2: 'a'}"),
        ("anything", "x"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(known, name, value):
    with pytest.raises(ParameterError, match=f"parameter '{name}'"):
        fill(known, {name: value})


def test_an_unknown_parameter_is_named_with_the_nearest(known):
    with pytest.raises(ParameterError, match="no parameter 'sed'; did you mean 'seed'"):
        fill(known, {"sed": 1})


def test_without_a_parameters_cell_nothing_can_be_set():
    assert read_parameters(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1")])) is None
    assert fill(None, {}) == {}
    with pytest.raises(ParameterError, match="no cell is tagged 'parameters'"):
        fill(None, {"seed": 1})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os", "only name = literal lines, not 'import os'"),
        ("a = b = 1", "only name = literal"),
        ("a, b = 1, 2", "only name = literal"),
        ("a = max(1, 2)", "default of parameter 'a' is no literal"),
        ("a = ", "line 1"),
        ("%matplotlib inline", "line 1"),
    ],
)
def test_the_parameters_cell_holds_literals_only(source, message):
    with pytest.raises(ParameterError, match=message):
        read_parameters(notebook(source))


def test_two_parameters_cells_are_refused_because_papermill_fills_one():
    with pytest.raises(ParameterError, match="2 cells are tagged"):
        read_parameters(notebook("a = 1", count=2))


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
keys = st.integers() | st.text()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.sets(st.integers() | st.text(), min_size=1)
    ),
    max_leaves=12,
)


@given(values)
def test_a_literal_evaluates_to_exactly_the_value(value):
    got = ast.literal_eval(literal(value))
    assert got == value
    assert type(got) is type(value)


def test_the_literal_of_a_set_does_not_depend_on_hashing():
    assert literal({"b", "a", "c"}) == "{'a', 'b', 'c'}"
    assert literal(set()) == "set()"


@pytest.mark.parametrize("text", ["seed", "=3", "a b=3", "1a=3"])
def test_an_assignment_needs_a_name_and_an_equals_sign(text):
    with pytest.raises(ParameterError, match="must read name=value"):
        split_assignment(text)


def test_a_value_may_hold_equals_signs():
    assert split_assignment("a=b=c") == ("a", "b=c")
