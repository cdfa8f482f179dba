"""Tools: schemas from signatures, and every failure an observation."""

import json
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from dslib.agents import execute, finish, mcp_tools, openai_tools, tool
from dslib.agents.messages import ToolCall, tool_call
from dslib.agents.tools import as_text, read_arguments, toolbox


def search(query: str, limit: int = 3, order: Literal["new", "old"] = "new", json: bool = False) -> list[str]:
    """Find pages.

    Returns titles only.

    Args:
        query: words to look for,
            joined by spaces
        limit (int): at most so many

    Raises:
        ValueError: never
    """
    return [f"{query} {i}" for i in range(limit)]


class World:
    """A place to look around in."""

    def open(self, page: Annotated[int, Field(ge=0)]) -> dict:
        """Read a page."""
        if page > 3:
            raise KeyError(page)
        return {"page": page}

    def __call__(self, there: str) -> None:
        """Go there."""


TOOLS = toolbox([search, World().open, finish])


def answer(name, arguments):
    message = execute(TOOLS, tool_call(name, arguments, "id"))
    assert (message.role, message.tool_call_id) == ("tool", "id")
    return message


def test_signature_and_docstring_make_the_schema():
    made = tool(search)
    assert (made.name, made.description) == ("search", "Find pages.\n\nReturns titles only.")
    assert made.parameters == {
        "type": "object",
        "additionalProperties": False,
        "required": ["query"],
        "properties": {
            "query": {"type": "string", "description": "words to look for, joined by spaces"},
            "limit": {"type": "integer", "default": 3, "description": "at most so many"},
            "order": {"type": "string", "enum": ["new", "old"], "default": "new"},
            "json": {"type": "boolean", "default": False},
        },
    }


def test_one_tool_two_exports():
    openai, mcp = openai_tools([search])[0], mcp_tools([search])[0]
    assert set(openai) == {"type", "function"}
    assert set(mcp) == {"name", "description", "inputSchema"}
    assert openai["function"]["parameters"] == mcp["inputSchema"]
    assert json.loads(json.dumps(mcp)) == mcp


def test_methods_and_objects_that_can_be_called_are_tools_without_self():
    assert list(tool(World().open).parameters["properties"]) == ["page"]
    made = tool(World(), name="go")
    assert (made.description, list(made.parameters["properties"])) == ("Go there.", ["there"])


def test_a_property_called_title_stays():
    def book(title: str) -> str:
        """Find a book."""

    assert tool(book).parameters["properties"] == {"title": {"type": "string"}}


def test_nested_models_are_described_and_checked():
    class Place(BaseModel):
        x: int

    def go(to: Place) -> int:
        """Go."""
        return to.x

    boxed = toolbox([tool(go)])
    assert execute(boxed, tool_call("go", {"to": {"x": 4}})).text == "4"
    assert "to.x" in execute(boxed, tool_call("go", {"to": {"x": "far"}})).text


def test_arguments_are_checked_defaults_filled_and_harmless_slips_mended():
    assert json.loads(answer("search", {"query": "x"}).text) == ["x 0", "x 1", "x 2"]
    assert json.loads(answer("search", {"query": "x", "limit": "1"}).text) == ["x 0"]
    assert answer("open", {"page": 2}).text == '{"page": 2}'


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("serach", {}, "there is no tool 'serach'; the tools are search, open, finish"),
        ("search", "{'query': 1}", "are not JSON"),
        ("search", "[1, 2]", "must be a JSON object, not list"),
        ("search", {}, "query: Field required"),
        ("search", {"query": "x", "limit": "many", "page": 1}, "page: Extra inputs"),
        ("search", {"query": None}, "query: Input should be a valid string"),
        ("search", {"query": "x", "order": "best"}, "order: Input should be 'new' or 'old'"),
        ("open", {"page": -1}, "greater than or equal to 0"),
        ("open", {"page": 9}, "open raised KeyError: 9"),
    ],
)
def test_whatever_goes_wrong_is_an_observation(name, arguments, words):
    message = answer(name, arguments)
    assert message.failed
    assert words in message.text


def test_a_person_at_the_keyboard_still_stops_everything():
    def wait(seconds: int) -> None:
        """Wait."""
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(toolbox([wait]), tool_call("wait", {"seconds": 1}))


def test_the_first_value_is_decoded_and_prose_after_it_ignored():
    assert read_arguments('{"q": "a}b"} That should do.') == {"q": "a}b"}
    assert read_arguments("") == {}
    assert read_arguments('{"q": "two\nlines"}') == {"q": "two\nlines"}
    for text in ("here: {}", "NaN", "{" * 100_000):
        with pytest.raises(ValueError, match="JSON"):
            read_arguments(text)


def test_results_are_text():
    assert as_text(None) == ""
    assert as_text("x") == "x"
    assert as_text({"ü": {1}}) == '{"ü": "{1}"}'


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (3, TypeError, "made of a function"),
        (lambda: 0, ValueError, "name='<lambda>'"),
        (print, TypeError, "name each parameter"),
    ],
)
def test_what_makes_no_tool_is_refused(function, error, words):
    with pytest.raises(error, match=words):
        tool(function)


def test_missing_docstrings_annotations_and_odd_parameters_are_named():
    def silent(x: int): ...

    def bare(x):
        """Do."""

    def many(*x: int):
        """Do."""

    async def later(x: int):
        """Do."""

    for function, error, words in (
        (silent, ValueError, "no docstring"),
        (bare, ValueError, "x of bare has no annotation"),
        (many, TypeError, "name each parameter"),
        (later, TypeError, "asynchronous"),
    ):
        with pytest.raises(error, match=words):
            tool(function)
    with pytest.raises(ValueError, match="two tools have the name 'search'"):
        toolbox([search, tool(finish, name="search")])


def test_a_call_without_arguments_reaches_a_tool_without_parameters():
    def ping() -> str:
        """Ping."""
        return "pong"

    call = ToolCall.model_validate({"id": "a", "function": {"name": "ping", "arguments": ""}})
    assert execute(toolbox([ping]), call).text == "pong"
