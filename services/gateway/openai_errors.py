"""Our errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}. Pure."""

import math
from collections.abc import Mapping
from types import MappingProxyType

import orjson

from schemas.errors import BuswayError

# OpenAI's official client retries 408, 409, 429 and 5xx by itself and honours Retry-After.
_DEFAULT_RETRY_AFTER_S = 1.0
NOTHING: Mapping[str, object] = MappingProxyType({})


def error_object(error: BuswayError) -> dict[str, object]:
    """Return the inner object; `code` is ours, which is finer than the type."""
    return {"message": error.message, "type": _type(error.http_status), "param": error.param, "code": error.code}


def error_body(error: BuswayError, asides: Mapping[str, object] = NOTHING, *, has_status: bool = False) -> bytes:
    """Return the JSON body; `has_status` puts the HTTP status into it, for NATS, which has none. `asides` go beside
    the error, as `busway`."""
    inner = error_object(error)
    if has_status:
        inner["status"] = error.http_status
    return orjson.dumps({"error": inner, "busway": asides} if asides else {"error": inner})


def error_headers(error: BuswayError) -> dict[str, str]:
    """Return Retry-After in whole seconds for what is worth trying again later."""
    if error.http_status not in (429, 503):
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s or _DEFAULT_RETRY_AFTER_S)))}


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
