"""The NATS micro protocol, so that `nats micro ls` shows the fleet and `nats micro stats` its calls (ADR-32).

nats-py has an implementation; it counts only endpoints it subscribes itself, echoes request headers in its answers,
and flushes (bus.subscriptions says why we never do).
"""

import datetime
import re
from typing import TYPE_CHECKING

import orjson

from bus.serving import Call, Serving

if TYPE_CHECKING:
    from bus.connection import Bus

_PREFIX = "$SRV"
_VERSION = re.compile(r"\d+\.\d+\.\d+([-+].*)?")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


class MicroService:
    """What one process answers to PING, INFO and STATS."""

    def __init__(self, bus: "Bus", service: str, version: str, metadata: dict[str, str]) -> None:
        if not _VERSION.fullmatch(version):
            raise ValueError(f"the micro protocol wants a semantic version: {version!r}")
        self._bus = bus
        self._started = datetime.datetime.now(datetime.UTC)
        self._identity = {
            "name": f"busway-{service}",
            "id": _UNSAFE.sub("_", bus.client_id),
            "version": version,
            "metadata": metadata,
        }

    async def start(self) -> None:
        """Answer until the bus closes."""
        name, id = self._identity["name"], self._identity["id"]
        for verb, answer in (("PING", self._ping), ("INFO", self._info), ("STATS", self._stats)):
            for subject in (f"{_PREFIX}.{verb}", f"{_PREFIX}.{verb}.{name}", f"{_PREFIX}.{verb}.{name}.{id}"):
                await self._bus.serve(subject, bytes, answer)

    async def _ping(self, payload: bytes, call: Call) -> bytes:
        return self._answer("ping", {})

    async def _info(self, payload: bytes, call: Call) -> bytes:
        return self._answer("info", {"description": "", "endpoints": [_endpoint(one) for one in self._endpoints()]})

    async def _stats(self, payload: bytes, call: Call) -> bytes:
        endpoints = [_endpoint(one) | _counters(one) for one in self._endpoints()]
        return self._answer("stats", {"started": self._started.isoformat(), "endpoints": endpoints})

    def _answer(self, kind: str, more: dict[str, object]) -> bytes:
        return orjson.dumps({"type": f"io.nats.micro.v1.{kind}_response", **self._identity, **more})

    def _endpoints(self) -> list[Serving]:
        return [one for one in self._bus.servings if one.subject.startswith(self._bus.subjects.prefix)]


def _endpoint(serving: Serving) -> dict[str, object]:
    name = _UNSAFE.sub("_", serving.subject)
    return {"name": name, "subject": serving.subject, "queue_group": serving.queue, "metadata": {}}


def _counters(serving: Serving) -> dict[str, object]:
    return {
        "num_requests": serving.num_calls,
        "num_errors": serving.num_errors,
        "last_error": "",
        "processing_time": serving.busy_ns,
        "average_processing_time": serving.busy_ns // max(1, serving.num_calls),
    }
