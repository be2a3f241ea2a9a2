"""Settings as a person reads them on start, without secrets."""

import re

import msgspec

from deploy.settings import Resolved

_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def mask(text: str) -> str:
    """Return the text with the credentials of every URL in it replaced by ***."""
    return _USERINFO.sub("***", text)


def describe(resolved: Resolved, sections: tuple[str, ...]) -> list[str]:
    """Return one line a section: `gateway: host=127.0.0.1 port=8001 (flag) …`; origins of defaults are left out."""
    return [_line(resolved, section) for section in sections]


def _line(resolved: Resolved, section: str) -> str:
    words = []
    for key, value in msgspec.to_builtins(getattr(resolved.settings, section)).items():
        origin = resolved.origins.get(f"{section}.{key}")
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        words.append(f"{key}={mask(text)}" + (f" ({origin})" if origin else ""))
    return f"{section}: " + " ".join(words)
