"""Tools from plain Python functions: the signature is the schema, the docstring the description.

A tool is exported as OpenAI's function or as MCP's ``{name, description, inputSchema}``; its arguments are checked
before it runs; and whatever goes wrong becomes an observation that the model reads, never an exception.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from dslib.agents.messages import ERROR, Message, ToolCall, tool_result

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters):\s*$")
_OTHER_SECTION = re.compile(r"^\s*(Returns|Raises|Yields|Examples?|Notes?):\s*$")
_PARAMETER = re.compile(r"^\s+(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True)
class Tool:
    """A function that a model may call. ``ends``: a successful call of it is the end of the run, and what it
    returns the answer. ``arguments``: the pydantic model that checks its arguments. Made by :func:`tool`."""

    name: str
    description: str
    function: Callable[..., Any]
    arguments: type[BaseModel]
    ends: bool = False

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return _plain(self.arguments.model_json_schema())

    def openai(self) -> dict[str, Any]:
        """OpenAI's form: ``{"type": "function", "function": {name, description, parameters}}``."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def mcp(self) -> dict[str, Any]:
        """MCP's form: ``{name, description, inputSchema}``."""
        return {"name": self.name, "description": self.description, "inputSchema": self.parameters}


def tool(function: Callable[..., Any], name: str | None = None, ends: bool = False) -> Tool:
    """A tool of a function or a bound method.

    The description is the docstring up to its ``Args:`` section, whose lines ``name: text`` describe the
    parameters. Parameters without a default are required, others than those of the signature refused.

    Raises TypeError for what cannot be called, is asynchronous, or takes positional-only, ``*`` or ``**``
    parameters; ValueError for a missing docstring or annotation, or a name that OpenAI does not allow.
    """
    if not callable(function):
        raise TypeError(f"a tool is made of a function, not of {function!r}")
    name = name or getattr(function, "__name__", type(function).__name__)
    if not _NAME.fullmatch(name):
        raise ValueError(f"name={name!r} must be 1 to 64 letters, digits, _ or -; give name=")
    called = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(called):
        raise TypeError(f"{name} is asynchronous; tools are called and waited for, so wrap it in a function")
    text = inspect.getdoc(function) if inspect.isroutine(function) else inspect.getdoc(called)
    if not text:
        raise ValueError(f"{name} has no docstring; the model knows a tool by it")
    description, described = _read_docstring(text)
    hints, fields = get_type_hints(called, include_extras=True), {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"{name} takes {parameter}, which a call by name cannot give; name each parameter"
            )
        if parameter.name not in hints:
            raise ValueError(f"{parameter.name} of {name} has no annotation; the schema is made of them")
        default = ... if parameter.default is parameter.empty else parameter.default
        # Behind an alias of their own: a parameter may be called what pydantic calls one of its methods.
        field = Field(default, alias=parameter.name, description=described.get(parameter.name))
        fields[f"argument_{parameter.name}"] = (hints[parameter.name], field)
    arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    return Tool(name, description, function, arguments, ends)


def finish(answer: str) -> str:
    """Give the answer and end.

    Args:
        answer: the answer, complete by itself
    """
    return answer


def toolbox(tools: Iterable[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    """Name → tool; plain functions become tools. Raises ValueError for two of one name, and as :func:`tool`."""
    found: dict[str, Tool] = {}
    for item in tools:
        made = item if isinstance(item, Tool) else tool(item)
        if made.name in found:
            raise ValueError(f"two tools have the name {made.name!r}")
        found[made.name] = made
    return found


def openai_tools(tools: Iterable[Tool | Callable[..., Any]]) -> list[dict[str, Any]]:
    """All of them in OpenAI's form. Raises as :func:`toolbox`."""
    return [made.openai() for made in toolbox(tools).values()]


def mcp_tools(tools: Iterable[Tool | Callable[..., Any]]) -> list[dict[str, Any]]:
    """All of them in MCP's form. Raises as :func:`toolbox`."""
    return [made.mcp() for made in toolbox(tools).values()]


def execute(tools: Mapping[str, Tool], call: ToolCall) -> Message:
    """Run a call: its tool message, whatever happens. Failures begin with ``"Error: "``: an unknown tool (the
    known ones are named), arguments that are no JSON object or do not fit the schema (each is named), and what the
    function raises. KeyboardInterrupt and SystemExit are not the tool's and pass."""
    name = call.function.name
    if name not in tools:
        return _failure(call, f"there is no tool {name!r}; the tools are {', '.join(tools) or 'none'}")
    made = tools[name]
    try:
        given = read_arguments(call.function.arguments)
        checked = made.arguments.model_validate(given)
    except ValidationError as error:
        return _failure(call, f"the arguments of {name} do not fit: {_complaints(error)}")
    except ValueError as error:
        return _failure(call, f"the arguments of {name} {error}")
    names = {f: field.alias for f, field in made.arguments.model_fields.items()}
    arguments = {alias: getattr(checked, field) for field, alias in names.items()}
    try:
        return tool_result(call, as_text(made.function(**arguments)))
    except Exception as error:
        return _failure(call, f"{name} raised {type(error).__name__}: {error}")


def read_arguments(text: str) -> dict[str, Any]:
    """The JSON object that ``text`` begins with; what follows it is ignored, for models add words to it. Empty
    text is no arguments. Raises ValueError for anything else, saying where."""
    text = text.strip()
    if not text:
        return {}
    try:
        value, _ = json.JSONDecoder(strict=False).raw_decode(text)
    except (json.JSONDecodeError, RecursionError) as error:
        where = (
            f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else "too deep"
        )
        raise ValueError(f"are not JSON ({where}): {text[:200]}") from error
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, not {type(value).__name__}: {text[:200]}")
    return value


def as_text(value: Any) -> str:
    """A result as a model reads it: strings as they are, None as nothing, everything else as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    return json.dumps(value, ensure_ascii=False, default=str)


def _failure(call: ToolCall, text: str) -> Message:
    return tool_result(call, ERROR + text)


def _complaints(error: ValidationError) -> str:
    return "; ".join(
        ".".join(str(part) for part in found["loc"]) + ": " + found["msg"]
        for found in error.errors(include_url=False)
    )


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    description: list[str] = []
    described: dict[str, str] = {}
    inside, current = False, None
    for line in text.splitlines():
        if _SECTION.match(line):
            inside = True
        elif _OTHER_SECTION.match(line):
            break
        elif not inside:
            description.append(line)
        elif found := _PARAMETER.match(line):
            current = found[1]
            described[current] = found[2].strip()
        elif line.strip() and current:
            described[current] += " " + line.strip()
    return "\n".join(description).strip(), described


def _plain(schema: Any) -> Any:
    """Without the titles that pydantic makes up of names; a property called ``title`` stays."""
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [_plain(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    out = {}
    for key, value in schema.items():
        if key in ("properties", "$defs") and isinstance(value, Mapping):
            out[key] = {name: _plain(item) for name, item in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            out[key] = value
        elif not (key == "title" and isinstance(value, str)):
            out[key] = _plain(value)
    return out
