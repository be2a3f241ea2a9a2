"""A worker's time in one role: where it takes legs, and how that ends. Its engine and its attempts know no roles."""

import asyncio
import logging

import msgspec

from bus.connection import Bus
from bus.discovery import Registration
from bus.serving import Serving
from schemas.errors import WorkerLostError
from schemas.hop import DecodeRequest, PrefillRequest
from schemas.worker import Role, RuntimeConfig
from services.worker.legs import LegDesk
from services.worker.outlet import Outlet

logger = logging.getLogger(__name__)

POLL_S = 0.02


class Tenure:
    """`open`, then `end`, then `close`: a new role is another tenure of the same desk."""

    def __init__(self, bus: Bus, desk: LegDesk, outlet: Outlet, me: RuntimeConfig) -> None:
        self.me = me
        self._bus = bus
        self._desk = desk
        self._outlet = outlet
        self._own: list[Serving] = []
        self._groups: list[Serving] = []

    async def open(self) -> None:
        """Take legs of this role: the worker's own, and its queue group's."""
        bus, subjects, desk, me = self._bus, self._bus.subjects, self._desk, self.me
        desk.is_draining = False
        if me.role == "prefill":
            own, group = subjects.worker(me.worker_id, "prefill"), subjects.prefill(me.model, me.compat)
            self._own.append(await bus.serve(own, PrefillRequest, desk.on_prefill))
            self._groups.append(await bus.serve(group, PrefillRequest, desk.on_prefill, queue="prefill"))
        else:
            own, group = subjects.worker(me.worker_id, "decode"), subjects.decode(me.model, me.compat)
            self._own.append(await bus.serve(own, DecodeRequest, desk.on_decode))
            self._groups.append(await bus.serve(group, DecodeRequest, desk.on_decode, queue="decode"))

    async def end(self, registration: Registration, limit_s: float, *, unless: asyncio.Event | None = None) -> bool:
        """Take no new work and let what is held end and be fetched; what hasn't by then is handed on as lost, to go
        on elsewhere. Return False, with things still held, when `unless` is set meanwhile."""
        self._desk.is_draining = True
        await registration.update(msgspec.structs.replace(self.me, state="draining"))
        for group in self._groups:
            await group.stop()
        try:
            async with asyncio.timeout(limit_s):
                while not self._desk.is_idle:
                    if unless is not None and unless.is_set():
                        return False
                    await asyncio.sleep(POLL_S)  # leases end in the engine, which has no event for it
        except TimeoutError:
            logger.warning("%d attempts handed on unfinished after %.1f s", len(self._desk.ledger), limit_s)
            self._desk.drop_all(WorkerLostError(f"worker {self.me.worker_id} had to stop serving as {self.me.role}"))
        await self._outlet.flush()
        return True

    def in_role(self, role: Role) -> "Tenure":
        """Return the tenure that follows this one."""
        return Tenure(self._bus, self._desk, self._outlet, msgspec.structs.replace(self.me, role=role))

    async def close(self) -> None:
        """Hear no more of this role."""
        for serving in (*self._groups, *self._own):
            await serving.stop()
