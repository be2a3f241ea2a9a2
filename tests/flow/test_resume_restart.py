"""nats-server goes away and comes back under a hundred streams: all go on, by what is sent again."""

import asyncio
import contextlib
from collections import Counter

from bus.server import NatsServer
from schemas.errors import BusError, CapacityError
from schemas.frames import Frame, Tokens
from tests.flow.stack import Outcome, Stack, stack

STEADY = {"decode_ms_per_step": "8", "prefill_ms_per_token": "0.05"}
NUM_STREAMS = 100
PROMPTS = [[number, 7] for number in range(3, 7)]


async def streams(here: Stack, clients: asyncio.TaskGroup, num: int, max_tokens: int) -> list[asyncio.Task[Outcome]]:
    """Start streams; return once each has more than five tokens."""
    num_frames: Counter[str] = Counter()

    def note(frame: Frame) -> bool:
        if isinstance(frame, Tokens):
            num_frames[frame.attempt_id] += 1
        return False

    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(num)]
    tasks = [
        clients.create_task(here.generate(prompt, max_tokens, temperature=1.0, on_frame=note)) for prompt in prompts
    ]
    await here.until(lambda: sum(seen > 5 for seen in num_frames.values()) == num, 30.0)
    return tasks


async def expected_ids(here: Stack, num: int, max_tokens: int) -> list[list[int]]:
    known = [(await here.generate(prompt, max_tokens, temperature=1.0)).ids for prompt in PROMPTS]
    return [known[number % len(PROMPTS)] for number in range(num)]


async def test_a_hundred_streams_survive_a_restart_of_nats_with_a_question_each() -> None:
    async with NatsServer() as own, stack(own, "p1", "d1", "d2", engine_args=STEADY) as here:
        expected = await expected_ids(here, NUM_STREAMS, 120)
        async with asyncio.TaskGroup() as clients:
            tasks = await streams(here, clients, NUM_STREAMS, 120)
            own.kill()
            await own.start()
        assert [task.result().ids for task in tasks] == expected
        # Where the machine is too busy to answer within a second, a stream may have moved; none did so again and again.
        assert max(task.result().finished.usage.num_resubmits for task in tasks) <= 1
        assert len(here.resends) <= 3 * NUM_STREAMS
        await here.all_free()


async def test_what_was_generated_while_nats_was_away_is_delivered_when_it_is_back() -> None:
    async with NatsServer() as own, stack(own, "p1", "d1", engine_args=STEADY) as here:
        expected = await expected_ids(here, 20, 100)
        async with asyncio.TaskGroup() as clients:
            tasks = await streams(here, clients, 20, 100)
            own.kill()
            await here.until(lambda: here["d1"].load().running == 0, 10.0)
            await own.start()
        assert [task.result().ids for task in tasks] == expected
        await here.all_free()


async def ids_as_clients_get_them(here: Stack, prompt: list[int]) -> list[int]:
    """A request that nobody has taken yet may be refused as any client's may: it comes again."""
    async with asyncio.timeout(30.0):
        while True:
            try:
                return (await here.generate(prompt, 30, temperature=1.0)).ids
            except (CapacityError, BusError):
                await asyncio.sleep(0.05)


async def test_requests_in_every_phase_survive_a_restart_of_nats() -> None:
    async with NatsServer() as own, stack(own, "p1", "p2", "d1", "d2", engine_args=STEADY) as here:
        expected = await expected_ids(here, 60, 30)
        async with asyncio.TaskGroup() as clients:
            tasks = []
            for number in range(60):
                if number == 20:
                    own.kill()
                if number == 40:
                    await own.start()
                prompt = PROMPTS[number % len(PROMPTS)]
                tasks.append(clients.create_task(ids_as_clients_get_them(here, prompt)))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await asyncio.wait(tasks, return_when=asyncio.ALL_COMPLETED)
        assert [task.result() for task in tasks] == expected
        await here.all_free()
