"""The shared nats-server, by a shorter name."""

import pytest

from bus.server import NatsServer


@pytest.fixture(scope="module")
def server(nats_server: NatsServer) -> NatsServer:
    return nats_server
