"""The transfer thread: posts, polls and times every movement of KV, so that neither the event loop nor the engine's
thread ever waits for one.

A move has two ends. Its `result` is what the request waits for: done, failed or too late. `settled` is what its
blocks wait for: nothing will touch them any more. A move given up by its deadline has a result long before it is
settled (a stopped peer that wakes up still writes), and its target blocks stay in quarantine in between.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from schemas.errors import AbortedError, EngineError, KvTransferError, KvTransferFailedError
from services.kv.layout import KvRegion
from services.kv.transfer import BlockIds, Direction, KvTransfer, TransferHandle

T = TypeVar("T")

_log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
MIN_POLL_GAP_S = 50e-6
MAX_POLL_GAP_S = 1e-3
STUCK_POLL_GAP_S = 20e-3
GONE_GRACE_S = 0.5


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """What a complete move took; `seconds` counts from its request."""

    num_bytes: int
    seconds: float


class Move:
    """One move, as seen from the event loop. Await `result` under `asyncio.shield`, or cancel it through `cancel`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, give_up: Callable[["Move"], None]) -> None:
        self.result: asyncio.Future[Moved] = loop.create_future()
        self.settled: asyncio.Future[None] = loop.create_future()
        self._give_up = give_up

    def cancel(self) -> None:
        """Give the move up: its result becomes AbortedError unless it has one; it settles in its own time."""
        self._give_up(self)


class _Job(msgspec.Struct, kw_only=True):
    """A move on the thread's side. `handle` is the piece under way, `next_block` the first one not yet posted."""

    move: Move
    direction: Direction
    peer: str
    local: BlockIds
    remote: BlockIds
    deadline: float
    started_at: float
    next_block: int = 0
    handle: TransferHandle | None = None
    has_result: bool = False
    settle_at: float | None = None


class Mover:
    """Owns a KvTransfer and the one thread that uses it. Its methods are called on the event loop's thread."""

    def __init__(self, transfer: KvTransfer) -> None:
        self._transfer = transfer
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[Move, _Job] = {}
        self._warm_ups: set[TransferHandle] = set()
        self._block_bytes = 1
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[None]

    @property
    def transport(self) -> str:
        return self._transfer.transport

    async def start(self, region: KvRegion) -> bytes:
        """Start the thread and serve `region`; return the blob by which peers reach it."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._block_bytes = region.layout.block_bytes
        self._thread = threading.Thread(target=self._run, name="kv-mover", daemon=True)
        self._thread.start()
        return await self._call(lambda: self._transfer.register(region))

    async def join(self) -> None:
        """Wait until the thread was stopped; raises EngineError when it died instead: nothing will move any more."""
        await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """End the thread; moves without a result get AbortedError. Bounded by the piece under way."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        self._commands.put(None)
        await asyncio.to_thread(thread.join, 5.0)
        for move in list(self._jobs):
            _resolve(move.result, AbortedError("the worker is leaving", phase="transfer"))
            _resolve(move.settled, None)

    async def add_peer(self, name: str, blob: bytes, num_blocks: int) -> None:
        """Connect to a peer and warm the connection up (which this does not wait for). Raises KvTransferError."""

        def connect() -> None:
            self._transfer.add_peer(name, blob, num_blocks)
            handle = self._transfer.warm(name)
            if handle is not None:
                self._warm_ups.add(handle)

        await self._call(connect)

    async def remove_peer(self, name: str, *, is_proven_gone: bool) -> None:
        """Forget a peer and fail its moves. With `is_proven_gone` they also settle, after what the network still
        holds has had time to arrive; without, only their own end settles them."""

        def forget() -> None:
            self._transfer.remove_peer(name)
            for job in [job for job in self._jobs.values() if job.peer == name]:
                if is_proven_gone:
                    job.settle_at = time.monotonic() + GONE_GRACE_S
                self._fail(job, KvTransferFailedError(f"the peer {name} is gone", phase="transfer"))

        await self._call(forget)

    def move(self, direction: Direction, peer: str, local: BlockIds, remote: BlockIds, *, deadline: float) -> Move:
        """Start moving blocks as KvTransfer.post says; `deadline` is of time.monotonic().

        The result fails with KvTransferFailedError, also once the deadline has passed: it is the transfer's, and
        another way to the KV may still be in time. The request's own deadlines are watched elsewhere.
        """
        loop = self._running_loop()
        move = Move(loop, self._give_up)
        if len(local) == len(remote) == 0:
            move.result.set_result(Moved(num_bytes=0, seconds=0.0))
            move.settled.set_result(None)
            return move
        job = _Job(
            move=move,
            direction=direction,
            peer=peer,
            local=local,
            remote=remote,
            deadline=deadline,
            started_at=time.monotonic(),
        )
        self._commands.put(lambda: self._begin(job))
        return move

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._thread is None:
            raise RuntimeError("the mover isn't running")
        return self._loop

    def _give_up(self, move: Move) -> None:
        _resolve(move.result, AbortedError("the transfer was given up", phase="transfer"))

        def stop_posting() -> None:
            job = self._jobs.get(move)
            if job is not None:
                self._fail(job, AbortedError("the transfer was given up", phase="transfer"))

        if self._thread is not None:
            self._commands.put(stop_posting)

    async def _call(self, function: Callable[[], T]) -> T:
        """Return what `function` returns on the transfer thread, or raise what it raises."""
        loop = self._running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                value = function()
            except Exception as error:
                self._tell(answer, error)
            else:
                self._tell(answer, value)

        self._commands.put(run)
        return await answer

    # ---- the transfer thread ----

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as cause:
            error = EngineError(f"the KV transfer thread died: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            self._tell(self._ended, error)
        else:
            self._tell(self._ended, None)

    def _serve(self) -> None:
        gap_s = MIN_POLL_GAP_S
        while True:
            command = self._next_command(gap_s)
            if command is _STOP:
                self._transfer.close()
                return
            if callable(command):
                command()
            progressed = self._poll_all() or command is not None
            gap_s = MIN_POLL_GAP_S if progressed else min(gap_s * 2, self._max_gap_s())

    def _next_command(self, gap_s: float) -> Callable[[], None] | object | None:
        """Return the next command, _STOP, or None when it is time to poll. Sleeps without end when nothing is due."""
        is_idle = not self._jobs and not self._warm_ups
        try:
            command = self._commands.get(timeout=None if is_idle else gap_s)
        except queue.Empty:
            return None
        return _STOP if command is None else command

    def _max_gap_s(self) -> float:
        return STUCK_POLL_GAP_S if all(job.has_result for job in self._jobs.values()) else MAX_POLL_GAP_S

    def _begin(self, job: _Job) -> None:
        if job.move.result.done():  # given up before it began
            self._tell(job.move.settled, None)
            return
        self._jobs[job.move] = job
        self._post_next(job)

    def _post_next(self, job: _Job) -> None:
        """Post the next piece: a move is cut so that its deadline and the other moves get their turn."""
        end = job.next_block + max(1, PIECE_BYTES // self._block_bytes)
        piece = slice(job.next_block, min(end, len(job.local)))
        try:
            job.handle = self._transfer.post(job.direction, job.peer, job.local[piece], job.remote[piece])
        except Exception as error:
            self._fail(job, error)
            self._settle(job)
            return
        job.next_block = piece.stop

    def _poll_all(self) -> bool:
        """Poll everything once; return whether anything ended or went on to its next piece."""
        for handle in list(self._warm_ups):
            self._poll_warm_up(handle)
        progressed = [self._poll_job(job) for job in list(self._jobs.values())]
        return any(progressed)

    def _poll_job(self, job: _Job) -> bool:
        if job.handle is None:
            return False
        try:
            is_done = self._transfer.poll(job.handle)
        except Exception as error:
            self._fail(job, error)
            self._settle(job)
            return True
        if is_done:
            self._end_piece(job)
        elif not job.has_result and time.monotonic() >= job.deadline:
            self._fail(job, _too_long())
        elif job.settle_at is not None and time.monotonic() >= job.settle_at:
            self._settle(job)
        return is_done

    def _end_piece(self, job: _Job) -> None:
        """What has arrived counts, also when its deadline is passing just now."""
        if job.has_result:
            self._settle(job)
        elif job.next_block < len(job.local):
            if time.monotonic() >= job.deadline:
                self._fail(job, _too_long())
                self._settle(job)
            else:
                self._post_next(job)
        else:
            job.has_result = True
            seconds = time.monotonic() - job.started_at
            self._tell(job.move.result, Moved(num_bytes=len(job.local) * self._block_bytes, seconds=seconds))
            self._settle(job)

    def _poll_warm_up(self, handle: TransferHandle) -> None:
        try:
            is_over = self._transfer.poll(handle)
        except KvTransferError as error:
            _log.debug("a warm-up failed: %s", error)
            is_over = True
        if is_over:
            self._warm_ups.discard(handle)

    def _fail(self, job: _Job, error: Exception) -> None:
        if not job.has_result:
            job.has_result = True
            self._tell(job.move.result, error)

    def _settle(self, job: _Job) -> None:
        del self._jobs[job.move]
        self._tell(job.move.settled, None)

    def _tell(self, future: "asyncio.Future[T]", value: T | Exception) -> None:
        """Resolve a future of the event loop's."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        loop.call_soon_threadsafe(_resolve, future, value)


_STOP = object()


def _too_long() -> KvTransferFailedError:
    return KvTransferFailedError("the KV transfer took too long", phase="transfer")


def _resolve(future: "asyncio.Future[T]", value: T | Exception) -> None:
    if future.done():
        return
    if isinstance(value, Exception):
        future.set_exception(value)
        future.exception()  # retrieved: a result nobody waits for any more is no error of its own
    else:
        future.set_result(value)
