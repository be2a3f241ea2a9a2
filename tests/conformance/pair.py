"""A prefill and a decode worker as processes of their own, and a desk from which a test sends them legs, as a router
would: so a test can also do what no router does."""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from bus.connection import Bus
from bus.server import NatsServer
from schemas.errors import BuswayError, error_from
from schemas.frames import Failed, Finished, Frame, Tokens, decode_frames
from schemas.handoff import BootstrapInfo, DisaggregatedParams
from schemas.hop import (
    Abort,
    AcceptedHop,
    Busy,
    DecodeRequest,
    Dispatch,
    Ok,
    PrefillDone,
    PrefillEnded,
    PrefillFailed,
    PrefillRequest,
    PrefillResult,
)
from schemas.ids import AttemptId, Epoch, RequestId, WorkerId, new_attempt_id
from schemas.message import decode
from schemas.request import GenerateRequest, Sampling, StopConditions, StreamAddress
from schemas.worker import LoadReport, RuntimeConfig
from tests.conformance.engines import EngineCase, environment

MODEL = "m"
ALONE = "alone"
_numbers = itertools.count(1)


class WorkerProcess:
    """`busway worker`, restartable under the same id."""

    def __init__(
        self,
        server: NatsServer,
        case: EngineCase,
        role: str,
        model: Path | None,
        folder: Path,
        *,
        id: str = "",
        fleet: str = "",
        served: str = MODEL,
    ) -> None:
        """`fleet` is its namespace (the case's own one), `served` the model's name where there is no folder."""
        self.id = WorkerId(id or f"{case.name}-{role}")
        self.role = role
        self.model = model
        self.log = folder / f"{role}.log"
        self._case = case
        words = ["--engine", case.engine, "--role", role, "--id", self.id]
        words += ["--namespace", fleet or namespace(case)]
        words += ["--model", str(model) if model is not None else served, "--config", str(folder / "busway.toml")]
        (folder / "busway.toml").write_text("[worker]\nlease_s = 6.0\n")
        words += case.flags if role == "prefill" else (*case.flags, *case.decode_flags)
        self._command = [sys.executable, "-m", "deploy.cli", "worker", *words]
        self._environ = environment(case, folder) | {"BUSWAY_NATS_URL": server.internal_url}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self._command, env=self._environ, stdout=out, stderr=subprocess.STDOUT, preexec_fn=_nice
            )

    def wait_ready(self) -> None:
        """Return when it says that it serves; fails with its log."""
        assert self._process is not None
        end = time.monotonic() + self._case.start_s
        while b"is ready" not in self.log.read_bytes():
            assert self._process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < end, f"not ready: {self.log.read_text()[-4000:]}"
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def ask_to_leave(self) -> None:
        """SIGTERM."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    async def wait_left(self) -> int:
        """Return the exit code."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait, 60)

    def leave(self) -> int:
        """SIGTERM; return the exit code."""
        self.ask_to_leave()
        return self.exit_code()

    def exit_code(self) -> int:
        """Return the exit code of a worker that was asked to leave; killed when it doesn't within 30 s."""
        assert self._process is not None
        try:
            return self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None


class Pair:
    """The two processes of one engine (where decode can't serve alone, three), for all of its tests."""

    def __init__(self, case: EngineCase, server: NatsServer, model: Path | None, folder: Path) -> None:
        self.case = case
        self.server = server
        self.prefill = WorkerProcess(server, case, "prefill", model, folder / "p")
        self.decode = WorkerProcess(server, case, "decode", model, folder / "d")
        is_alone = case.decode_serves_alone
        self.whole = self.decode if is_alone else WorkerProcess(server, case, "both", model, folder / "b")

    @property
    def workers(self) -> list[WorkerProcess]:
        """Return all of them; `whole` is who serves aggregated requests."""
        return [self.prefill, self.decode, *([] if self.whole is self.decode else [self.whole])]

    def ensure_alive(self) -> None:
        """Start what isn't running; both at once, that halves an external engine's start."""
        dead = [worker for worker in self.workers if not worker.is_alive()]
        for worker in dead:
            worker.start()
        for worker in dead:
            worker.wait_ready()

    def stop(self) -> None:
        alive = [worker for worker in self.workers if worker.is_alive()]
        for worker in alive:
            worker.ask_to_leave()
        codes = [(worker, worker.exit_code()) for worker in alive]
        for worker, code in codes:
            assert code == 0, worker.log.read_text()[-4000:]


class Outcome(msgspec.Struct, kw_only=True):
    """What a completion's owner saw."""

    tokens: list[Tokens]
    end: Finished | Failed | PrefillEnded

    @property
    def ids(self) -> list[int]:
        if isinstance(self.end, PrefillEnded):
            return [self.end.token_id]
        return [token_id for frame in self.tokens for token_id in frame.token_ids]

    @property
    def logprobs(self) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
        if isinstance(self.end, PrefillEnded):
            return [(self.end.logprobs.logprob, self.end.logprobs.top)] if self.end.logprobs is not None else []
        return [(one.logprob, one.top) for frame in self.tokens for one in frame.logprobs or ()]

    @property
    def finished(self) -> Finished:
        assert isinstance(self.end, Finished), self.end
        return self.end


class Desk:
    """A router's and a client's end in one."""

    def __init__(self, bus: Bus, pair: Pair) -> None:
        self.pair = pair
        self.bus = bus
        self._stream = f"{bus.inbox}.tok.s"
        self._results = f"{bus.inbox}.results"
        self._frames: dict[AttemptId, list[Frame]] = {}
        self._prefilled: dict[AttemptId, PrefillResult] = {}
        self._news = asyncio.Event()
        self._epoch = Epoch(time.time_ns())

    async def start(self) -> None:
        await self.bus.listen(self._stream, self._on_frames)
        await self.bus.listen(self._results, self._on_result)

    def request(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        stop_token_ids: tuple[int, ...] = (),
        min_tokens: int = 0,
        sampling: Sampling | None = None,
        **fields: object,
    ) -> GenerateRequest:
        stop = StopConditions(
            max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop_token_ids, ignore_eos=True
        )
        return GenerateRequest(
            request_id=RequestId("test"),
            attempt_id=new_attempt_id(),
            model=self.model,
            token_ids=tuple(prompt),
            sampling=sampling or Sampling(seed=7, temperature=0.0),
            stop=stop,
            stream=StreamAddress(subject=self._stream),
            **fields,  # type: ignore[arg-type]
        )

    @property
    def model(self) -> str:
        return MODEL

    async def ask_prefill(self, request: GenerateRequest, bootstrap: BootstrapInfo | None = None) -> AcceptedHop:
        leg = PrefillRequest(
            request=request, dispatch=self._dispatch(), result_subject=self._results, bootstrap=bootstrap
        )
        return await self._ask(self.pair.prefill.id, "prefill", leg)

    async def ask_decode(
        self, request: GenerateRequest, params: DisaggregatedParams | None = None, worker: WorkerProcess | None = None
    ) -> AcceptedHop:
        """Send a decode leg; without params it goes to who serves aggregated requests, unless `worker` says."""
        prefill_worker = self.pair.prefill.id if params is not None else None
        leg = DecodeRequest(request=request, dispatch=self._dispatch(), params=params, prefill_worker=prefill_worker)
        worker = worker or (self.pair.decode if params is not None else self.pair.whole)
        return await self._ask(worker.id, "decode", leg)

    async def prefill(self, request: GenerateRequest) -> PrefillResult | BootstrapInfo:
        """Return what decode needs, or the result that leaves nothing to decode."""
        ack = await self.ask_prefill(request)
        if ack.bootstrap is not None:
            return ack.bootstrap
        await self.until(lambda: request.attempt_id in self._prefilled)
        return self._prefilled[request.attempt_id]

    async def params(self, request: GenerateRequest) -> DisaggregatedParams:
        """Return the params of a prefill that must not end the request."""
        result = await self.prefill(request)
        if isinstance(result, BootstrapInfo):
            return result
        assert isinstance(result, PrefillDone), result
        return result.params

    async def decode(self, request: GenerateRequest, params: DisaggregatedParams | None = None) -> Outcome:
        await self.ask_decode(request, params)
        return await self.outcome(request.attempt_id)

    async def decode_if_taken(self, request: GenerateRequest, params: DisaggregatedParams) -> Outcome | None:
        """Return the completion; None when decode refuses, at once or in the stream."""
        try:
            outcome = await self.decode(request, params)
        except BuswayError:
            return None
        return None if isinstance(outcome.end, Failed) else outcome

    async def outcome(self, attempt: AttemptId) -> Outcome:
        """Return what the stream brought, up to its one terminal frame."""
        await self.until(lambda: any(isinstance(one, Finished | Failed) for one in self.frames(attempt)))
        frames = self.frames(attempt)
        tokens = [one for one in frames if isinstance(one, Tokens)]
        (end,) = [one for one in frames if isinstance(one, Finished | Failed)]
        seq = 0
        for one in tokens:
            assert one.seq == seq, "a gap in the stream"
            seq += len(one.token_ids)
        return Outcome(tokens=tokens, end=end)

    async def disaggregated(self, request: GenerateRequest) -> Outcome:
        result = await self.prefill(request)
        if isinstance(result, PrefillEnded):
            return Outcome(tokens=[], end=result)
        if isinstance(result, PrefillFailed):
            raise error_from(result.error)
        return await self.decode(request, result if isinstance(result, BootstrapInfo) else result.params)

    async def aggregated(self, request: GenerateRequest) -> Outcome:
        """Let one worker do it all. The salt keeps it from KV that it fetched for others."""
        own = msgspec.structs.replace(request, attempt_id=new_attempt_id(), cache_salt=ALONE)
        return await self.decode(own)

    async def abort(self, worker: WorkerId, attempt: AttemptId) -> None:
        subject = self.bus.subjects.worker(worker, "abort")
        await self.bus.ask(subject, Abort(attempt_id=attempt, reason="test"), Ok, timeout_s=5.0)

    async def load(self, worker: WorkerId) -> LoadReport:
        return await self.bus.ask(self.bus.subjects.worker(worker, "load"), Ok(), LoadReport, timeout_s=5.0)

    async def until_free(self, within_s: float = 5.0) -> None:
        """Return when neither worker holds anything."""
        end = time.monotonic() + within_s
        while True:
            alive = [worker for worker in self.pair.workers if worker.is_alive()]
            loads = [await self.load(worker.id) for worker in alive]
            if not any(load.running + load.waiting + load.kv_blocks_used for load in loads):
                return
            assert time.monotonic() < end, f"still held after {within_s} s: {loads}"
            await asyncio.sleep(0.02)

    async def until(self, claim, within_s: float = 60.0) -> None:  # type: ignore[no-untyped-def]
        async with asyncio.timeout(within_s):
            while not claim():
                self._news.clear()
                await self._news.wait()

    async def beat(self, worker: WorkerProcess) -> None:
        """Return at a worker's next heartbeat: every worker that is ready now has heard that it lives."""
        has_come = asyncio.Event()
        subject = self.bus.subjects.heartbeat("worker", worker.id)
        beats = await self.bus.listen(subject, lambda subject, payload: has_come.set())
        try:
            async with asyncio.timeout(10.0):
                await has_come.wait()
        finally:
            await beats.stop()

    def has_news(self) -> None:
        """Let `until` look again."""
        self._news.set()

    def result(self, attempt: AttemptId) -> PrefillResult | None:
        return self._prefilled.get(attempt)

    def frames(self, attempt: AttemptId) -> list[Frame]:
        return self._frames.get(attempt, [])

    def num_tokens(self, attempt: AttemptId) -> int:
        return sum(len(one.token_ids) for one in self.frames(attempt) if isinstance(one, Tokens))

    async def record(self, worker: WorkerProcess) -> RuntimeConfig:
        store = await self.bus.jetstream().key_value(self.bus.subjects.runtime_bucket)
        entry = await store.get(f"{MODEL}.{worker.role}.{worker.id}")
        return decode(entry.value or b"", RuntimeConfig)

    async def _ask(self, worker: WorkerId, verb: str, leg: PrefillRequest | DecodeRequest) -> AcceptedHop:
        subject = self.bus.subjects.worker(worker, verb)  # type: ignore[arg-type]
        ack = await self.bus.ask(subject, leg, AcceptedHop | Busy, timeout_s=10.0)  # type: ignore[arg-type]
        assert isinstance(ack, AcceptedHop), ack
        return ack

    def _dispatch(self) -> Dispatch:
        return Dispatch(router="test", epoch=self._epoch, number=next(_numbers))

    def _on_frames(self, subject: str, payload: bytes) -> None:
        for frame in decode_frames(payload):
            self._frames.setdefault(frame.attempt_id, []).append(frame)
        self._news.set()

    def _on_result(self, subject: str, payload: bytes) -> None:
        result = decode(payload, PrefillResult)  # type: ignore[arg-type]
        self._prefilled[result.attempt_id] = result
        self._news.set()


@contextlib.asynccontextmanager
async def desk_of(pair: Pair) -> AsyncIterator[Desk]:
    client_id = f"desk{next(_numbers)}"
    async with Bus.connect(
        pair.server.internal_url, name=client_id, client_id=client_id, namespace=namespace(pair.case)
    ) as bus:
        desk = Desk(bus, pair)
        await desk.start()
        yield desk


def namespace(case: EngineCase) -> str:
    return case.name.replace("-", "")


def _nice() -> None:
    os.nice(10)
