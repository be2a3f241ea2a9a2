"""A small client of the gateway's HTTP API for the command line. Standard library only: it starts in no time."""

import http.client
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import msgspec

from deploy.errors import CommandError

TIMEOUT_S = 600.0
JSON = {"content-type": "application/json"}


class ChatError(CommandError):
    """The gateway can't be reached or refused; the message is its own."""


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One question. `max_tokens` None leaves the length to the gateway."""

    url: str
    model: str
    question: str
    max_tokens: int | None = None
    temperature: float | None = None


class Message(msgspec.Struct, frozen=True):
    content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    delta: Message = Message()
    message: Message = Message()
    finish_reason: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    code: str | None = None


class Phases(msgspec.Struct, frozen=True):
    """Where a request's time went, in seconds, and the KV bytes that moved; as schemas.trace.PhaseSeconds says."""

    gateway_s: float
    queue_s: float
    route_s: float
    prefill_queue_s: float
    prefill_s: float
    decode_queue_s: float
    transfer_s: float
    first_token_s: float
    ttft_s: float
    decode_s: float
    total_s: float
    retry_s: float = 0.0
    unreported_s: float = 0.0
    kv_bytes: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class Answer(msgspec.Struct, frozen=True):
    """A chat completion or a chunk of one, as far as the command line shows it. `busway` comes when asked for."""

    choices: list[Choice] = []
    error: ErrorBody | None = None
    usage: Usage | None = None
    busway: Phases | None = None


class ModelEntry(msgspec.Struct, frozen=True):
    id: str


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelEntry]


def first_model(url: str) -> str:
    """Return the first model the gateway serves; raises ChatError when there is none."""
    with closing(_connect(url)) as connection:
        body = _open(connection, "GET", "/v1/models", None, {}).read()
    models = msgspec.json.decode(body, type=ModelList).data
    if not models:
        raise ChatError(f"{url} serves no model yet")
    return models[0].id


def stream_chat(request: ChatRequest) -> Iterator[str]:
    """Yield the answer's text as it comes; raises ChatError, also in mid-stream. Closing it hangs up."""
    with closing(_connect(request.url)) as connection:
        response = _open(connection, "POST", "/v1/chat/completions", _body(request, is_stream=True), JSON)
        for line in _lines(response):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            chunk = _decode(data)
            yield "".join(choice.delta.content or "" for choice in chunk.choices)
    raise ChatError("the answer broke off: the stream ended without [DONE]")


def ask_chat(request: ChatRequest) -> Answer:
    """Return the whole answer with its timings; raises ChatError."""
    with closing(_connect(request.url)) as connection:
        headers = JSON | {"x-busway-timings": "1"}
        return _decode(
            _open(connection, "POST", "/v1/chat/completions", _body(request, is_stream=False), headers).read()
        )


def _body(request: ChatRequest, *, is_stream: bool) -> bytes:
    optional = {"max_tokens": request.max_tokens, "temperature": request.temperature}
    body = {
        "model": request.model,
        "messages": [{"role": "user", "content": request.question}],
        "stream": is_stream,
        **{key: value for key, value in optional.items() if value is not None},
    }
    return msgspec.json.encode(body)


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ChatError(f"not a gateway's URL: {url!r}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname, parts.port, timeout=TIMEOUT_S)


def _open(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, headers: dict[str, str]
) -> http.client.HTTPResponse:
    """Return the response, its body unread; raises ChatError for every status but 200."""
    try:
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        if response.status == 200:
            return response
        raise ChatError(f"HTTP {response.status}: {_reason(response.read())}")
    except (OSError, http.client.HTTPException) as error:
        raise ChatError(f"no answer from http://{connection.host}:{connection.port}: {error}") from error


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        while line := response.readline():
            yield line
    except (OSError, http.client.HTTPException) as error:
        raise ChatError(f"the answer broke off: {error}") from error


def _decode(data: bytes) -> Answer:
    answer = msgspec.json.decode(data, type=Answer)
    if answer.error:
        raise ChatError(answer.error.message)
    return answer


def _reason(body: bytes) -> str:
    try:
        error = msgspec.json.decode(body, type=Answer).error
    except msgspec.DecodeError:
        error = None
    return error.message if error else body[:300].decode(errors="replace")
