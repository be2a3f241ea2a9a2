"""The embedded server: loopback, its own credentials, the same port after a restart, and what the client user may."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client as NatsClient

from bus.server import NatsServer
from schemas.errors import BusUnavailableError
from tests.conftest import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")


EMBEDDER = """
import asyncio
from bus.server import NatsServer

async def main():
    async with NatsServer() as server:
        print(server.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


class ClientUser:
    """A bare NATS client with the client user's credentials, and what the server refused it."""

    def __init__(self, client: NatsClient, refused: list[str]) -> None:
        self.client = client
        self.refused = refused


@pytest_asyncio.fixture
async def client_user(nats_server: NatsServer) -> AsyncIterator[ClientUser]:
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error).lower())

    client = await nats.connect(nats_server.client_url, error_cb=note, max_reconnect_attempts=1)
    yield ClientUser(client, refused)
    await client.close()


def test_the_server_listens_on_loopback_only(nats_server: NatsServer) -> None:
    assert nats_server.port is not None
    listening = subprocess.run(["cat", "/proc/net/tcp"], capture_output=True, text=True, check=True).stdout
    mine = [line for line in listening.splitlines() if f":{nats_server.port:04X} 00000000:0000 0A" in line]
    assert mine
    assert all(" 0100007F:" in line for line in mine)


async def test_nobody_enters_without_credentials(nats_server: NatsServer) -> None:
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        await nats.connect(f"nats://127.0.0.1:{nats_server.port}", allow_reconnect=False)


async def test_stop_and_start_keep_port_credentials_and_files(tmp_path: Path) -> None:
    async with NatsServer(store_dir=tmp_path) as server:
        url, pid = server.internal_url, server.pid
        client = await nats.connect(url)
        await client.jetstream().add_stream(name="kept", subjects=["kept"])
        await client.close()
        await server.stop()
        with pytest.raises(BusUnavailableError):
            _ = server.pid
        await server.start()
        assert server.internal_url == url
        assert server.pid != pid
        server.kill()
        await server.start()
        client = await nats.connect(url)
        assert (await client.jetstream().stream_info("kept")).config.name == "kept"
        await client.close()


async def test_a_taken_port_is_a_clear_error_and_no_process_is_left() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BusUnavailableError, match="address already in use"):
            async with NatsServer(port=taken.getsockname()[1]):
                pytest.fail("it can't have started")


async def test_the_server_dies_with_the_process_that_embeds_it() -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", EMBEDDER, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    await wait_until(lambda: not is_running(pid), 5.0)


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize(
    "subject",
    [
        "busway.v1.worker.w1.prefill",
        "busway.v1.worker.w1.load",
        "busway.v1.router.r1.other",
        "busway.v1.peer.w1.metadata",
        "busway.v1.admin.w1.drain",
        "busway.v1.hb.worker.w1",
        "busway.v1.events.load.m.w1",
        "busway.v1.prefill.m.c",
        "other.v1.requests.m",
        "$KV.busway_runtime.m.decode.w1",
        "$JS.API.STREAM.DELETE.KV_busway_runtime",
        "_INBOX.busway.gw1.tok.s",
        "_INBOX.busway.gw1.5f3a0",
    ],
)
async def test_the_client_user_is_refused_and_stays_connected(client_user: ClientUser, subject: str) -> None:
    await client_user.client.publish(subject, b"x")
    await wait_until(lambda: any("permissions violation for publish" in one for one in client_user.refused))
    assert client_user.client.is_connected
    with pytest.raises(nats.errors.NoRespondersError):
        await client_user.client.request("busway.v1.requests.m", b"{}")


@pytest.mark.parametrize("subject", ["busway.v1.worker.w1.abort", "busway.v1.router.r1.abort"])
async def test_the_client_user_can_abort_its_own_attempts(
    nats_server: NatsServer, client_user: ClientUser, subject: str
) -> None:
    internal = await nats.connect(nats_server.internal_url)
    heard = await internal.subscribe(subject)
    await internal.flush()
    await client_user.client.publish(subject, b"abort")
    assert (await heard.next_msg(timeout=2)).data == b"abort"
    await internal.close()


@pytest.mark.parametrize(
    "subject", ["_INBOX.busway.>", "_INBOX.busway.gw1.tok.s", "busway.v1.>", ">", "$SYS.>", "$KV.>"]
)
async def test_the_client_user_may_not_listen_to_others(client_user: ClientUser, subject: str) -> None:
    await client_user.client.subscribe(subject)
    await wait_until(lambda: any("permissions violation for subscription" in one for one in client_user.refused))


async def test_a_wildcard_of_the_client_user_hears_no_internal_inbox(
    nats_server: NatsServer, client_user: ClientUser
) -> None:
    heard = await client_user.client.subscribe("_INBOX.>")
    await client_user.client.flush()
    internal = await nats.connect(nats_server.internal_url)
    await internal.publish("_INBOX.busway.gw1.tok.s", b"secret")
    await internal.publish("_INBOX.mine.x", b"mine")
    assert (await heard.next_msg(timeout=2)).data == b"mine"
    await internal.close()


async def test_the_client_user_reaches_gateway_and_router(nats_server: NatsServer, client_user: ClientUser) -> None:
    internal = await nats.connect(nats_server.internal_url)
    for subject in ("busway.v1.openai.chat.m", "busway.v1.requests.m"):
        served = await internal.subscribe(subject)
        await internal.flush()
        await client_user.client.publish(subject, b"x")
        assert (await served.next_msg(timeout=2)).data == b"x"
    await internal.close()
