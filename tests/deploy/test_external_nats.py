"""The example configuration of an external NATS: services work with it, and its users may do what it says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bus.connection import Bus
from bus.server import NatsServer, find_binary
from schemas.errors import AckTimeoutError, NoRespondersError
from schemas.hop import Ok

if TYPE_CHECKING:
    from tests.deploy.conftest import Home

CONF = Path(__file__).parents[2] / "deploy" / "nats.conf"
PASSWORDS = {"NATS_SERVICE_PASSWORD": "s3cret", "NATS_ADMIN_PASSWORD": "adm1n", "NATS_CLIENT_PASSWORD": "cl1ent"}


@pytest.fixture
def nats_port(tmp_path: Path) -> Iterator[int]:
    """A nats-server of the example configuration, on loopback and a free port."""
    flags = ["-a", "127.0.0.1", "-p", "-1", "-m", "-1", "--ports_file_dir", str(tmp_path)]
    with (tmp_path / "nats.log").open("wb") as log:
        server = subprocess.Popen(
            [find_binary(), "-c", CONF, *flags],
            cwd=tmp_path,
            env=os.environ | PASSWORDS,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield _port(tmp_path, server)
    finally:
        server.terminate()
        server.wait()


def _port(folder: Path, server: subprocess.Popen[bytes]) -> int:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        assert server.poll() is None, (folder / "nats.log").read_text()
        for file in folder.glob("*.ports"):
            if found := re.search(r"nats://127\.0\.0\.1:(\d+)", file.read_text()):
                return int(found[1])
        time.sleep(0.01)
    raise AssertionError("nats-server did not start")


def url_of(user: str, port: int) -> str:
    return f"nats://{user}:{PASSWORDS['NATS_' + user.upper() + '_PASSWORD']}@127.0.0.1:{port}"


def test_services_run_on_it_and_only_an_admin_may_drain_them(home: Home, nats_port: int) -> None:
    with home.serving("--nats-url", url_of("service", nats_port)) as served:
        assert len(served.family()) == 4, "no nats-server of its own"
        assert home.run("chat", "Hello!", "--max-tokens", "4").returncode == 0
        (decode,) = [row["worker_id"] for row in home.status()["workers"] if row["role"] == "decode"]
        refused = home.run("drain", decode)
        assert refused.returncode == 1
        assert "did not take the order" in refused.stderr
        as_admin = ("--nats-url", url_of("admin", nats_port))
        assert home.run("drain", decode, *as_admin).returncode == 0
        assert decode not in home.run("status", *as_admin).stdout
        family = served.family()
        assert served.stop(signal.SIGTERM) == 0, home.log()
    assert [process for process in family if process.is_running()] == []


async def test_only_an_embedded_server_is_known_to_be_this_machines_alone(nats_port: int) -> None:
    """Both are reached by a URL of 127.0.0.1; peers of the external one may be anywhere."""
    async with (
        NatsServer() as embedded,
        Bus.connect(embedded.internal_url, name="a", client_id="a") as inside,
        Bus.connect(url_of("service", nats_port), name="b", client_id="b") as outside,
    ):
        assert inside.is_one_host
        assert not outside.is_one_host


async def test_its_client_user_may_do_what_the_embedded_servers_may(nats_port: int) -> None:
    """To end a request of its own, and to have it sent again, wherever it is."""
    url = url_of("client", nats_port)
    async with Bus.connect(url, name="c", client_id="c", is_internal=False) as bus:
        for subject in (
            bus.subjects.worker("w", "abort"),
            bus.subjects.router("r", "resend"),
            bus.subjects.requests("m"),
        ):
            with pytest.raises(NoRespondersError):
                await bus.ask(subject, Ok(), Ok)
        with pytest.raises(AckTimeoutError):
            await bus.ask(bus.subjects.admin("w", "drain"), Ok(), Ok, timeout_s=0.2)


async def test_its_limits_are_those_of_the_embedded_server(nats_port: int) -> None:
    async with (
        NatsServer() as embedded,
        Bus.connect(embedded.internal_url, name="a", client_id="a") as inside,
        Bus.connect(url_of("service", nats_port), name="b", client_id="b") as outside,
    ):
        assert inside.max_payload_bytes == outside.max_payload_bytes
