"""From the URLs of a setting to what nats-py is told: the servers, and the one login that counts at all of them. Pure.

nats-py keeps a URL's credentials to that URL: a cluster's other servers, which it learns of by itself, would be asked
without, and their refusal closes the connection for good (nats-py 2.16, Client._process_err).
"""

from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

from schemas.errors import BusError


class Login(NamedTuple):
    """As nats-py's options are named; None: not given."""

    user: str | None = None
    password: str | None = None
    token: str | None = None


class Servers(NamedTuple):
    """`urls` are without credentials, so that servers learnt of later are known for the same ones."""

    urls: list[str]
    login: Login


def parse_servers(text: str) -> Servers:
    """Return the servers of `nats://user:password@a:4222,nats://b:4222`; raises BusError for two different logins."""
    urls: list[str] = []
    logins: list[Login] = []
    for url in (part.strip() for part in text.split(",")):
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        urls.append(urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])))
        if parts.username is not None:
            named = Login(user=parts.username, password=parts.password)
            logins.append(Login(token=parts.username) if parts.password is None else named)
    if len(set(logins)) > 1:
        raise BusError("all NATS URLs of a setting must carry the same credentials, or but one of them")
    return Servers(urls, logins[0] if logins else Login())
