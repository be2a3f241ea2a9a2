"""Two engines measured in turns, each in a process and a Python of its own: jobs go in, one JSON line each, and what
their steps took comes out. Whoever isn't asked waits, and uses no CPU."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import IO, Literal, NamedTuple, Protocol, TypeVar

import msgspec

T = TypeVar("T")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Decode `steps` steps of `batch` sequences, each behind `num_tokens` of its own, or prefill `steps` prompts of
    `num_tokens`, one after the other. `salt`: other salts have other tokens, which nobody has cached."""

    kind: Literal["decode", "prefill"]
    num_tokens: int
    batch: int = 1
    steps: int = 1
    salt: int = 0

    def prompt(self, number: int = 0) -> list[int]:
        """Return the tokens of the sequence, or the prompt, with this number."""
        start = 31 * self.salt + 17 * number
        return [(start + i * 7919) % 40000 + 100 for i in range(self.num_tokens)]


class Spent(NamedTuple):
    """Seconds by the clock, and of CPU time: on a busy machine the latter say more."""

    wall_s: float
    cpu_s: float


class Watch:
    """Started when it is made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> Spent:
        return Spent(time.perf_counter() - self._wall, time.process_time() - self._cpu)


class Side(Protocol):
    """One engine. `facts` says what runs: dtype, version, threads."""

    facts: dict[str, str]

    def decode(self, job: Job) -> list[Spent]: ...

    def prefill(self, job: Job) -> list[Spent]: ...


class Opponent:
    """A side's process, as the bench sees it."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.facts: dict[str, str] = self._read(dict[str, str])

    def spent(self, job: Job) -> list[Spent]:
        """Return what each of the job's steps took."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        self._process.stdin.flush()
        return self._read(list[Spent])

    def _read(self, kind: type[T]) -> T:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side of the bench ended with {self._process.wait()}")
        return msgspec.json.decode(line, type=kind)


@contextlib.contextmanager
def opponent(command: Sequence[str], environ: dict[str, str]) -> Iterator[Opponent]:
    """Run a side for the length of the block, once it has loaded its model."""
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield Opponent(process)
        finally:
            process.kill()


def own_channel() -> IO[bytes]:
    """Return this side's way out, and send to stderr what libraries print."""
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return channel


def serve(side: Side, channel: IO[bytes], orders: IO[bytes]) -> None:
    """Do the jobs that come, until no more do."""
    channel.write(msgspec.json.encode(side.facts) + b"\n")
    for line in orders:
        job = msgspec.json.decode(line, type=Job)
        spent = side.decode(job) if job.kind == "decode" else side.prefill(job)
        channel.write(msgspec.json.encode(spent) + b"\n")
