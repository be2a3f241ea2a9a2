"""OpenAI response JSON, streamed and whole. Pure.

A content chunk is bytes from a template around the one JSON string that changes: the rest is the same for every
token of a choice, and this is the hottest path of the gateway.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson

from services.gateway.choice import ChoiceDelta, TokenScore
from services.gateway.logprobs import TokenBytesOf, chat_logprobs, completion_logprobs
from services.gateway.openai_request import Endpoint

# Our own mark on a choice: it went on after a lost worker where that isn't exact.
_RESUMED = b',"resumed":true'


@dataclass(frozen=True, slots=True)
class Heading:
    """What all chunks of an answer share. `has_usage`: a usage chunk follows, so every other says "usage": null."""

    id: str
    created: int
    model: str
    fingerprint: str
    has_usage: bool = False
    has_logprobs: bool = False

    def fields(self, kind: str) -> dict[str, object]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(slots=True)
class WholeChoice:
    """A choice collected for an unstreamed answer."""

    index: int
    text: str
    scores: list[TokenScore]
    finish_reason: str | None = None
    is_resumed: bool = False

    def add(self, delta: ChoiceDelta) -> None:
        self.text += delta.text
        self.scores.extend(delta.scores)
        self.finish_reason = delta.finish_reason
        self.is_resumed = delta.is_resumed


class Renderer(Protocol):
    """How one endpoint writes its answers; all methods return JSON."""

    def first(self, index: int) -> list[bytes]:
        """Return what a choice's stream opens with."""
        ...

    def delta(self, delta: ChoiceDelta) -> list[bytes]:
        """Return the chunks of one step of one choice; none when there is nothing to show yet."""
        ...

    def last(self, usage: dict[str, object] | None, busway: dict[str, object] | None) -> list[bytes]:
        """Return the chunk without choices that carries usage and our own object, where asked for."""
        ...

    def document(
        self, choices: Sequence[WholeChoice], usage: dict[str, object], busway: dict[str, object] | None
    ) -> bytes:
        """Return an unstreamed answer."""
        ...


class _ChunkTemplate:
    """Both endpoints' chunks: heading, then `choices` with one choice whose payload is under `key`."""

    kind: str
    document_kind: str

    def __init__(self, heading: Heading, bytes_of: TokenBytesOf) -> None:
        self._heading = heading
        self._bytes_of = bytes_of
        head = orjson.dumps(heading.fields(self.kind))[:-1]
        self._head = head + b',"choices":[{"index":'
        self._empty_head = head + b',"choices":[],"usage":'
        self._tail = b'}],"usage":null}' if heading.has_usage else b"}]}"

    def last(self, usage: dict[str, object] | None, busway: dict[str, object] | None) -> list[bytes]:
        if usage is None and busway is None:
            return []
        extension = b"" if busway is None else b',"busway":' + orjson.dumps(busway)
        return [self._empty_head + orjson.dumps(usage) + extension + b"}"]

    def _chunk(
        self, index: int, payload: bytes, logprobs: object, finish_reason: str | None, is_resumed: bool = False
    ) -> bytes:
        return b'%b%d,%b,"logprobs":%b,"finish_reason":%b%b%b' % (
            self._head,
            index,
            payload,
            b"null" if logprobs is None else orjson.dumps(logprobs),
            b"null" if finish_reason is None else b'"%b"' % finish_reason.encode(),
            _RESUMED if is_resumed else b"",
            self._tail,
        )

    def _document(
        self,
        choices: Sequence[dict[str, object]],
        usage: dict[str, object],
        busway: dict[str, object] | None,
    ) -> bytes:
        document = self._heading.fields(self.document_kind) | {"choices": choices, "usage": usage}
        if busway is not None:
            document["busway"] = busway
        return orjson.dumps(document)


class ChatRenderer(_ChunkTemplate):
    kind = "chat.completion.chunk"
    document_kind = "chat.completion"

    def first(self, index: int) -> list[bytes]:
        return [self._chunk(index, b'"delta":{"role":"assistant","content":""}', None, None)]

    def delta(self, delta: ChoiceDelta) -> list[bytes]:
        chunks = []
        if delta.text or delta.scores:
            payload = b'"delta":{"content":%b}' % orjson.dumps(delta.text)
            chunks.append(self._chunk(delta.index, payload, self._logprobs(delta.scores), None))
        if delta.finish_reason is not None:
            chunks.append(self._chunk(delta.index, b'"delta":{}', None, delta.finish_reason, delta.is_resumed))
        return chunks

    def document(
        self, choices: Sequence[WholeChoice], usage: dict[str, object], busway: dict[str, object] | None
    ) -> bytes:
        rendered: list[dict[str, object]] = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.scores),
                "finish_reason": choice.finish_reason,
                **({"resumed": True} if choice.is_resumed else {}),
            }
            for choice in choices
        ]
        return self._document(rendered, usage, busway)

    def _logprobs(self, scores: Sequence[TokenScore]) -> object:
        return chat_logprobs(scores, self._bytes_of) if self._heading.has_logprobs else None


class CompletionRenderer(_ChunkTemplate):
    kind = "text_completion"
    document_kind = "text_completion"

    def first(self, index: int) -> list[bytes]:
        return []

    def delta(self, delta: ChoiceDelta) -> list[bytes]:
        if not (delta.text or delta.scores or delta.finish_reason):
            return []
        payload = b'"text":%b' % orjson.dumps(delta.text)
        logprobs = self._logprobs(delta.scores)
        return [self._chunk(delta.index, payload, logprobs, delta.finish_reason, delta.is_resumed)]

    def document(
        self, choices: Sequence[WholeChoice], usage: dict[str, object], busway: dict[str, object] | None
    ) -> bytes:
        rendered: list[dict[str, object]] = [
            {
                "index": choice.index,
                "text": choice.text,
                "logprobs": self._logprobs(choice.scores),
                "finish_reason": choice.finish_reason,
                **({"resumed": True} if choice.is_resumed else {}),
            }
            for choice in choices
        ]
        return self._document(rendered, usage, busway)

    def _logprobs(self, scores: Sequence[TokenScore]) -> object:
        return completion_logprobs(scores, self._bytes_of) if self._heading.has_logprobs and scores else None


def renderer_for(endpoint: Endpoint, heading: Heading, bytes_of: TokenBytesOf) -> Renderer:
    return ChatRenderer(heading, bytes_of) if endpoint == "chat" else CompletionRenderer(heading, bytes_of)
