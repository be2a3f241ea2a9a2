"""The decode worker is killed, full, or too late for its KV."""

import asyncio
from collections import Counter

import pytest

from tests.faults.stack import Stack, promptly

pytestmark = pytest.mark.asyncio(loop_scope="package")

PAIR = ("g0", "r0", "p1", "d1")
SMALL = {"max_num_seqs": 4, "num_blocks": 20, "max_waiting": 8, "lease_s": 0.6}
TWO_DECODES = ("g0", "r0", "p1", "d1", "d2")


async def test_decode_killed_before_its_kv(stack: Stack) -> None:
    """The requests go on with the other decode worker, and what prefill held for the dead one is free at the end.

    (In between the resumed attempts hold as many blocks again, so a count then says nothing.)
    """
    await stack.have(*TWO_DECODES)
    pauses = {"pull": ("d1", "d2"), "rendezvous": ("p1",)}[stack.handoff]
    point = {"pull": "mid_transfer", "rendezvous": "before_prefill"}[stack.handoff]
    with stack.paused(point, *pauses):
        answers = [stack.ask(stack.prompt(), via=via) for via in ("http", "bus", "http", "bus")]
        for answer in answers[1::2]:
            await answer.until("decoding")
        await stack.until_load("d1", lambda load: load.running >= 1)
        stack["d1"].kill()
    for answer in answers:
        (await answer.over()).check_whole()
    await stack.all_free()


async def test_decode_killed_in_mid_stream(stack: Stack) -> None:
    await stack.have(*TWO_DECODES)
    answers = [stack.ask(stack.prompt(), 900, via=via) for via in ("http", "bus", "http", "bus")]
    for answer in answers:
        await answer.begun()
    stack["d1"].kill()
    for answer in answers:
        (await answer.over()).check_whole()
    assert sum(answer.is_whole for answer in answers) >= 2
    await stack.all_free()


@pytest.mark.slow
async def test_a_stopped_decode_worker_that_wakes_up_says_nothing_wrong(stack: Stack) -> None:
    """Its streams went on elsewhere; it drops what it held before it does anything else."""
    await stack.have(*TWO_DECODES)
    answers = [stack.ask(stack.prompt(), 900, via=via) for via in ("http", "bus", "http", "bus")]
    for answer in answers:
        await answer.begun()
    async with stack["d1"].frozen():
        await stack.until_gone("d1")
    for answer in answers:
        (await answer.over()).check_whole()
    await stack.settled(TWO_DECODES)


async def test_more_than_decode_has_room_for_waits_and_none_is_lost(stack: Stack) -> None:
    """Four slots and 20 blocks for requests of 4 blocks that grow to 6: they queue, and are preempted."""
    await stack.have(*PAIR, **SMALL)
    answers = [stack.ask(stack.prompt(), 40, via=via) for via in ("http", "bus") for _ in range(6)]
    for answer in answers:
        (await answer.over()).check_whole()
    await stack.all_free()


async def test_beyond_the_thresholds_it_is_429_at_once(stack: Stack) -> None:
    await stack.have(*PAIR, **SMALL)
    with stack["d1"].paused("after_first_token"):
        answers = [stack.ask(stack.prompt(), via=via) for via in ("http", "bus") for _ in range(14)]
        await asyncio.wait([answer.task for answer in answers], timeout=promptly(1.0))
        refused = [answer for answer in answers if answer.task.done()]
        assert len(refused) >= 10
        assert Counter((answer.status, answer.error, bool(answer.retry_after)) for answer in refused) == {
            (429, "overloaded", True): len(refused)
        }
    taken = [answer for answer in answers if answer not in refused]
    assert len(taken) >= 4
    for answer in taken:
        (await answer.over()).check_whole()
    await stack.all_free()


async def test_a_request_larger_than_the_pool_is_400_with_the_numbers(stack: Stack) -> None:
    await stack.have(*PAIR, **SMALL)
    for num_prompt_tokens, max_tokens in ((350, 4), (50, 500)):
        for answer in stack.ask_both(max_tokens, num_prompt_tokens):
            (await answer.over()).check_failed("invalid_request", "context_length_exceeded")
            assert answer.status == 400
            assert "320" in answer.message or "20" in answer.message
    await stack.all_free()


async def test_a_lease_that_ends_while_decode_queues_never_becomes_text(stack: Stack) -> None:
    """Decode stands still a little longer than the lease, not long enough to be taken for dead, and finds that the
    blocks are another prompt's by now."""
    await stack.have(*PAIR, **SMALL)
    with stack["d1"].paused("after_first_token"):
        occupant = stack.ask(stack.prompt())
        await stack["d1"].hit("after_first_token")
        answers = [occupant, *stack.ask_both()]
        await stack.until_load("d1", lambda load: load.running + load.waiting == 3)
        await stack.until_load("p1", lambda load: load.kv_blocks_used == 8 and not load.queued_prefill_tokens)
        async with stack["d1"].frozen():
            await stack.until_load("p1", lambda load: load.kv_blocks_used == 0)
            if stack.handoff == "pull":  # a first token that is the last one needs no decode worker
                others = [stack.ask(stack.prompt(), 1) for _ in range(8)]
                for other in others:
                    (await other.over()).check_whole()
    for answer in answers:
        (await answer.over()).check_whole()
    await stack.all_free()


async def test_a_long_queue_doesnt_outlast_the_lease(stack: Stack) -> None:
    """Decode renews while it queues: far longer than a lease, and the KV is used."""
    await stack.have(*PAIR, **SMALL)
    before = (await stack.load("d1")).num_recomputed_tokens
    with stack["d1"].paused("after_first_token"):
        occupant = stack.ask(stack.prompt())
        await stack["d1"].hit("after_first_token")
        answers = [occupant, *stack.ask_both()]
        await stack.until_load("d1", lambda load: load.running + load.waiting == 3)
        await asyncio.wait([answer.task for answer in answers], timeout=1.5)
    for answer in answers:
        (await answer.over()).check_whole()
    await stack.all_free()
    assert (await stack.load("d1")).num_recomputed_tokens == before


@pytest.mark.slow
async def test_a_stuck_transfer_is_given_up_and_its_blocks_wait_for_its_end(stack: Stack) -> None:
    """50 tokens of 64 bytes at 2 KB/s: 1.6 s, and the transfer may take 0.4 s. The request doesn't wait for it, its
    blocks do."""
    await stack.have(*PAIR, transfer_gb_per_s=2e-6, kv_transfer_s=0.4, kv_bytes_per_token=64)
    answers = stack.ask_both()
    await stack.until_load("d1" if stack.handoff == "pull" else "p1", lambda load: load.kv_blocks_quarantined > 0)
    for answer in answers:
        (await answer.over()).check_whole()
    await stack.all_free()
    assert (await stack.load("d1")).num_recomputed_tokens >= 100
