"""OpenAI request bodies as typed frozen structs. Pure; step 1 of a request's walk.

Field names, defaults and null handling follow OpenAI's API reference; top_k, min_p, repetition_penalty, min_tokens,
ignore_eos, stop_token_ids, cache_salt, priority (the lowest first), chat_template_kwargs and add_generation_prompt
follow vLLM's extensions of it.
"""

import re
from typing import Annotated, Literal, TypeVar

import msgspec
import orjson
from msgspec import Meta

from schemas.errors import RequestError, RequestTooLargeError
from schemas.request import MAX_LOGPROBS, MAX_SESSION_CHARS, TokenId
from services.gateway.refusals import ignored_fields, refuse_handoff_fields, refuse_unserved_fields

MAX_MESSAGES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_COMPLETIONS = 128

Endpoint = Literal["chat", "completions"]
Count = Annotated[int, Meta(ge=1, lt=2**31)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
R = TypeVar("R", bound="OpenAIRequest")

# Known, without effect on the answer: not worth telling the client that they are ignored.
_HARMLESS = frozenset({"metadata", "parallel_tool_calls", "safety_identifier", "service_tier", "store", "user"})


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class BuswayOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Our own extension: `timings` asks for the phases of the request beside its answer, `explain` for why it went
    where it went. `first_token_s`: seconds from now that its first token may take; a router that expects more refuses
    at once."""

    timings: bool = False
    explain: bool = False
    first_token_s: Annotated[float, Meta(gt=0.0, le=86400.0)] | None = None


class OpenAIRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints share. None stands for absent and null alike."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=MAX_SESSION_CHARS)] | None = None
    priority: Annotated[int, Meta(gt=-(2**31), lt=2**31)] | None = None
    busway: BuswayOptions | None = None

    @property
    def first_token_s(self) -> float | None:
        return None if self.busway is None else self.busway.first_token_s

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def has_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: object = None
    function_call: object = None
    audio: object = None


class ChatRequest(OpenAIRequest, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """`prompt` is checked by `prompts`: a union of four array types is more than msgspec takes."""

    prompt: object
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids; raises RequestError naming the element at fault."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not isinstance(self.prompt, list) or not self.prompt:
            raise RequestError("prompt: a string, token ids, or a non-empty list of either is wanted", param="prompt")
        if len(self.prompt) > MAX_COMPLETIONS and not isinstance(self.prompt[0], int):
            raise RequestError(f"prompt: {len(self.prompt)} prompts, the limit is {MAX_COMPLETIONS}", param="prompt")
        if isinstance(self.prompt[0], int):
            return [_token_ids(self.prompt, "prompt")]
        return [p if isinstance(p, str) else _token_ids(p, f"prompt[{i}]") for i, p in enumerate(self.prompt)]


def parse_chat(body: bytes, implied_model: str | None = None) -> tuple[ChatRequest, tuple[str, ...]]:
    """Return the request and the names of the fields ignored; raises RequestError naming field and limit.

    `implied_model` stands in when the body names no model.
    """
    request, ignored = _parse(body, ChatRequest, implied_model)
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs: only with logprobs=true", param="top_logprobs")
    for i, message in enumerate(request.messages):
        _check_message(message, f"messages[{i}]")
    return request, ignored


def parse_completion(body: bytes, implied_model: str | None = None) -> tuple[CompletionRequest, tuple[str, ...]]:
    """As parse_chat, for the legacy endpoint."""
    return _parse(body, CompletionRequest, implied_model)


def check_body_size(num_bytes: int, max_body_bytes: int) -> None:
    """Raise RequestTooLargeError with both numbers when a body is over the limit."""
    if num_bytes > max_body_bytes:
        raise RequestTooLargeError(f"request body: {num_bytes} bytes, the limit is {max_body_bytes}")


def _parse(body: bytes, expected: type[R], implied_model: str | None) -> tuple[R, tuple[str, ...]]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"request body: not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise RequestError(f"request body: a JSON object is wanted, not {_json_type(document)}")
    if implied_model is not None:
        document.setdefault("model", implied_model)
    refuse_handoff_fields(document)
    refuse_unserved_fields(document)
    try:
        request = msgspec.convert(document, expected)
    except msgspec.ValidationError as error:
        raise _explain(error) from error
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options: only with stream=true", param="stream_options")
    known = _HARMLESS.union(expected.__struct_fields__)
    return request, ignored_fields(document, known)


_WHERE = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"Object missing required field `(.*)`$")


def _explain(error: msgspec.ValidationError) -> RequestError:
    """Turn msgspec's "Expected … - at `$.path`" into "path: expected …"."""
    text = str(error)
    where = _WHERE.search(text)
    path = where.group(1) if where else ""
    reason = text[: where.start()] if where else text
    missing = _MISSING.search(reason)
    if missing:
        path = f"{path}.{missing.group(1)}" if path else missing.group(1)
        return RequestError(f"{path}: this field is required", param=path)
    reason = reason[:1].lower() + reason[1:]
    return RequestError(f"{path}: {reason}" if path else reason, param=path or None)


def _check_message(message: ChatMessage, path: str) -> None:
    if message.role in ("tool", "function"):
        raise RequestError(f"{path}.role: {message.role} messages are not supported", param=f"{path}.role")
    for name, value in (
        ("tool_calls", message.tool_calls),
        ("function_call", message.function_call),
        ("audio", message.audio),
    ):
        if value not in (None, []):
            raise RequestError(f"{path}.{name}: not supported by this server", param=f"{path}.{name}")
    if message.content is None:
        raise RequestError(f"{path}.content: this field is required", param=f"{path}.content")
    if isinstance(message.content, str):
        return
    for j, part in enumerate(message.content):
        where = f"{path}.content[{j}]"
        if part.type != "text":
            raise RequestError(f"{where}.type: only text parts are supported, not {part.type!r}", param=where)
        if part.text is None:
            raise RequestError(f"{where}.text: this field is required", param=f"{where}.text")


_TOKEN_IDS = Annotated[list[TokenId], Meta(min_length=1)]


def _token_ids(value: object, path: str) -> list[int]:
    try:
        return msgspec.convert(value, _TOKEN_IDS)
    except msgspec.ValidationError as error:
        text = str(error).replace("$", path, 1)
        raise RequestError(f"{path}: a string or a list of token ids is wanted: {text}", param=path) from error


def _json_type(value: object) -> str:
    return "an array" if isinstance(value, list) else "null" if value is None else f"a {type(value).__name__}"
