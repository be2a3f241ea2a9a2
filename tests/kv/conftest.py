"""Two real processes with a pool each."""

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class PeerProcess:
    """A child that runs tests/kv/peer_process.py."""

    def __init__(self, transport: str, num_blocks: int, env: dict[str, str]) -> None:
        self.num_blocks = num_blocks
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.kv.peer_process", transport, str(num_blocks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"UCX_NET_DEVICES": "lo"} | env,
        )
        self.pid = self._child.pid
        self.blob = base64.b64decode(self.do("blob"))

    def do(self, what: str, **order: object) -> object:
        self.tell(what, **order)
        assert self._child.stdout is not None
        return json.loads(self._child.stdout.readline())

    def tell(self, what: str, **order: object) -> None:
        """Give an order without waiting for its end."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"do": what} | order) + "\n")
        self._child.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def freeze(self) -> None:
        """Stop the process and return when it has stopped: signals are delivered when the kernel likes."""
        self._child.send_signal(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()

    def block(self, block_id: int) -> bytes:
        return bytes.fromhex(str(self.do("block", id=block_id)))

    def close(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue


StartPeer = Callable[..., PeerProcess]


@pytest.fixture
def start_peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartPeer]:
    """Start peers: start_peer(transport, num_blocks=64, **environment)."""
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with ExitStack() as stack:

        def start(transport: str, num_blocks: int = 64, **env: str) -> PeerProcess:
            peer = PeerProcess(transport, num_blocks, env)
            stack.callback(peer.close)
            return peer

        yield start
