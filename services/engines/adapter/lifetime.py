"""The life of an engine's own thread, as the event loop waits for it: it begins with what the engine is, and ends."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar, TypeVarTuple

from schemas.errors import EngineError

S = TypeVar("S")
Arguments = TypeVarTuple("Arguments")


class Lifetime(Generic[S]):
    """One thread's life, as the event loop that makes this sees it; the thread changes it through `tell`.

    `S` is what a started engine says of itself.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[S] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()

    def tell(self, function: Callable[[*Arguments], object], *arguments: *Arguments) -> None:
        """Call a function on the event loop; from any thread. When the loop has ended, nobody is left to be told."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def begin(self, spec: S) -> None:
        """The engine serves."""
        if not self._begun.done():
            self._begun.set_result(spec)

    def end(self, error: BaseException | None = None) -> None:
        """The engine has ended, of `error` if there is one. The first word counts."""
        if error is None:
            if not self._ended.done():
                self._ended.set_result(None)
            return
        if not isinstance(error, Exception):
            error = EngineError(f"{self._engine} ended with {type(error).__name__}: {error}")
        for future in (self._begun, self._ended):
            if not future.done():
                future.set_exception(error)

    async def until_begun(self) -> S:
        """Return what the engine says of itself once it serves; raises what kept it from that."""
        return await self._begun

    async def until_ended(self) -> None:
        """Return when the thread has ended; raises what ended it."""
        await asyncio.shield(self._ended)

    async def ended_within(self, seconds: float) -> None:
        """Wait for the end, but no longer; raises nothing: whoever waited for the other two has heard it."""
        done, _ = await asyncio.wait([self._ended], timeout=seconds)
        for ended in done:
            ended.exception()
