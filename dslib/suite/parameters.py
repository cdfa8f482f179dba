"""The parameters cell: what a notebook can be told, and how a value reaches it unchanged.

Papermill writes some values differently from what was meant (a numpy integer arrives as
text, ``False`` as a non-empty string, dictionary keys as strings). So every value is first
brought to the type of the default that stands in the cell, or refused.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from dslib.suite.claims import nearest

TAG = "parameters"


class ParameterError(ValueError):
    """A parameter that the notebook does not have, or a value that does not fit it."""


@dataclass(frozen=True)
class Parameter:
    """One line of the parameters cell: its name, its default, the type a value must have."""

    name: str
    default: Any
    kind: type
    optional: bool = False  # None is allowed too


def tagged_cells(notebook: Mapping[str, Any], tag: str = TAG) -> list[int]:
    """Positions of the code cells that carry ``tag``."""
    return [
        index
        for index, cell in enumerate(notebook["cells"])
        if cell["cell_type"] == "code" and tag in (cell.get("metadata", {}).get("tags") or [])
    ]


def read_parameters(notebook: Mapping[str, Any]) -> dict[str, Parameter] | None:
    """The parameters of a notebook by name, or None when it has no parameters cell.

    Raises ParameterError when the cell holds anything but ``name = literal`` lines, and when
    several cells are tagged.
    """
    cells = tagged_cells(notebook)
    if not cells:
        return None
    if len(cells) > 1:
        raise ParameterError(f"{len(cells)} cells are tagged 'parameters'; papermill fills only one")
    source = "".join(notebook["cells"][cells[0]]["source"])
    try:
        lines = ast.parse(source).body
    except SyntaxError as error:
        raise ParameterError(f"the parameters cell is not Python: line {error.lineno}: {error.msg}") from None
    found = [_parameter(line, source) for line in lines if not _is_comment(line)]
    return {parameter.name: parameter for parameter in found}


def fill(parameters: Mapping[str, Parameter] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values to inject for ``given``, each of the type of its default.

    Text, as it comes from ``--param name=value``, is read as that type. Raises ParameterError
    for an unknown name, a missing parameters cell, and a value that does not fit.
    """
    if given and parameters is None:
        names = ", ".join(given)
        raise ParameterError(
            f"no cell is tagged 'parameters', so {names} cannot be set; tag the cell with defaults"
        )
    values = {}
    for name, value in given.items():
        if name not in parameters:
            raise ParameterError(f"there is no parameter {name!r}{nearest(name, parameters)}")
        values[name] = coerce(parameters[name], value)
    return values


def coerce(parameter: Parameter, value: Any) -> Any:
    """``value`` as the type of the parameter's default; raises ParameterError if it is not one."""
    return _coerce(value, parameter.default, parameter.kind, parameter.optional, parameter.name)


def literal(value: Any) -> str:
    """Python source that evaluates to exactly ``value``, the same text every time."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, (set, frozenset)):
        inside = ", ".join(sorted(literal(item) for item in value))
        return f"{{{inside}}}" if inside else "set()"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(literal, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value)


def split_assignment(text: str) -> tuple[str, str]:
    """``"lr=0.1"`` → ``("lr", "0.1")``; raises ParameterError without an equals sign or a name."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise ParameterError(f"--param {text!r} must read name=value")
    return name.strip(), value


def _is_comment(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def _parameter(line: ast.stmt, source: str) -> Parameter:
    annotation = None
    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is not None:
        name, value, annotation = line.target.id, line.value, ast.unparse(line.annotation)
    elif isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name):
        name, value = line.targets[0].id, line.value
    else:
        text = ast.get_source_segment(source, line) or ast.unparse(line)
        raise ParameterError(f"the parameters cell may hold only name = literal lines, not {text!r:.80}")
    try:
        default = ast.literal_eval(value)
    except ValueError:
        text = ast.get_source_segment(source, line)
        raise ParameterError(f"the default of parameter {name!r} is no literal: {text!r:.80}") from None
    kind, optional = type(default), default is None
    if annotation is not None:
        named = {"str": str, "int": int, "float": float, "bool": bool}
        words = annotation.replace("Optional[", "None | ").rstrip("]").split("|")
        words = [word.strip().strip("'\"") for word in words]
        optional = optional or "None" in words
        kinds = [named[word] for word in words if word in named]
        if len(kinds) == 1 and (default is None or kinds == [float]):
            kind = kinds[0]
    return Parameter(name, default, kind, optional)


def _coerce(value: Any, default: Any, kind: type, optional: bool, where: str) -> Any:
    value = _unwrap(value)
    if optional and (value is None or value == "None"):
        return None
    if kind is type(None):
        raise ParameterError(
            f"parameter {where!r} is None by default, so its type is unknown; "
            f"annotate it in the parameters cell, such as {where}: int | None = None"
        )
    refuse = ParameterError(
        f"parameter {where!r} takes {kind.__name__} (its default is {default!r:.60}), not {value!r:.60}"
    )
    if kind is str:
        if isinstance(value, PurePath):
            return str(value)
        if isinstance(value, str):
            return value
        raise refuse
    if isinstance(value, str):
        value = _read(value, kind, refuse)
    if kind is bool:
        if isinstance(value, bool):
            return value
        raise refuse
    if kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise refuse
    if kind is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        raise refuse
    if kind in (list, tuple, set):
        return _coerce_items(value, default, kind, where, refuse)
    if kind is dict:
        if not isinstance(value, dict):
            raise refuse
        keys = {type(key) for key in default or {}}
        if keys and {type(key) for key in value} - keys:
            raise refuse
        return {key: _coerce_like(item, list((default or {}).values()), where) for key, item in value.items()}
    raise refuse


def _coerce_items(value: Any, default: Any, kind: type, where: str, refuse: ParameterError) -> Any:
    # A list where a tuple stands, or the other way round, is what a person types; a set is not.
    if not isinstance(value, (list, tuple) if kind is not set else (set, frozenset)):
        raise refuse
    return kind(_coerce_like(item, list(default or ()), where) for item in value)


def _coerce_like(item: Any, examples: list[Any], where: str) -> Any:
    """An element, of the type that all elements of the default have, where they have one."""
    item = _unwrap(item)
    kinds = {type(example) for example in examples}
    if len(kinds) == 1 and not isinstance(examples[0], type(None)):
        return _coerce(item, examples[0], kinds.pop(), False, where)
    return _plain(item, where)


def _plain(item: Any, where: str) -> Any:
    """``item`` if it is made of plain literals only."""
    item = _unwrap(item)
    if isinstance(item, float) and not math.isfinite(item):
        raise ParameterError(f"parameter {where!r} holds {item!r}, which is not finite")
    if item is None or type(item) in (bool, int, float, str):
        return item
    if type(item) in (list, tuple, set, frozenset):
        return type(item)(_plain(part, where) for part in item)
    if type(item) is dict:
        return {_plain(key, where): _plain(part, where) for key, part in item.items()}
    raise ParameterError(f"parameter {where!r} holds {type(item).__name__} {item!r:.60}; use plain literals")


def _unwrap(value: Any) -> Any:
    """Numpy scalars and arrays, torch tensors, as the Python values they hold."""
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and hasattr(value, "tolist"):
        return value.tolist()
    return value


def _read(text: str, kind: type, refuse: ParameterError) -> Any:
    text = text.strip()
    if kind is bool:
        words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
        words |= {"1": True, "0": False}
        if text.lower() not in words:
            raise refuse
        return words[text.lower()]
    try:
        if kind in (int, float):
            return kind(text)
        return set() if kind is set and text == "set()" else ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise refuse from None
