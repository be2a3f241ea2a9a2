"""W3C trace context: the `traceparent` that names a request's trace and the span that caused it. Pure but for chance.

https://www.w3.org/TR/trace-context: version-traceid-parentid-flags in lower-case hexadecimal. One that isn't
well-formed doesn't count: the trace then begins here.
"""

import base64
import binascii
import re
import secrets

from schemas.ids import RequestId

_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_LENGTH = 55
_NEWER = re.compile(r"(?!00)[0-9a-f]{2}-.{52}-.*")
_IS_SAMPLED = "01"


def well_formed(traceparent: str) -> str:
    """Return a caller's traceparent as version 00, "" when it can't be used. Newer versions may say more at its end."""
    if len(traceparent) > _LENGTH and _NEWER.fullmatch(traceparent):
        traceparent = traceparent[:_LENGTH]
    return f"00{traceparent[2:]}" if _FORM.fullmatch(traceparent) else ""


def continued(traceparent: str, request_id: RequestId) -> str:
    """Return the context of this request's own span: in the caller's trace, or where `traceparent` is "" in one named
    by the request's id: the same 128 bits, in hexadecimal."""
    name = _bits(request_id)
    if traceparent:
        return f"{traceparent[:36]}{name[16:]}{traceparent[52:]}"
    return f"00-{name}-{name[16:]}-{_IS_SAMPLED}"


def trace_id(traceparent: str) -> str:
    """Return the trace's id, 32 hexadecimal digits."""
    return traceparent[3:35]


def span_id(traceparent: str) -> str:
    """Return the id of the span that the context names, 16 hexadecimal digits."""
    return traceparent[36:52]


def _bits(request_id: RequestId) -> str:
    """Return an id's 128 bits as hexadecimal; random ones for an id that isn't of our making."""
    try:
        name = base64.urlsafe_b64decode(f"{request_id}==").hex()
    except (binascii.Error, ValueError):
        name = ""
    return name if len(name) == 32 and int(name[16:], 16) else secrets.token_hex(16)
