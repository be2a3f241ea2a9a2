"""Many requests of all kinds at once, too many, and nobody left to serve them."""

import asyncio
import random
from collections import Counter

import pytest

from bus.server import NatsServer
from schemas.errors import BuswayError, CapacityError, RequestError, UnavailableError
from schemas.frames import Prefilling, Tokens
from schemas.request import StopConditions
from services.config import HandoffMode, PolicyName
from tests.flow.stack import Stack, stack

HANDOFFS: list[HandoffMode] = ["pull", "rendezvous"]


def everything_of(here: Stack) -> tuple[int, int]:
    """Tasks of this process, and subscriptions of all its connections."""
    return len(asyncio.all_tasks()), sum(len(bus._nats._subs) for bus in here.buses)


async def mixed(here: Stack, number: int, gate: asyncio.Semaphore) -> str:
    rng = random.Random(number)
    prompt = [rng.randrange(3, 300) for _ in range(rng.choice([1, 15, 16, 17, 40, 200]))]
    async with gate:
        match number % 8:
            case 0:  # leaves while prefill has it
                await here.generate(prompt, 50, on_frame=lambda frame: isinstance(frame, Prefilling))
                return "left"
            case 1:  # leaves in mid-stream
                await here.generate(prompt, 50, on_frame=lambda frame: isinstance(frame, Tokens))
                return "left"
            case 2:
                try:
                    await here.generate([1] * 40_000, 4)
                except RequestError:
                    return "refused"
                return "accepted a prompt that is too long"
            case 3:
                outcome = await here.generate(prompt, 1)
            case _:
                outcome = await here.generate(prompt, rng.choice([2, 3, 20]), temperature=rng.choice([0.0, 1.0]))
        assert outcome.finished.usage.completion_tokens == len(outcome.ids)
        return "finished"


@pytest.mark.parametrize("handoff", HANDOFFS)
@pytest.mark.parametrize("policy", ["least_loaded", "queue"])
async def test_200_mixed_requests_leave_nothing_behind(
    server: NatsServer, handoff: HandoffMode, policy: PolicyName
) -> None:
    args = {"eos_one_in": "50", "decode_ms_per_step": "1"}
    async with stack(server, "p1", "p2", "d1", "d2", handoff=handoff, policy=policy, engine_args=args) as here:
        await here.generate([5, 6, 7], 3)
        await here.all_free()
        before = everything_of(here)
        gate = asyncio.Semaphore(32)
        async with asyncio.TaskGroup() as clients:
            tasks = [clients.create_task(mixed(here, number, gate)) for number in range(200)]
        assert Counter(task.result() for task in tasks) == {"left": 50, "refused": 25, "finished": 125}
        await here.all_free()
        assert here.client.num_in_flight == 0
        await here.until(lambda: all(now <= then for now, then in zip(everything_of(here), before, strict=True)))


async def test_eight_long_prompts_at_once_give_four_prefill_workers_two_each(server: NatsServer) -> None:
    args = {"prefill_ms_per_token": "0.2"}
    async with stack(server, "p1", "p2", "p3", "p4", "d1", engine_args=args) as here:
        async with asyncio.TaskGroup() as clients:
            tasks = [clients.create_task(here.generate([number + 3] * 1000, 2)) for number in range(8)]
        assert Counter(task.result().prefilled_by for task in tasks) == dict.fromkeys(("p1", "p2", "p3", "p4"), 2)


async def test_short_prompts_sent_with_a_long_one_go_to_the_other_worker(server: NatsServer) -> None:
    """In the same breath: no report could have told of the long one yet."""
    async with stack(server, "p1", "p2", "d1", engine_args={"prefill_ms_per_token": "0.2"}) as here:
        async with asyncio.TaskGroup() as clients:
            long = clients.create_task(here.generate([7] * 3000, 2))
            short = [clients.create_task(here.generate([number + 10] * 50, 2)) for number in range(4)]
        (other,) = {"p1", "p2"} - {long.result().prefilled_by}
        assert {task.result().prefilled_by for task in short} == {other}


@pytest.mark.parametrize("workers", [("b1",), ("p1", "d1")])
@pytest.mark.parametrize("policy", ["least_loaded", "queue"])
async def test_more_than_fits_is_429_at_once_and_what_was_taken_ends_well(
    server: NatsServer, workers: tuple[str, ...], policy: PolicyName
) -> None:
    args = {"max_num_seqs": "2", "prefill_ms_per_token": "2", "decode_ms_per_step": "5"}

    async def one(number: int) -> str:
        try:
            return (await here.generate([number + 3] * 50, 10)).finished.reason
        except CapacityError as error:
            return f"{error.http_status}, try again in {error.retry_after_s:g} s"

    async with stack(server, *workers, policy=policy, engine_args=args, max_waiting=2) as here:
        async with asyncio.TaskGroup() as clients:
            tasks = [clients.create_task(one(number)) for number in range(12)]
        outcomes = Counter(task.result() for task in tasks)
        assert outcomes["429, try again in 1 s"] >= 6
        assert outcomes["length"] >= 2
        assert outcomes["429, try again in 1 s"] + outcomes["length"] == 12
        await here.all_free()
        assert (await here.generate([5, 6], 2)).finished.reason == "length"


async def test_strict_without_prefill_is_a_clear_503(server: NatsServer) -> None:
    async with stack(server, "d1", is_strict=True) as here:
        with pytest.raises(UnavailableError, match="only decode") as caught:
            await here.generate([5, 6, 7], 3)
        assert caught.value.http_status == 503


async def test_a_prompt_that_cant_fit_is_a_400_with_the_numbers_on_either_leg(server: NatsServer) -> None:
    args = {"num_blocks": "4", "block_size": "16"}
    async with stack(server, "p1", "d1", engine_args=args) as here:
        for prompt, max_tokens in (([7] * 100, 4), ([7] * 40, 200)):
            with pytest.raises(BuswayError) as caught:
                await here.generate(prompt, max_tokens)
            assert caught.value.http_status == 400, caught.value
            await here.all_free()


async def test_sampled_text_is_the_same_however_it_is_served(server: NatsServer) -> None:
    async with stack(server, "b1") as alone, stack(server, "p1", "d1") as here:
        stop = StopConditions(max_tokens=20)
        expected = (await alone.generate([5, 6, 7], stop=stop, temperature=1.0)).ids
        assert (await here.generate([5, 6, 7], stop=stop, temperature=1.0)).ids == expected
