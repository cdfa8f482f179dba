"""Interactive panels that are a plain call when nobody is there to turn a knob.

ipywidgets' own ``interact`` can stall a headless run, swallows the exceptions of its callback
and flickers. Here the output of each call is collected first and handed to the page in one piece.
"""

from __future__ import annotations

import base64
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from dslib.notebook.environment import live


def interact(function: Callable[..., Any], **controls: Any) -> Panel:
    """Call ``function`` with the values of ``controls``, again whenever a reader changes one.

    A control is one of: ``(min, max)``, ``(min, max, step)`` or ``(min, max, step, initial)`` of
    numbers, a slider (of whole numbers when all are whole); a list of choices or a mapping of
    labels to values, the first one chosen; True or False; text; or an ipywidgets object.

    Headless, and outside a notebook, ``function`` is called once with the initial values, so the
    exported page holds that figure. Figures that the call opens are shown and closed. An exception
    of the first call is raised; later ones are shown in place and kept in ``Panel.errors``.

    Raises ValueError, naming the control, for one that cannot be understood or that ``function``
    does not take, and for an argument of ``function`` that has no control and no default.
    """
    values = initial_values(controls)
    _check_signature(function, values)
    panel = Panel(function, values)
    if live():
        panel.open(controls)
    else:
        panel.call()
    return panel


def initial_values(controls: Mapping[str, Any]) -> dict[str, Any]:
    """The value each control starts with; raises ValueError for a control that is none."""
    return {name: _parse(name, control)[1] for name, control in controls.items()}


def _parse(name: str, control: Any) -> tuple[str, Any, tuple[Any, ...]]:
    """(kind, initial value, what the widget needs) of a control."""
    if hasattr(control, "comm") and hasattr(control, "value"):
        return "widget", control.value, (control,)
    if isinstance(control, bool):
        return "check", control, ()
    if isinstance(control, str):
        return "text", control, ()
    if isinstance(control, Mapping) or isinstance(control, list):
        options = list(control.items()) if isinstance(control, Mapping) else [(str(c), c) for c in control]
        if not options:
            raise ValueError(f"control {name}={control!r} has no choices; give at least one")
        return "choice", options[0][1], (options,)
    if isinstance(control, tuple):
        return _parse_slider(name, control)
    raise ValueError(
        f"control {name}={control!r} is a {type(control).__name__}; give (min, max, step, initial), "
        "a list of choices, True or False, text, or a widget"
    )


def _parse_slider(name: str, control: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    shown = f"control {name}={control!r}"
    if not 2 <= len(control) <= 4:
        raise ValueError(f"{shown} has {len(control)} numbers; give (min, max, step, initial)")
    for number in control:
        if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
            raise ValueError(
                f"{shown} holds {number!r}; all its entries are finite numbers (choices go in a list)"
            )
    whole = all(isinstance(n, Integral) for n in control)
    low, high = control[0], control[1]
    step = control[2] if len(control) > 2 else (1 if whole else (high - low) / 20)
    initial = control[3] if len(control) > 3 else low
    if low >= high:
        raise ValueError(f"{shown} has min {low} not below max {high}; swap or widen them")
    if step <= 0:
        raise ValueError(f"{shown} has the step {step}; give a positive one")
    if not low <= initial <= high:
        raise ValueError(f"{shown} starts at {initial}, outside {low} to {high}")
    number = int if whole else float
    return "slider", number(initial), (number(low), number(high), number(step), whole)


def _check_signature(function: Callable[..., Any], values: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    name = getattr(function, "__name__", repr(function))
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [n for n, p in parameters.items() if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
    for control in values:
        if control not in named and not anything:
            raise ValueError(
                f"control {control!r} is no argument of {name}; it takes {', '.join(named) or 'none'}"
            )
    for argument in named:
        if argument not in values and parameters[argument].default is inspect.Parameter.empty:
            raise ValueError(
                f"argument {argument!r} of {name} has no control and no default; give {argument}=..."
            )


class Panel:
    """What ``interact`` returns: ``values`` in use, ``errors`` of its callbacks, ``controls``."""

    def __init__(self, function: Callable[..., Any], values: dict[str, Any]) -> None:
        self.function = function
        self.values = values
        self.errors: list[Exception] = []
        self.controls: dict[str, Any] = {}
        self._output: Any = None

    def _ipython_display_(self) -> None:
        """Nothing: the panel is on the page already when its cell ends with it."""

    def call(self) -> None:
        """Call the function once with the present values and show what it draws and returns."""
        before = _open_figures()
        try:
            result = self.function(**self.values)
            _show_new_figures(before)
            _show_result(result)
        finally:
            _close_new_figures(before)

    def open(self, controls: Mapping[str, Any]) -> None:
        """Build the widgets, draw once, and redraw whenever one changes."""
        import ipywidgets
        from IPython.display import display

        self._output = ipywidgets.Output()
        for name, control in controls.items():
            self.controls[name] = _widget(name, control)
        outputs, error = self._collect()
        if error is not None:
            raise error  # a broken function fails its cell, as a plain call would
        self._output.outputs = outputs
        for widget in self.controls.values():
            widget.observe(self._changed, names="value")
        display(ipywidgets.VBox([*self.controls.values(), self._output]))

    def _changed(self, _change: Any) -> None:
        values = {name: widget.value for name, widget in self.controls.items()}
        if values == self.values:
            return
        self.values = values
        outputs, error = self._collect()
        if error is not None:
            self.errors.append(error)
        self._output.outputs = outputs  # one message replaces the picture: nothing flickers

    def _collect(self) -> tuple[tuple[dict[str, Any], ...], Exception | None]:
        from IPython.utils.capture import capture_output

        error: Exception | None = None
        with capture_output() as captured:
            try:
                self.call()
            except Exception as raised:
                error = raised
        outputs: list[dict[str, Any]] = [
            {"output_type": "stream", "name": name, "text": text}
            for name, text in (("stdout", captured.stdout), ("stderr", captured.stderr))
            if text
        ]
        for shown in captured.outputs:
            data = {
                kind: base64.b64encode(value).decode() if isinstance(value, bytes) else value
                for kind, value in shown.data.items()
            }
            outputs.append(
                {"output_type": "display_data", "data": data, "metadata": dict(shown.metadata or {})}
            )
        if error is not None:
            frames = traceback.format_exception(error)
            outputs.append(
                {
                    "output_type": "error",
                    "ename": type(error).__name__,
                    "evalue": str(error),
                    "traceback": "".join(frames).splitlines(),
                }
            )
        return tuple(outputs), error


def _widget(name: str, control: Any) -> Any:
    import ipywidgets

    kind, initial, needs = _parse(name, control)
    style = {"description_width": "initial"}
    if kind == "widget":
        return needs[0]
    if kind == "check":
        return ipywidgets.Checkbox(value=initial, description=name, style=style)
    if kind == "text":
        return ipywidgets.Text(value=initial, description=name, continuous_update=False, style=style)
    if kind == "choice":
        return ipywidgets.Dropdown(options=needs[0], value=initial, description=name, style=style)
    low, high, step, whole = needs
    slider = ipywidgets.IntSlider if whole else ipywidgets.FloatSlider
    places = {} if whole else {"readout_format": f".{max(0, min(6, 1 - math.floor(math.log10(step))))}f"}
    # The function runs when the knob is let go: a slow one would queue up dozens of calls.
    return slider(
        value=initial,
        min=low,
        max=high,
        step=step,
        description=name,
        continuous_update=False,
        style=style,
        **places,
    )


def _pyplot() -> Any | None:
    """pyplot, if the function has used it: without it there is no figure to look after."""
    return sys.modules.get("matplotlib.pyplot")


def _open_figures() -> set[int]:
    return set(plt.get_fignums()) if (plt := _pyplot()) else set()


def _new_figures(before: set[int]) -> list[Any]:
    plt = _pyplot()
    return [plt.figure(number) for number in plt.get_fignums() if number not in before] if plt else []


def _show_new_figures(before: set[int]) -> None:
    if "IPython" not in sys.modules:
        return
    from IPython import get_ipython
    from IPython.display import display

    if get_ipython() is not None:
        for figure in _new_figures(before):
            display(figure)


def _close_new_figures(before: set[int]) -> None:
    for figure in _new_figures(before):
        _pyplot().close(figure)


def _show_result(result: Any) -> None:
    # The figure or axes that a plotting function returns are on the page already.
    if result is None or type(result).__module__.startswith("matplotlib"):
        return
    if "IPython" in sys.modules:
        from IPython.display import display

        display(result)
    else:
        print(result)
