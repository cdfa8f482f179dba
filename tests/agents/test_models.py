"""Four members of one callable type; the endpoint against a server that misbehaves in every way."""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dslib.agents import Endpoint, Message, Model, ModelError, Scripted, SmolLM2, openai_tools, run, tool
from dslib.agents.messages import assistant, system, tool_call, tool_result, user
from dslib.agents.models import (
    EndpointFailed,
    EndpointNonsense,
    EndpointTimeout,
    ScriptEnded,
    chat_prompt,
    read_answer,
)
from dslib.agents.tools import finish
from dslib.models import smollm

ASK = [system("s"), user("q")]


def completion(usage=True, **message):
    body = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}]}
    if usage:
        body["usage"] = {"prompt_tokens": 11, "completion_tokens": 4, "total_tokens": 15}
    return body


class Server(ThreadingHTTPServer):
    """Gives the prepared answers in turn: (status, body), or seconds to sleep before an empty one."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers, self.requests, self.keys = [], [], []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        server.keys.append(self.headers["Authorization"])
        answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
        if isinstance(answer, float):
            time.sleep(answer)
            return
        status, body = answer
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    pytest.importorskip("openai", reason="the client of the extra 'llm' is not installed")
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def endpoint(server, **arguments):
    return Endpoint("small", server.url, **{"timeout": 5.0, "retries": 0, **arguments})


def test_all_members_are_models():
    def policy(messages, tools):
        return assistant("x")

    assert isinstance(policy, Model)
    assert isinstance(Scripted([]), Model)
    assert isinstance(Endpoint.__call__, Model)
    assert isinstance(SmolLM2.__call__, Model)


# --- scripted


def test_a_script_gives_messages_texts_functions_and_errors():
    model = Scripted([assistant("a"), "b", lambda messages: str(len(messages)), ModelError("down")])
    assert [model(ASK, ()).text for _ in range(3)] == ["a", "b", "2"]
    with pytest.raises(ModelError, match="down"):
        model(ASK, ())
    with pytest.raises(ScriptEnded, match="this is call 5"):
        model(ASK, ())
    assert model.seen[0] == ASK
    assert Scripted(["x"], forever=True)(ASK).text == "x"
    with pytest.raises(ScriptEnded):
        Scripted([], forever=True)(ASK)


# --- endpoint


def test_a_request_carries_everything_and_the_answer_comes_back_whole(server):
    call = {"id": "c1", "type": "function", "function": {"name": "finish", "arguments": '{"answer": "x"}'}}
    server.answers = [(200, completion(content=None, reasoning_content="why", tool_calls=[call]))]
    history = [*ASK, assistant(None, [tool_call("f", "{broken")], "r"), tool_result("call_0", "Error: no")]
    message = endpoint(server, temperature=0)(history, openai_tools([finish]))
    assert (message.reasoning_content, message.calls[0].function.name) == ("why", "finish")
    assert (message.usage.prompt_tokens, message.usage.completion_tokens) == (11, 4)
    (sent,) = server.requests
    assert (sent["model"], sent["temperature"]) == ("small", 0)
    assert sent["tools"] == openai_tools([finish])
    assert sent["messages"][2]["reasoning_content"] == "r"
    assert json.loads(sent["messages"][2]["tool_calls"][0]["function"]["arguments"]) == {
        "unreadable": "{broken"
    }
    assert history[2].calls[0].function.arguments == "{broken"


def test_an_agent_runs_on_an_endpoint(server):
    call = {"id": "", "type": "function", "function": {"name": "finish", "arguments": '{"answer": "x"}'}}
    server.answers = [(200, completion(content="", tool_calls=[call]))]
    out = run(endpoint(server), [tool(finish, ends=True)], ASK)
    assert (out.answer, out.prompt_tokens) == ("x", 11)
    assert out.transcript[2].calls[0].id == "call_0"


def test_without_tools_none_are_sent(server):
    server.answers = [(200, completion(content="x"))]
    assert endpoint(server)(ASK).text == "x"
    assert "tools" not in server.requests[0]


def test_the_environments_key_goes_to_no_other_server(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server.answers = [(200, completion(content="x"))]
    endpoint(server)(ASK)
    endpoint(server, api_key="mine")(ASK)
    assert server.keys == ["Bearer none", "Bearer mine"]


def test_busy_and_broken_servers_are_asked_again(server):
    server.answers = [(429, {"error": {"message": "busy"}}), (500, "oops"), (200, completion(content="x"))]
    assert endpoint(server, retries=2)(ASK).text == "x"
    assert len(server.requests) == 3


def test_what_stays_broken_fails_with_its_words(server):
    server.answers = [(503, {"error": {"message": "overloaded"}})]
    with pytest.raises(EndpointFailed, match="overloaded"):
        endpoint(server, retries=1)(ASK)
    assert len(server.requests) == 2


def test_a_refused_request_is_not_repeated(server):
    server.answers = [(400, {"error": {"message": "context too long"}})]
    with pytest.raises(EndpointFailed, match="context too long"):
        endpoint(server, retries=3)(ASK)
    assert len(server.requests) == 1


def test_an_endpoint_that_times_out_is_a_typed_error_and_ends_a_run(server):
    server.answers = [0.5]
    with pytest.raises(EndpointTimeout, match="small"):
        endpoint(server, timeout=0.1)(ASK)
    out = run(endpoint(server, timeout=0.1), [], ASK)
    assert out.reason == "model"
    assert "EndpointTimeout" in str(out.stop)
    assert len(out.transcript) == 2


def test_nobody_there_is_said():
    pytest.importorskip("openai", reason="the client of the extra 'llm' is not installed")
    with pytest.raises(EndpointFailed, match="small"):
        Endpoint("small", "http://127.0.0.1:9/v1", timeout=2, retries=0)(ASK)


NONSENSE = [
    "<html>hello</html>",
    "",
    "[]",
    "null",
    '{"choices": []}',
    '{"choices": [{"message": null}]}',
    '{"choices": [{"message": {"role": "assistant", "tool_calls": [{"id": "a"}]}}]}',
    '{"choices": [{"message": {"role": "assistant", "tool_calls": "none"}}]}',
    '{"choices": [{"message": {"role": "assistant", "content": 3}}]}',
]


@pytest.mark.parametrize("body", NONSENSE)
def test_a_body_that_is_no_completion_is_refused_and_quoted(body):
    with pytest.raises(ValueError, match="answered no chat completion") as caught:
        read_answer(body)
    assert repr(body[:200]) in str(caught.value)


def test_nonsense_is_asked_again_and_then_a_typed_error(server):
    server.answers = [(200, NONSENSE[0]), (200, completion(content="x"))]
    assert endpoint(server, retries=1)(ASK).text == "x"
    server.answers = [(200, NONSENSE[0])]
    with pytest.raises(EndpointNonsense, match="hello"):
        endpoint(server, retries=1)(ASK)
    assert len(server.requests) == 4


def test_servers_differ_in_names_of_thinking_and_in_ids():
    calls = [{"id": name, "function": {"name": "f", "arguments": "{}"}} for name in ("", "a", "a", None)]
    message = read_answer(
        json.dumps(completion(usage=False, reasoning="why", refusal=None, tool_calls=calls))
    )
    assert message.reasoning_content == "why"
    assert [call.id for call in message.calls] == ["call_0", "a", "a_2", "call_3"]
    assert message.usage is None
    assert read_answer(json.dumps(completion(content="x", tool_calls=[]))).calls == ()


@pytest.mark.parametrize("arguments", [{"timeout": 0}, {"retries": -1}])
def test_limits_are_checked_at_the_door(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Endpoint("small", **arguments)


def test_absence_of_the_client_is_said_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ModuleNotFoundError, match=r"dslib-notebooks\[llm\]"):
        Endpoint("small")


# --- SmolLM2


def test_chatml_as_the_models_own_template_writes_it():
    history = [user("q"), assistant(None, [tool_call("f", {"n": 1})], "r"), tool_result("call_0", "2")]
    assert chat_prompt(history) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nq<|im_end|>\n"
        "<|im_start|>assistant\n<think>r</think>\n"
        '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n2<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert chat_prompt(ASK, openai_tools([finish])).startswith(
        "<|im_start|>system\ns\n\nYou can call these tools:\n{"
    )


@pytest.mark.skipif(smollm.smollm2_file() is None, reason="`make llm` was not run")
def test_smollm2_answers_in_words_and_says_what_it_read():
    model = SmolLM2(max_new_tokens=12)
    asked = [user("What is the capital of France?")]
    answer = model(asked, ())
    assert "Paris" in answer.text
    assert answer.usage.prompt_tokens == model.count(asked)
    assert 0 < answer.usage.completion_tokens <= 12
    assert isinstance(answer, Message)
    assert model.tokenizer.decode(model.tokenizer.encode("In 2024, größer!")) == "In 2024, größer!"
    assert len(model.tokenizer.encode("<|im_start|>2024")) == 5
    with pytest.raises(ModelError, match="the model reads 2048"):
        model([user("word " * 3000)], ())


def test_without_the_weights_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(smollm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="make llm"):
        SmolLM2()
