"""Three nats-servers of the example configuration, deploy/nats.conf, with its part about clusters uncommented."""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from nats.errors import Error

from bus.connection import Bus
from bus.server import find_binary
from schemas.errors import BuswayError

CONF = Path(__file__).parents[2] / "deploy" / "nats.conf"
NUM_NODES = 3
READY_TIMEOUT_S = 90.0


class Node:
    """One server; `start` again after `kill` takes the same ports and files."""

    def __init__(self, name: str, port: int, config: Path, passwords: dict[str, str]) -> None:
        self.name = name
        self.port = port
        self._config = config
        self._passwords = passwords
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        flags = ["-c", self._config, "-a", "127.0.0.1", "-p", str(self.port), "-m", "-1"]
        with (self._config.parent / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [find_binary(), *flags],
                cwd=self._config.parent,
                env=os.environ | self._passwords,
                stdout=log,
                stderr=log,
            )

    def log(self) -> str:
        """Return the end of what the server wrote."""
        return (self._config.parent / "log").read_text()[-1500:]

    def kill(self) -> None:
        """SIGKILL, and reap it."""
        self.end(signal.SIGKILL)

    def end(self, signum: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signum)
            process.wait()


class Cluster:
    """Made by `run_cluster`. `internal_url` is the services', `admin_url` an operator's: all nodes, one login."""

    def __init__(self, nodes: list[Node], passwords: dict[str, str]) -> None:
        self.nodes = {node.name: node for node in nodes}
        self._passwords = passwords

    @property
    def internal_url(self) -> str:
        return self._url("service")

    @property
    def admin_url(self) -> str:
        return self._url("admin")

    @property
    def replicas(self) -> int:
        return len(self.nodes)

    def _url(self, user: str) -> str:
        login = f"{user}:{self._passwords[f'NATS_{user.upper()}_PASSWORD']}"
        return ",".join(f"nats://{login}@127.0.0.1:{node.port}" for node in self.nodes.values())

    async def until_writable(self) -> None:
        """Return once JetStream has a leader that takes orders, and a bucket of three replicas one of its own."""
        last: Exception | None = None
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while True:
                    try:
                        return await self._write()
                    except (BuswayError, Error) as error:
                        last = error
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"{last!r}: {[node.log() for node in self.nodes.values()]}") from None

    async def _write(self) -> None:
        async with Bus.connect(self.admin_url, name="probe", client_id=f"probe{secrets.token_hex(4)}") as bus:
            bucket = await bus.jetstream().create_key_value(bucket="probe", replicas=self.replicas)
            await bucket.put("writable", b"")

    async def leader_of(self, bus: Bus, stream: str) -> Node:
        """Return the node that leads a stream, once the others have all of it: only then may it go."""
        async with asyncio.timeout(READY_TIMEOUT_S):
            while True:
                with contextlib.suppress(Error):
                    cluster = (await bus.jetstream().stream_info(stream)).cluster
                    replicas = (cluster and cluster.replicas) or []
                    num_current = sum(bool(replica.current and not replica.offline) for replica in replicas)
                    if cluster and cluster.leader and num_current == self.replicas - 1:
                        return self.nodes[cluster.leader]
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def run_cluster() -> AsyncIterator[Cluster]:
    """Run three nodes for the length of the block."""
    # A letter first: the server reads a variable as a value of its configuration, where 5M and 1_2 are numbers.
    passwords = {f"NATS_{user}_PASSWORD": f"p{secrets.token_hex(12)}" for user in ("SERVICE", "ADMIN", "CLIENT")}
    route_ports, client_ports = _free_ports(NUM_NODES), _free_ports(NUM_NODES)
    with tempfile.TemporaryDirectory(prefix="busway-cluster-") as folder:
        nodes = []
        for number in range(NUM_NODES):
            config = Path(folder) / f"nats-{number}" / "nats.conf"
            config.parent.mkdir()
            config.write_text(_config(number, route_ports))
            nodes.append(Node(f"nats-{number}", client_ports[number], config, passwords))
        try:
            for node in nodes:
                node.start()
            cluster = Cluster(nodes, passwords)
            await cluster.until_writable()
            yield cluster
        finally:
            for node in nodes:
                node.end(signal.SIGKILL)


def _config(number: int, route_ports: list[int]) -> str:
    """Return the example configuration of one node: its commented part about clusters, with ports of this machine."""
    head, mark, cluster = CONF.read_text().partition("# server_name: nats-0")
    assert mark
    text = head + "\n".join(line.removeprefix("# ") for line in (mark + cluster).splitlines())
    text = text.replace("server_name: nats-0", f"server_name: nats-{number}")
    text = text.replace("0.0.0.0:6222", f"127.0.0.1:{route_ports[number]}")
    for node, port in enumerate(route_ports):
        text = text.replace(f"nats://nats-{node}:6222", f"nats://127.0.0.1:{port}")
    assert not re.search(r"\b6222\b", text)
    return text


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as sockets:
        taken = [sockets.enter_context(socket.socket()) for _ in range(number)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]
