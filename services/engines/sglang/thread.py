"""sglang.Engine on a thread of ours with an event loop of its own: submissions in, batches of outputs out.

SGLang's TokenizerManager lives there, off busway's loop and off the main thread, where it would take SIGTERM for itself
(its own drain has no deadline). Knows nothing of attempts.
"""

import asyncio
import contextlib
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

from schemas.errors import EngineError
from schemas.kv_events import KvChange
from services.engines.adapter.lifetime import Lifetime
from services.engines.sglang.kv_events import KvEventBook
from services.engines.sglang.launch import start_engine
from services.engines.sglang.translate import Translator, arguments_of
from services.engines.sglang.words import EngineSpec, Gauges, LaunchOptions, Output, Submission

BUSY_LOOK_S, IDLE_LOOK_S = 0.01, 0.25
STOP_S = 20.0
CHILD_SIGNALS = {signal.SIGINT, signal.SIGTERM}

OnOutputs = Callable[[Sequence[Output]], None]
OnGauges = Callable[[Gauges], None]
OnCache = Callable[[tuple[KvChange, ...], int], None]


class EngineThread:
    """Owns an Engine. Methods are called on busway's loop and return at once, callbacks come on it."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._folder = ""
        self._life: Lifetime[EngineSpec] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event
        self._begun: asyncio.Event
        self._engine: Any = None
        self._tasks: asyncio.TaskGroup
        self._num_live = 0
        self._pending: list[Output] = []
        self._on_outputs: OnOutputs

    async def start(self, on_outputs: OnOutputs, on_gauges: OnGauges, on_cache: OnCache) -> EngineSpec:
        """Start the thread and return once the model is loaded. Raises what keeps it from that."""
        life = self._life = Lifetime[EngineSpec]("SGLang")
        self._on_outputs = on_outputs
        self._folder = tempfile.mkdtemp(prefix="busway-sglang-")
        if threading.current_thread() is threading.main_thread():  # how SGLang's processes say that they failed
            asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, _child_failed, life)
        threading.Thread(target=self._run, args=(life, on_gauges, on_cache), name="sglang", daemon=True).start()
        return await life.until_begun()

    async def join(self) -> None:
        """Return when the engine has ended; raises what ended it."""
        assert self._life is not None
        await self._life.until_ended()

    async def stop(self) -> None:
        """End the engine and its processes; waits for it, but not for ever."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._stopping.set)
        if self._life is not None:
            await self._life.ended_within(STOP_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def submit(self, submission: Submission) -> None:
        """Begin a request; if SGLang refuses it, that is its output."""
        self._call(self._begin, submission)

    def abort(self, rid: str) -> None:
        """End a request, in whatever state; its last output follows all the same."""
        self._call(self._abort, rid)

    def _call(self, function: Callable[[Any], None], argument: object) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended: so have all requests
                self._loop.call_soon_threadsafe(function, argument)

    def _run(self, life: Lifetime[EngineSpec], on_gauges: OnGauges, on_cache: OnCache) -> None:
        # SGLang's processes inherit this mask: a Ctrl-C or a service manager's SIGTERM to the whole group is ours to
        # handle, in order. They end with us: by shutdown, or by the kernel when we are killed.
        signal.pthread_sigmask(signal.SIG_BLOCK, CHILD_SIGNALS)
        try:
            asyncio.run(self._live(life, on_gauges, on_cache))
        except BaseException as error:
            cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            life.tell(life.end, cause)
        else:
            life.tell(life.end)

    async def _live(self, life: Lifetime[EngineSpec], on_gauges: OnGauges, on_cache: OnCache) -> None:
        address = f"ipc://{self._folder}/kv-events"
        self._loop = asyncio.get_running_loop()
        self._stopping, self._begun = asyncio.Event(), asyncio.Event()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                engine, spec = start_engine(self._options, address)
                self._engine = engine
                self._tasks.create_task(self._watch_load(on_gauges), name="load")
                if spec.has_kv_events:
                    self._tasks.create_task(self._watch_cache(address, spec, on_cache), name="kv events")
                life.tell(life.begin, spec)
                await self._stopping.wait()
                raise _Stopped
        except* _Stopped:
            pass
        finally:
            if self._engine is not None:
                self._engine.shutdown()

    def _begin(self, submission: Submission) -> None:
        if self._stopping.is_set():
            return
        self._num_live += 1
        self._begun.set()
        self._tasks.create_task(self._follow(submission), name=submission.rid)

    def _abort(self, rid: str) -> None:
        # SGLang ignores aborts of what isn't at its scheduler yet: what began in this turn is there in the next.
        asyncio.get_running_loop().call_soon(self._engine.tokenizer_manager.abort_request, rid)

    async def _follow(self, submission: Submission) -> None:
        """Follow a request to its end. Never given up before: SGLang's bookkeeping of it would stay behind."""
        translator = Translator(submission)
        try:
            stream = await self._engine.async_generate(**arguments_of(submission))
            async for chunk in stream:
                self._add(translator.output(chunk))
            self._add(translator.ended())
        except Exception as error:  # whatever SGLang has against one request is no reason to end the others
            self._add(translator.refused(error))
        finally:
            self._num_live -= 1

    def _add(self, output: Output | None) -> None:
        """Deliver outputs together, in this loop's next turn."""
        if output is None:
            return
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._deliver)
        self._pending.append(output)

    def _deliver(self) -> None:
        outputs, self._pending = self._pending, []
        self._tell(self._on_outputs, outputs)

    async def _watch_load(self, on_gauges: OnGauges) -> None:
        """Read the scheduler's own load reports from its shared memory."""
        reader, told, num_reports, stamp = self._engine.tokenizer_manager.load_snapshot_reader, Gauges(), 0, 0.0
        while True:
            (snapshot, *_) = reader.read_all() or [None]
            if snapshot is not None and snapshot.timestamp != stamp:
                stamp, num_reports = snapshot.timestamp, num_reports + 1
                told = Gauges(
                    num_used_tokens=snapshot.num_used_tokens,
                    num_computed_tokens=snapshot.total_prefill_uncached_tokens,
                    computing_us=snapshot.total_prefill_busy_us,
                    num_reports=num_reports,
                )
                self._tell(on_gauges, told)
            if self._num_live > 0 or told.num_used_tokens > 0:
                await asyncio.sleep(BUSY_LOOK_S)
            else:
                self._begun.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._begun.wait(), IDLE_LOOK_S)

    async def _watch_cache(self, address: str, spec: EngineSpec, on_cache: OnCache) -> None:
        """Pass on what the prefix cache gains and loses."""
        import zmq
        import zmq.asyncio

        book = KvEventBook(spec.page_size)
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.set_hwm(0)
            socket.subscribe(b"")
            socket.connect(address)
            while True:
                _, number, payload = await socket.recv_multipart()
                changes = book.take(int.from_bytes(number, "big"), payload)
                if changes:
                    self._tell(on_cache, changes, book.num_blocks)

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._life is not None:
            self._life.tell(function, *arguments)


class _Stopped(Exception):
    """The thread is to end; cancels what runs there."""


def _child_failed(life: Lifetime[EngineSpec]) -> None:
    """SIGQUIT: one of SGLang's processes has failed. Its log said why."""
    life.end(EngineError("one of SGLang's processes has failed"))
