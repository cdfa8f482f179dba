"""Sentences whose numbers come from the run, never from the author's memory."""

from __future__ import annotations

import math
import string
from typing import Any

from dslib.notebook.environment import show


class _Values(string.Formatter):
    """Named fields only, each given, each a number or text that can be shown."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        if isinstance(key, int):
            raise ValueError("template has a field without a name; write {loss:.3f} and pass loss=...")
        if key not in kwargs:
            given = ", ".join(sorted(kwargs)) or "nothing"
            raise ValueError(f"template needs the value {key!r}, which is not given (given: {given})")
        self.used.add(key)
        return kwargs[key]

    def format_field(self, value: Any, format_spec: str) -> str:
        try:
            return super().format_field(value, format_spec)
        except (ValueError, TypeError) as error:
            raise ValueError(f"template cannot format {value!r} as {format_spec!r}: {error}") from error


def say(template: str, **values: Any) -> None:
    """Display ``template`` as Markdown with measured values in it.

    ``say("Muon ended at {loss:.3f} nats per byte.", loss=loss)``. The fields are those of
    ``str.format``, so a formula's braces are doubled. One-element tensors and arrays are numbers.

    Raises ValueError for a missing, unused, None or non-finite value, and for a format that does
    not fit the value, naming it.
    """
    plain = {name: _number_or_text(name, value) for name, value in values.items()}
    formatter = _Values()
    text = formatter.vformat(template, (), plain)
    unused = sorted(set(plain) - formatter.used)
    if unused:
        raise ValueError(f"the value {unused[0]!r} is given and template does not use it; use or drop it")
    show(text, markdown=text)


def _number_or_text(name: str, value: Any) -> Any:
    if value is None:
        raise ValueError(f"{name}=None was never measured; pass a number or text")
    if not isinstance(value, str) and callable(getattr(value, "item", None)):
        try:
            value = value.item()
        except (ValueError, RuntimeError, TypeError) as error:
            raise ValueError(f"{name} holds more than one number; pass its mean, or one element") from error
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}={value} is no measurement; find out why before writing a sentence about it")
    return value
