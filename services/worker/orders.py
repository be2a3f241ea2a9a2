"""What a worker was told to do with itself: leave the fleet, or serve in another role."""

import asyncio
from typing import Any, NamedTuple

from bus.scope import open_scope
from schemas.errors import CapacityError, UnavailableError
from schemas.worker import Role
from services.engines.protocol import EngineProfile


class RoleOrder(NamedTuple):
    """A role to change to; `done` is settled when the worker serves in it, or won't."""

    role: Role
    grace_s: float | None
    done: "asyncio.Future[None]"


class Orders:
    """Leaving outweighs everything else; the first to ask for it sets the grace."""

    def __init__(self) -> None:
        self.leave_asked = asyncio.Event()
        self.has_left = asyncio.Event()
        self.grace_s: float | None = None
        self._role_order: RoleOrder | None = None
        self._has_news = asyncio.Event()

    def leave(self, grace_s: float | None) -> None:
        if not self.leave_asked.is_set():
            self.grace_s = grace_s
            self.leave_asked.set()
            self._has_news.set()

    async def change_role(self, role: Role, grace_s: float | None) -> None:
        """Return when the worker serves in this role. Raises UnavailableError when it leaves, CapacityError while
        another change is under way."""
        if self.leave_asked.is_set():
            raise UnavailableError("the worker is leaving")
        if self._role_order is not None:
            raise CapacityError(f"the worker is changing to {self._role_order.role}", retry_after_s=1.0)
        self._role_order = RoleOrder(role, grace_s, asyncio.get_running_loop().create_future())
        self._has_news.set()
        try:
            await self._role_order.done
        finally:
            self._role_order = None

    async def next(self) -> RoleOrder | None:
        """Wait for an order; None is to leave."""
        while not self.leave_asked.is_set():
            order = self._role_order
            if order is not None and not order.done.done():
                return order
            self._has_news.clear()
            await self._has_news.wait()
        return None

    async def unless_told_to_leave(self, profile: "asyncio.Future[EngineProfile]") -> bool:
        """Wait for the engine; return False when the worker has to leave before it is ready."""
        async with open_scope() as scope:
            either: list[asyncio.Future[Any]] = [profile, scope.spawn(_wait(self.leave_asked), "leave asked")]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return profile.done()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
