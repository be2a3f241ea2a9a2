"""What a worker sends again when it is asked, over a real bus."""

import pytest

from bus.server import NatsServer
from schemas.errors import StreamBrokenError
from schemas.frames import Finished, Tokens
from schemas.hop import AcceptedHop, Resend
from schemas.ids import AttemptId, new_attempt_id
from tests.worker.test_worker_on_the_bus import Bench, bench


@pytest.fixture(scope="module")
def server(nats_server: NatsServer) -> NatsServer:
    return nats_server


async def resend(here: Bench, attempt_id: AttemptId, from_seq: int) -> AcceptedHop:
    subject = here.bus.subjects.worker(here.me.worker_id, "resend")
    return await here.bus.ask(subject, Resend(attempt_id=attempt_id, from_seq=from_seq), AcceptedHop)


async def test_an_ended_streams_frames_come_again_from_the_token_asked_for(server: NatsServer) -> None:
    async with bench(server, "both") as here:
        leg = here.decode_leg()
        attempt_id = leg.request.attempt_id
        await here.send(leg)
        await here.end_of(attempt_id)
        heard = list(here.frames)
        assert (await resend(here, attempt_id, 4)).by == here.me.worker_id
        await here.until(lambda: len(here.frames) > len(heard) and isinstance(here.frames[-1], Finished))
        again = here.frames[len(heard) :]
        assert again == [frame for frame in heard if isinstance(frame, Tokens | Finished) and frame.seq >= 4]


async def test_a_stream_that_is_unknown_or_aborted_is_told_so(server: NatsServer) -> None:
    async with bench(server, "both") as here:
        with pytest.raises(StreamBrokenError):
            await resend(here, new_attempt_id(), 0)
        leg = here.decode_leg(here.request(10, 5000))
        await here.send(leg)
        assert (await resend(here, leg.request.attempt_id, 0)).by == here.me.worker_id
        await here.abort(leg.request.attempt_id)
        with pytest.raises(StreamBrokenError):
            await resend(here, leg.request.attempt_id, 0)
        await here.all_free()


async def test_a_prefill_legs_outcome_comes_again(server: NatsServer) -> None:
    async with bench(server, "prefill") as here:
        leg = here.prefill_leg()
        await here.send(leg)
        await here.until(lambda: here.results)
        await resend(here, leg.request.attempt_id, 0)
        await here.until(lambda: len(here.results) == 2)
        assert here.results[0] == here.results[1]
        await here.abort(leg.request.attempt_id)
        with pytest.raises(StreamBrokenError):
            await resend(here, leg.request.attempt_id, 0)
        await here.all_free()
