"""2P2D, two routers and two gateways under steady load, while something is killed, stopped, drained, given another
role or restarted every few seconds: no request is lost, none is wrong, and at the end nothing is left.

`python -m tests.faults.chaos --seconds 180 --seed 7 --handoff pull`. The seed chooses what happens to whom and when;
how requests and incidents meet is the machine's doing.
"""

import argparse
import asyncio
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from deploy.draining import change_role
from deploy.errors import CommandError
from schemas.ids import WorkerId
from services.config import HandoffMode
from tests.faults.load import Load, steady_load
from tests.faults.stack import Stack, run_stack

EVERYBODY = ("g0", "g1", "r0", "r1", "p1", "p2", "d1", "d2")
NUM_CLIENTS = 10
PAUSE_S = (0.3, 2.0)
DOWN_S = (0.0, 1.5)
FROZEN_S = (0.3, 4.0)
TUNING = {"decode_ms_per_step": 4, "num_blocks": 512}


class Report(msgspec.Struct, kw_only=True):
    """What a run has seen. `problems`: requests that were lost or wrong, in words."""

    num_requests: int
    num_asked_again: int
    num_resubmits: int
    faults: dict[str, int]
    problems: list[str]
    seconds: float

    def __str__(self) -> str:
        faults = ", ".join(f"{number} {name}" for name, number in sorted(self.faults.items()))
        return (
            f"{self.num_requests} requests in {self.seconds:.0f} s, {self.num_resubmits} resubmits, "
            f"{self.num_asked_again} asked again by their clients; {sum(self.faults.values())} faults: {faults}; "
            f"{len(self.problems)} lost or wrong"
        )


class Chaos:
    """Makes one thing after the other happen to a stack. Each is over, and everybody back, before the next."""

    def __init__(self, stack: Stack, rng: random.Random) -> None:
        self.faults: Counter[str] = Counter()
        self._stack = stack
        self._rng = rng
        self._incidents: list[tuple[str, int, Callable[[], Awaitable[None]]]] = [
            ("killed", 4, self._kill),
            ("stopped and woken", 3, self._freeze),
            ("drained", 3, self._drain),
            ("two killed at once", 1, self._kill_two),
            ("role changed there and back", 1, self._change_roles),
            ("nats-server restarted", 1, self._restart_nats),
        ]

    async def go_on(self, until: float) -> None:
        """Let things happen until a moment of time.monotonic()."""
        names, weights, deeds = zip(*self._incidents, strict=True)
        while time.monotonic() < until:
            await asyncio.sleep(self._rng.uniform(*PAUSE_S))
            (index,) = self._rng.choices(range(len(names)), weights)
            self.faults[names[index]] += 1
            await deeds[index]()
            for name in EVERYBODY:
                await self._stack.until_live(name)

    async def _kill(self) -> None:
        await self._kill_some(1)

    async def _kill_two(self) -> None:
        await self._kill_some(2)

    async def _kill_some(self, number: int) -> None:
        names = self._rng.sample(EVERYBODY, number)
        for name in names:
            self._stack[name].kill()
        await asyncio.sleep(self._rng.uniform(*DOWN_S))
        for name in names:
            self._stack[name].start()

    async def _freeze(self) -> None:
        async with self._stack[self._rng.choice(EVERYBODY)].frozen():
            await asyncio.sleep(self._rng.uniform(*FROZEN_S))

    async def _drain(self) -> None:
        name = self._rng.choice(EVERYBODY)
        self._stack[name].signal(signal.SIGTERM)
        code = await self._stack[name].ended()
        assert code == 0, f"{name} left with {code}: {self._stack[name].log()}"
        self._stack[name].start()

    async def _change_roles(self) -> None:
        for role in ("prefill", "decode"):
            try:
                await change_role(self._stack.bus, WorkerId("d2"), role, grace_s=2.0)
            except CommandError as error:
                raise AssertionError(f"{error}: {self._stack['d2'].log()}") from error

    async def _restart_nats(self) -> None:
        await self._stack.server.stop()
        await asyncio.sleep(self._rng.uniform(*DOWN_S))
        await self._stack.server.start()


async def run_chaos(*, seconds: float, seed: int, handoff: HandoffMode) -> Report:
    """Run it; raises AssertionError when anything is left at the end, or somebody doesn't come back."""
    rng = random.Random(seed)
    async with run_stack(handoff) as stack:
        await stack.have(*EVERYBODY, **TUNING)
        assert not any("libtorch" in _libraries(stack[name].pid) for name in EVERYBODY)
        chaos, began = Chaos(stack, rng), time.monotonic()
        async with steady_load(stack, num_clients=NUM_CLIENTS, seed=seed, gateways_die=True) as load:
            await chaos.go_on(began + seconds)
        report = _report(chaos, load, time.monotonic() - began)
        try:
            await stack.settled(EVERYBODY)
        except AssertionError as left:
            report.problems.append(f"left behind: {left}")
        return report


def _libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def _report(chaos: Chaos, load: Load, seconds: float) -> Report:
    return Report(
        num_requests=len(load.answers),
        num_asked_again=load.num_asked_again,
        num_resubmits=sum(answer.num_resubmits for answer in load.answers),
        faults=dict(chaos.faults),
        problems=load.problems,
        seconds=seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--handoff", choices=["pull", "rendezvous"], default="pull")
    options = parser.parse_args()
    report = asyncio.run(run_chaos(seconds=options.seconds, seed=options.seed, handoff=options.handoff))
    print(report)
    for problem in report.problems:
        print(problem)
    sys.exit(bool(report.problems))


if __name__ == "__main__":
    main()
