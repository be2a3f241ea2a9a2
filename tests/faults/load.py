"""Clients that never pause: a steady load of requests whose every answer is kept and judged."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

from tests.conftest import wait_until
from tests.faults.asking import Answer, Via
from tests.faults.stack import Stack

MORE_TIMEOUT_S = 60.0


class Load:
    """Made by `steady_load`; `answers` are those that are over, `problems` what is wrong with some of them.

    `num_asked_again` counts answers that a client may ask again for: see `has_to_ask_again`.
    """

    def __init__(self, stack: Stack, seed: int, *, gateways_die: bool) -> None:
        self.answers: list[Answer] = []
        self.problems: list[str] = []
        self.is_over = False
        self.num_asked_again = 0
        self._gateways_die = gateways_die
        self._stack = stack
        self._rng = random.Random(seed)

    async def more(self, number: int, timeout_s: float = MORE_TIMEOUT_S) -> None:
        """Wait until so many further requests have ended."""
        wanted = len(self.answers) + number
        await wait_until(lambda: len(self.answers) >= wanted, timeout_s, lambda: f"no answers come: {self.problems}")

    def check_all_whole(self) -> None:
        assert self.answers
        assert not self.problems, self.problems

    async def client(self, via: Via) -> None:
        """Ask one request after the other."""
        rng, stack = self._rng, self._stack
        while not self.is_over:
            prompt, max_tokens = (
                stack.prompt(rng.choice((1, 15, 16, 17, 50, 200))),
                rng.choice((1, 2, 20, 60, 150, 300)),
            )
            while True:
                answer = stack.ask(
                    prompt, max_tokens, via=via, gateway=stack.some_gateway(rng), seed=rng.getrandbits(30)
                )
                await answer.over(timeout_s=MORE_TIMEOUT_S)
                answer.check_right_so_far()
                if not has_to_ask_again(answer, gateways_die=self._gateways_die):
                    break
                self.num_asked_again += 1
                await asyncio.sleep(0.05)
            self.answers.append(answer)
            try:
                answer.check_whole()
            except AssertionError as problem:
                self.problems.append(f"{answer}: {problem}")


def has_to_ask_again(answer: Answer, *, gateways_die: bool) -> bool:
    """Return whether it is for the client to ask again, as any client does: it was told to try later before anything
    of the answer had come, or its gateway closed the door. Where `gateways_die`, an answer ends with its gateway."""
    if answer.via == "http" and answer.error == "connection_lost":
        return gateways_die or not answer.has_begun
    if gateways_die:
        return answer.status in (429, 503) and not answer.has_begun
    return answer.via == "http" and answer.status == 503 and not answer.has_begun


@contextlib.asynccontextmanager
async def steady_load(
    stack: Stack, *, num_clients: int, seed: int = 1, gateways_die: bool = False
) -> AsyncIterator[Load]:
    """Run clients, by HTTP and by the bus in turn, for the length of the block; then their last requests end."""
    load = Load(stack, seed, gateways_die=gateways_die)
    async with asyncio.TaskGroup() as clients:
        for number in range(num_clients):
            clients.create_task(load.client("bus" if number % 2 else "http"))
        try:
            yield load
        finally:
            load.is_over = True
