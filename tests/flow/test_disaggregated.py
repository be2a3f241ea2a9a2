"""Prefill here, decode there: the same ids as one worker alone, whatever the handoff, the policy, the length."""

import pytest

from bus.server import NatsServer
from schemas.request import StopConditions
from services.config import HandoffMode, PolicyName
from tests.flow.stack import stack

HANDOFFS: list[HandoffMode] = ["pull", "rendezvous"]
PROMPTS = [[7], list(range(3, 18)), list(range(3, 19)), list(range(3, 20)), list(range(5, 37)), list(range(3, 500))]


async def aggregated(server: NatsServer, max_tokens: int = 12) -> list[list[int]]:
    async with stack(server, "b1") as here:
        return [(await here.generate(prompt, max_tokens)).ids for prompt in PROMPTS]


@pytest.mark.parametrize("handoff", HANDOFFS)
async def test_1p1d_gives_the_ids_of_the_aggregated_run(server: NatsServer, handoff: HandoffMode) -> None:
    expected = await aggregated(server)
    async with stack(server, "p1", "d1", handoff=handoff) as here:
        for prompt, ids in zip(PROMPTS, expected, strict=True):
            for _ in range(2):  # the second time with a prefix cache that knows it
                outcome = await here.generate(prompt, 12)
                assert outcome.ids == ids
                assert (outcome.prefilled_by, outcome.decoded_by) == ("p1", "d1")
                usage = outcome.finished.usage
                assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 12)
                assert usage.num_computed_prompt_tokens == 0
        await here.all_free()
        assert here["d1"].load().num_remote_prefills == 2 * len(PROMPTS)
        assert sum(here["d1"].load().kv_transfer_bytes.values()) + sum(here["p1"].load().kv_transfer_bytes.values()) > 0
        assert here["d1"].load().num_recomputed_tokens == 0


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "queue"])
@pytest.mark.parametrize("handoff", HANDOFFS)
async def test_every_policy_serves_2p2d_by_two_routers(
    server: NatsServer, handoff: HandoffMode, policy: PolicyName
) -> None:
    async with (
        stack(server, "b1") as alone,
        stack(server, "p1", "p2", "d1", "d2", handoff=handoff, policy=policy, num_routers=2) as here,
    ):
        prefilled, decoded, routed = set(), set(), set()
        for number in range(16):
            prompt = [number + 3, 8, 9]
            outcome = await here.generate(prompt, 5)
            assert outcome.ids == (await alone.generate(prompt, 5)).ids
            prefilled.add(outcome.prefilled_by)
            decoded.add(outcome.decoded_by)
            routed.add(outcome.routed_by)
        await here.all_free()
    assert (prefilled, decoded, routed) == ({"p1", "p2"}, {"d1", "d2"}, {"r0", "r1"})


@pytest.mark.parametrize("workers", [("b1",), ("p1", "d1"), ("d1",)])
@pytest.mark.parametrize("handoff", HANDOFFS)
async def test_the_first_token_is_counted_once(
    server: NatsServer, workers: tuple[str, ...], handoff: HandoffMode
) -> None:
    async with stack(server, *workers, handoff=handoff) as here:
        whole = (await here.generate([5, 6, 7], 3)).ids
        for max_tokens in (1, 2, 3):
            outcome = await here.generate([5, 6, 7], max_tokens, num_logprobs=1)
            assert outcome.ids == whole[:max_tokens]
            assert outcome.finished.usage.completion_tokens == max_tokens
            assert outcome.finished.reason == "length"
            assert len(outcome.logprobs) == max_tokens
        await here.all_free()


@pytest.mark.parametrize("handoff", HANDOFFS)
async def test_a_stop_id_as_the_first_token_ends_the_request(server: NatsServer, handoff: HandoffMode) -> None:
    async with stack(server, "p1", "d1", handoff=handoff) as here:
        (first, *_) = (await here.generate([5, 6, 7], 3)).ids
        outcome = await here.generate([5, 6, 7], stop=StopConditions(max_tokens=9, stop_token_ids=(first,)))
        assert outcome.ids == [first]
        assert outcome.finished.reason == "stop"
        assert (outcome.decoded_by == "") == (handoff == "pull")
        await here.all_free()


async def test_cached_tokens_are_prefills_prefix_hit(server: NatsServer) -> None:
    async with stack(server, "p1", "d1") as here:
        prompt = list(range(3, 103))
        assert (await here.generate(prompt, 4)).finished.usage.cached_tokens == 0
        assert (await here.generate(prompt, 4)).finished.usage.cached_tokens == 96


async def test_a_worker_of_both_roles_serves_beside_a_pair(server: NatsServer) -> None:
    async with stack(server, "p1", "d1", "b1") as here:
        assert (await here.generate([4, 5, 6], 4)).decoded_by == "d1"
        await here.drain("p1")
        await here.fleet.wait_for(lambda fleet: "p1" not in fleet.workers, 5.0)
        ids = []
        for _ in range(4):
            outcome = await here.generate([4, 5, 6], 4)
            assert outcome.prefilled_by == ""
            ids.append(tuple(outcome.ids))
        assert len(set(ids)) == 1
