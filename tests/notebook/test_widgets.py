"""Panels: right without a reader, and honest with one."""

import pytest

from dslib.notebook import initial_values, interact


def test_initial_values_of_every_kind_of_control():
    controls = {
        "a": (1, 9), "b": (0, 1, 0.1, 0.5), "c": ["x", "y"], "d": {"eins": 1}, "e": True, "f": "text",
    }  # fmt: skip
    assert initial_values(controls) == {"a": 1, "b": 0.5, "c": "x", "d": 1, "e": True, "f": "text"}


def test_a_widget_object_is_a_control():
    import ipywidgets

    assert initial_values({"a": ipywidgets.IntSlider(value=3)}) == {"a": 3}


@pytest.mark.parametrize(
    ("control", "match"),
    [
        ((1,), "has 1 numbers"),
        ((1, 2, 3, 4, 5), "has 5 numbers"),
        ((3, 1), "min 3 not below"),
        ((0, 1, 0, 0), "step 0"),
        ((0, 1, 0.1, 7), "starts at 7"),
        ((0, float("nan")), "finite"),
        (("a", "b"), "choices go in a list"),
        ([], "no choices"),
        (None, "NoneType"),
        (3, "int"),
    ],
)
def test_bad_control_is_named(control, match):
    with pytest.raises(ValueError, match=match) as caught:
        initial_values({"momentum": control})
    assert "momentum" in str(caught.value)


def test_headless_call_happens_once_with_the_initial_values():
    calls = []
    panel = interact(lambda k, s=2: calls.append((k, s)), k=(1, 9, 1, 4))
    assert calls == [(4, 2)]
    assert panel.values == {"k": 4}


def test_exception_of_the_first_call_is_raised():
    with pytest.raises(ZeroDivisionError):
        interact(lambda k: 1 / k, k=(0, 9))


def test_control_and_argument_that_do_not_meet_are_named():
    with pytest.raises(ValueError, match="'j' is no argument"):
        interact(lambda k: k, j=(0, 1))
    with pytest.raises(ValueError, match=r"'k'.*no control and no default"):
        interact(lambda k: k)


def test_figures_are_closed_or_memory_would_grow_with_every_turn():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kept = plt.figure()
    interact(lambda k: plt.subplots()[0], k=(0, 9))
    assert plt.get_fignums() == [kept.number]
    plt.close(kept)
