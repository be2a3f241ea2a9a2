"""vLLM's engine core on a thread of its own: commands in, one report a step out. Knows nothing of attempts.

The core is stepped as long as it has anything to do. That includes finished requests whose blocks wait for a peer:
vLLM looks at its transfers' completions, heartbeats and leases only within a step.
"""

import queue
import threading
from collections.abc import Callable

from schemas.errors import EngineError
from services.engines.adapter.lifetime import Lifetime
from services.engines.vllm.launch import start_core
from services.engines.vllm.own_metrics import OwnMetrics
from services.engines.vllm.prefix_cache import PrefixCacheView
from services.engines.vllm.stepper import Stepper
from services.engines.vllm.warm_up import warm_up
from services.engines.vllm.words import CoreRequest, CoreSpec, LaunchOptions, StepReport

MIN_IDLE_S, MAX_IDLE_S = 0.001, 0.008  # between steps that only look at transfers: each costs a millisecond or two
STOP_S = 5.0

Command = Callable[[Stepper], None]
OnStep = Callable[[StepReport], None]


class CoreThread:
    """Owns an EngineCore. Methods are called on the event loop's thread and return at once."""

    def __init__(self, options: LaunchOptions) -> None:
        self.progress = 0
        self._options = options
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._idle_s = MIN_IDLE_S
        self._is_stopping = False
        self._life: Lifetime[CoreSpec] | None = None

    async def start(self, on_step: OnStep) -> CoreSpec:
        """Start the thread and return once the model is warm. `on_step` gets each step's report on this loop."""
        life = self._life = Lifetime[CoreSpec]("vLLM")

        def deliver(report: StepReport) -> None:
            life.tell(on_step, report)

        def run() -> None:
            try:
                core, config, found = start_core(self._options)
                stepper = Stepper(core, PrefixCacheView(core, found.block_size), OwnMetrics(config))
                warm_up(stepper, found)
                life.tell(life.begin, found)
                self._serve(stepper, deliver)
            except BaseException as error:
                life.tell(life.end, error)
            else:
                stepper.shutdown()
                life.tell(life.end)

        threading.Thread(target=run, name="vllm-core", daemon=True).start()
        return await life.until_begun()

    async def join(self) -> None:
        """Return when the thread has ended; raises what ended it."""
        assert self._life is not None
        try:
            await self._life.until_ended()
        except Exception as error:
            raise EngineError(f"vLLM's engine core died: {type(error).__name__}: {error}") from error

    async def stop(self) -> None:
        """End the thread after the step under way; waits for it, but not for ever."""
        self._is_stopping = True
        self._commands.put(lambda stepper: None)
        if self._life is not None:
            await self._life.ended_within(STOP_S)

    def submit(self, request: CoreRequest) -> None:
        """Begin a request; if the core refuses it, that is its output."""
        self._commands.put(lambda stepper: stepper.submit(request))

    def abort(self, core_id: str) -> None:
        """End a request, in whatever state; no output follows. A peer's blocks it has not fetched are given back."""
        self._commands.put(lambda stepper: stepper.abort(core_id))

    def release(self, core_id: str) -> None:
        """Free the blocks that a finished request keeps for a peer, now."""
        self._commands.put(lambda stepper: stepper.release(core_id))

    def proven(self, core_id: str) -> None:
        """The KV that this request fetched was good."""
        self._commands.put(lambda stepper: stepper.proven(core_id))

    def disown(self, core_id: str) -> None:
        """The KV that this request fetched may be another's: end it, drop the KV from the prefix cache, and report
        every request that shares it as `poisoned`."""
        self._commands.put(lambda stepper: stepper.disown(core_id))

    def _serve(self, stepper: Stepper, deliver: OnStep) -> None:
        while True:
            self._obey(stepper)
            if self._is_stopping:
                return
            if stepper.has_work():
                report = stepper.step()
                self.progress += 1
                self._idle_s = MIN_IDLE_S if report is not None else min(2 * self._idle_s, MAX_IDLE_S)
                if report is not None:
                    deliver(report)

    def _obey(self, stepper: Stepper) -> None:
        """Carry out what was ordered; wait for an order while there is nothing to step, or only transfers to see."""
        command = self._next_command(stepper)
        while command is not None:
            command(stepper)
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return

    def _next_command(self, stepper: Stepper) -> Command | None:
        try:
            if not stepper.has_work():
                return self._commands.get()
            if stepper.is_computing():
                return self._commands.get_nowait()
            return self._commands.get(timeout=self._idle_s)
        except queue.Empty:
            return None
