"""Mixed handoffs under random aborts, lost messages and departures: right text or an error, nothing left."""

import asyncio
import random

import pytest

from schemas.errors import CapacityError, KvTransferFailedError
from schemas.frames import Failed, Finished, Tokens
from schemas.hop import PrefillDone, PrefillEnded, PrefillFailed
from schemas.ids import AttemptId
from schemas.peer import MetadataRequest
from schemas.request import GenerateRequest
from services.engines.paged.handoff import HandoffOptions
from tests.engines.paged.fleet import (
    Fleet,
    Host,
    aggregated,
    decode_leg,
    fleet_of,
    prefill_leg,
    prompt,
    request_for,
    room_of,
)


async def attempt(fleet: Fleet, request: GenerateRequest, *, by_rendezvous: bool) -> None:
    """Send both legs as a router would."""
    p, d = fleet["p"], fleet["d"]
    try:
        if by_rendezvous:
            room = room_of(p)
            d.engine.decode(decode_leg(request, room))
            await asyncio.sleep(random.random() * 0.005)
            p.engine.prefill(prefill_leg(request, room))
            return
        p.engine.prefill(prefill_leg(request))
        kinds = PrefillDone | PrefillEnded | PrefillFailed
        await p.until(lambda: any(isinstance(event, kinds) for event in p.events.get(request.attempt_id, [])))
        result = next(event for event in p.events[request.attempt_id] if isinstance(event, kinds))
        if isinstance(result, PrefillDone):
            d.engine.decode(decode_leg(request, result.params))
    except (CapacityError, TimeoutError):
        return  # aborted meanwhile: refused, or silent for ever


def said(host: Host, attempt_id: AttemptId) -> list[int]:
    events = host.events.get(attempt_id, [])
    return [token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fetch", ["read", "write"])
async def test_whatever_happens_the_text_is_right_and_nothing_is_left(seed, fetch):
    dice = random.Random(seed)
    random.seed(seed)
    options = HandoffOptions(fetch=fetch, lease_s=0.4, ask_s=0.05, transfer_s=1.0)
    sizes = {"num_blocks": "160", "max_batched_tokens": "64", "max_num_seqs": "12"}
    async with fleet_of("alone", "p", "d", options=options, **sizes) as fleet:

        async def meddle(worker, message):
            fate = dice.random()
            if isinstance(message, MetadataRequest) or fate > 0.25:
                return 1
            if fate > 0.2:
                raise KvTransferFailedError("refused for no reason")
            await asyncio.sleep(dice.random() * 0.02)
            return 0 if fate < 0.1 else 2

        fleet.link.meddle = meddle
        requests = [request_for(prompt(dice.randrange(1, 160), salt=n % 7), max_tokens=6) for n in range(60)]
        wanted = {request.attempt_id: await aggregated(fleet["alone"], request) for request in requests}
        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                tasks.create_task(attempt(fleet, request, by_rendezvous=dice.random() < 0.5))
                await asyncio.sleep(dice.random() * 0.004)
                if dice.random() < 0.4:
                    victim = dice.choice(requests)
                    fleet[dice.choice("pd")].engine.abort(victim.attempt_id)
                if dice.random() < 0.03:
                    fleet["d"].engine.peer_left(fleet["p"].worker, fleet["p"].epoch)
            fleet.link.meddle = None
            await asyncio.sleep(0.05)
            for request in dice.sample(requests, 10):
                for side in "pd":
                    fleet[side].engine.abort(request.attempt_id)
            await fleet.until_empty()
            for request in requests:  # ends the waits for silent prefill legs
                fleet["p"].emit([PrefillFailed(attempt_id=request.attempt_id, error=CapacityError("over").record())])
        num_finished = 0
        for attempt_id, want in wanted.items():
            ends = [e for e in fleet["d"].events.get(attempt_id, []) if isinstance(e, Finished | Failed)]
            assert len(ends) <= 1
            assert said(fleet["d"], attempt_id) == want[: len(said(fleet["d"], attempt_id))]
            if ends and isinstance(ends[0], Finished):
                assert said(fleet["d"], attempt_id) == want
                num_finished += 1
        assert num_finished > 5
        await fleet.until_empty()
