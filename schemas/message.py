"""The base of all messages and the one codec: JSON, validated once into frozen structs, unknown fields ignored.

msgspec decodes and validates in one pass, where orjson plus a conversion makes two; orjson is used where JSON has
no type of ours (the gateway's HTTP bodies and SSE chunks).
"""

from typing import TypeVar, cast

import msgspec

from schemas.errors import RequestError

T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """A typed message. Subclasses set tag="name.vN"; a changed meaning takes a new N."""


_ENCODER = msgspec.json.Encoder()
_DECODERS: dict[object, msgspec.json.Decoder[object]] = {}


def encode(message: object) -> bytes:
    """Return the message's JSON."""
    return _ENCODER.encode(message)


def decode(payload: bytes, expected: type[T]) -> T:
    """Return the message in `payload`; `expected` is a struct or a union of structs.

    Raises RequestError naming the field when the payload isn't one of them.
    """
    decoder = _DECODERS.get(expected)
    if decoder is None:
        decoder = _DECODERS[expected] = msgspec.json.Decoder(cast("type[object]", expected))
    try:
        return cast("T", decoder.decode(payload))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"malformed message: {error}") from error
