"""Policy kv with real workers: shared prefixes are computed once, and a router that comes later knows of them."""

import random
import time

from bus.server import NatsServer
from schemas.ids import WorkerId
from services.config import PolicyName
from tests.flow.stack import Stack, stack

NUM_PREFIXES, PREFIX_TOKENS, NUM_ROUNDS = 6, 320, 5
ARGS = {"num_blocks": "512", "prefill_ms_per_token": "0.02"}


def prompts(seed: int) -> list[list[int]]:
    """Return prompts that share their beginnings, each with an end of its own, in random order."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(100, 200) for _ in range(PREFIX_TOKENS)] for _ in range(NUM_PREFIXES)]
    found = [[*prefix, 200 + n, 201 + n, 202 + n] for n in range(NUM_ROUNDS) for prefix in prefixes]
    rng.shuffle(found)
    return found


async def computed_tokens(server: NatsServer, policy: PolicyName) -> int:
    """Return the prompt tokens that two prefill workers had to compute for the whole workload."""
    async with stack(server, "p0", "p1", "d0", "d1", policy=policy, engine_args=ARGS) as here:
        for prompt in prompts(3):
            outcome = await here.generate(prompt, max_tokens=3)
            assert outcome.finished.reason == "length"
        loads = [here[name].load() for name in ("p0", "p1")]
        return sum(load.num_prompt_tokens - load.num_cached_tokens for load in loads)


async def test_shared_prefixes_are_computed_once_not_once_a_worker(nats_server: NatsServer) -> None:
    ours, blind = [await computed_tokens(nats_server, policy) for policy in ("kv", "round_robin")]
    once = NUM_PREFIXES * PREFIX_TOKENS + NUM_PREFIXES * NUM_ROUNDS * 19
    assert ours <= 1.25 * once  # a worker whose heartbeat comes late on a busy machine is forgotten, and asked again
    assert blind > 1.25 * ours


def num_known(here: Stack) -> int:
    desk = here.routers["r0"].kv
    assert desk is not None
    return desk.num_blocks


def is_at_rest(here: Stack, worker: str) -> bool:
    """Whether the router knows that nothing is being computed there."""
    load = here.routers["r0"].book.load(WorkerId(worker), time.monotonic())
    return load.pass_tokens + load.queued_tokens == 0


async def same_tokens(here: Stack, prompt: list[int]) -> list[int]:
    return (await here.generate(prompt, max_tokens=6)).ids


async def test_routing_by_prefix_changes_no_text(nats_server: NatsServer) -> None:
    texts = []
    for policy in ("kv", "least_loaded"):
        async with stack(nats_server, "p0", "p1", "d0", policy=policy, engine_args=ARGS) as here:
            texts.append([await same_tokens(here, prompt) for prompt in prompts(5)[:8]])
    assert texts[0] == texts[1]


async def test_rendezvous_and_aggregated_workers_are_routed_by_prefix_too(nats_server: NatsServer) -> None:
    async with stack(nats_server, "p0", "p1", "d0", policy="kv", handoff="rendezvous", engine_args=ARGS) as here:
        for prompt in prompts(7)[:10]:
            assert (await here.generate(prompt, max_tokens=3)).finished.reason == "length"
        cached = sum(here[name].load().num_cached_tokens for name in ("p0", "p1"))
        assert cached > 0
    async with stack(nats_server, "b0", "b1", policy="kv", engine_args=ARGS) as here:
        for number in range(4):
            prompt, known = [number + 5] * 800, num_known(here)  # worth more than a tie
            first = (await here.generate(prompt, max_tokens=3)).decoded_by
            await here.until(lambda known=known, first=first: num_known(here) > known and is_at_rest(here, first))
            assert (await here.generate(prompt, max_tokens=3)).decoded_by == first
