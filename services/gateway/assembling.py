"""What becomes of the deltas: chunks as they come, or one document at the end. Step 6 of a request's walk."""

from collections.abc import Sequence
from typing import Protocol

from services.gateway.choice import ChoiceDelta
from services.gateway.rendering import Renderer, WholeChoice
from services.gateway.reply import Reply


class Assembly(Protocol):
    async def deliver(self, deltas: Sequence[ChoiceDelta]) -> None:
        """Take what one step adds."""
        ...

    async def close(self, usage: dict[str, object], busway: dict[str, object] | None) -> None:
        """End the answer as complete."""
        ...


class StreamedAnswer:
    """Chunks, one write per step. Nothing is sent before the first token, so that an error still has its status."""

    def __init__(self, renderer: Renderer, reply: Reply, *, has_usage: bool) -> None:
        self._renderer = renderer
        self._reply = reply
        self._has_usage = has_usage
        self._opened: set[int] = set()

    async def deliver(self, deltas: Sequence[ChoiceDelta]) -> None:
        chunks: list[bytes] = []
        for delta in deltas:
            if delta.index not in self._opened:
                self._opened.add(delta.index)
                chunks += self._renderer.first(delta.index)
            chunks += self._renderer.delta(delta)
        if chunks:
            await self._reply.chunks(chunks)

    async def close(self, usage: dict[str, object], busway: dict[str, object] | None) -> None:
        await self._reply.finish(self._renderer.last(usage if self._has_usage else None, busway))


class WholeAnswer:
    """One document; nothing is sent before the last choice has finished."""

    def __init__(self, renderer: Renderer, reply: Reply, *, num_choices: int) -> None:
        self._renderer = renderer
        self._reply = reply
        self._choices = [WholeChoice(index, "", []) for index in range(num_choices)]

    async def deliver(self, deltas: Sequence[ChoiceDelta]) -> None:
        for delta in deltas:
            self._choices[delta.index].add(delta)

    async def close(self, usage: dict[str, object], busway: dict[str, object] | None) -> None:
        await self._reply.document(self._renderer.document(self._choices, usage, busway))
