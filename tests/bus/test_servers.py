"""What a NATS URL setting means: one server or more, and one login for all of them."""

import pytest

from bus.servers import Login, parse_servers
from schemas.errors import BusError


@pytest.mark.parametrize(
    ("text", "urls", "login"),
    [
        ("nats://a:4222", ["nats://a:4222"], Login()),
        ("a:4222", ["nats://a:4222"], Login()),
        ("nats://u:p@a:1, nats://b:2", ["nats://a:1", "nats://b:2"], Login(user="u", password="p")),
        ("nats://u:p@a:1,tls://u:p@b:2", ["nats://a:1", "tls://b:2"], Login(user="u", password="p")),
        ("nats://s3cret@a:1", ["nats://a:1"], Login(token="s3cret")),
        ("nats://u:p@[::1]:4222", ["nats://[::1]:4222"], Login(user="u", password="p")),
        ("wss://u:p@a/nats", ["wss://a/nats"], Login(user="u", password="p")),
    ],
)
def test_servers_and_their_login(text: str, urls: list[str], login: Login) -> None:
    assert parse_servers(text) == (urls, login)


def test_two_logins_are_refused() -> None:
    with pytest.raises(BusError, match="same credentials"):
        parse_servers("nats://u:p@a:1,nats://u:q@b:2")
