"""SGLang: who may meet whom, what a failed leg does to the other, and what a stranger on its ports can't do."""

import asyncio
import subprocess
import time

import msgspec
import numpy as np
import pytest

from deploy.engine_python import engine_python
from schemas.errors import AbortedError, BuswayError, EngineError, KvMismatchError, RequestError, UnavailableError
from schemas.frames import Failed
from schemas.handoff import BootstrapEndpoint, BootstrapInfo
from schemas.hop import Abort, Ok, PrefillFailed
from schemas.ids import AttemptId, Epoch, WorkerId, new_attempt_id, new_room
from schemas.kv_events import KvSnapshot, KvSnapshotRequest
from schemas.peer import MeetRequest, Stranded, Verdict
from schemas.request import GenerateRequest, Sampling
from services.config import WorkerConfig
from services.engines.prompt import num_prompt_tokens, prompt_digest
from services.prefix_hash import block_hashes
from tests.conformance.engines import only
from tests.conformance.pair import Desk
from tests.conformance.prompts import prompt

pytestmark = only("sglang")

STRANGER = WorkerId("stranger")
VICIOUS = """
import json, sys, urllib.request, zmq
where = json.load(urllib.request.urlopen(sys.argv[1]))
socket = zmq.Context().socket(zmq.PUSH)
socket.connect(f"tcp://{where['rank_ip']}:{where['rank_port']}")
guard = b"NixlMsgGuard"
for message in (
    [b""],
    [b"GET / HTTP/1.1"],
    [guard],
    [guard, b"None", b"127.0.0.1", b"1", b"stranger"],
    [guard, b"None", b"127.0.0.1", b"1", b"stranger", b"no metadata", *[b"1"] * 20],
    [guard, b"seven", b"127.0.0.1", b"1", b"stranger", b"", b"1", b"1"],
    [guard, b"9223372036854775808", b"127.0.0.1", b"1", b"stranger", b"", b"1", b"1"],
    [guard, b"0", b"127.0.0.1", b"1", b"stranger", b"", b"1", b"1"],
    [guard, b"\\xff", b"127.0.0.1", b"1", b"\\xff", b"", b"1", b"1"],
):
    socket.send_multipart(message)
socket.close(linger=2000)
"""


def meet_request(desk: Desk, request: GenerateRequest, bootstrap: BootstrapInfo, decode_epoch: Epoch) -> MeetRequest:
    return MeetRequest(
        attempt_id=request.attempt_id,
        room=bootstrap.room,
        epoch=bootstrap.epoch,
        decode_worker=desk.pair.decode.id,
        decode_epoch=decode_epoch,
        num_tokens=num_prompt_tokens(request),
        prompt_digest=prompt_digest(request),
        block_ids=(),
    )


async def meet(desk: Desk, request: GenerateRequest, bootstrap: BootstrapInfo) -> Verdict:
    """Ask prefill in decode's place."""
    epoch = (await desk.record(desk.pair.decode)).epoch
    subject = desk.bus.subjects.peer(desk.pair.prefill.id, "meet")
    return await desk.bus.ask(subject, meet_request(desk, request, bootstrap, epoch), Verdict, timeout_s=5.0)


async def strangers_room(desk: Desk) -> BootstrapInfo:
    """Return a room at the real prefill engine, of which its busway worker knows nothing: the test answers for it."""

    async def yes(message: MeetRequest, call: object) -> Verdict:
        return Verdict(is_good=True)

    async def noted(message: Stranded, call: object) -> Ok:
        return Ok()

    await desk.bus.serve(desk.bus.subjects.peer(STRANGER, "meet"), MeetRequest, yes)
    await desk.bus.serve(desk.bus.subjects.peer(STRANGER, "stranded"), Stranded, noted)
    record = await desk.record(desk.pair.prefill)
    assert record.bootstrap is not None
    return BootstrapInfo(prefill_worker=STRANGER, epoch=record.epoch, room=new_room(), endpoint=record.bootstrap)


async def bootstrap_of(desk: Desk, request: GenerateRequest) -> BootstrapInfo:
    params = await desk.params(request)
    assert isinstance(params, BootstrapInfo)
    return params


async def failure(desk: Desk, attempt: AttemptId) -> BuswayError | str:
    end = (await desk.outcome(attempt)).end
    assert isinstance(end, Failed), end
    return end.error.code


async def test_the_prefill_worker_tells_where_it_is_met(desk: Desk) -> None:
    record = await desk.record(desk.pair.prefill)
    assert record.bootstrap is not None
    assert (record.bootstrap.host, record.bootstrap.port > 0) == ("127.0.0.1", True)
    assert (await desk.record(desk.pair.decode)).is_strict, "an SGLang decode engine computes no prompts"


async def test_decode_with_wrong_prompt_ids_and_the_real_kv_gives_the_real_completion(desk: Desk) -> None:
    """An engine that recomputes in silence passes every other test of equality. Our own check of the prompts is led by
    the nose here."""
    real = prompt(70, salt=321)
    wrong = (*prompt(69, salt=322), real[-1])
    request = desk.request(real, 10)
    expected = (await desk.aggregated(request)).ids
    assert (await desk.aggregated(desk.request(wrong, 10))).ids != expected
    bootstrap = await bootstrap_of(desk, request)
    assert (await meet(desk, request, bootstrap)).is_good
    led = await strangers_room(desk)
    params = msgspec.structs.replace(led, room=bootstrap.room)
    got = await desk.decode(msgspec.structs.replace(request, token_ids=wrong), params)
    assert got.ids == expected
    assert got.finished.usage.num_computed_prompt_tokens == 0


async def test_legs_with_different_prompts_never_meet(desk: Desk) -> None:
    request = desk.request(prompt(60, salt=323), 6)
    bootstrap = await bootstrap_of(desk, request)
    other = msgspec.structs.replace(request, token_ids=prompt(60, salt=324))
    await desk.ask_decode(other, bootstrap)
    assert await failure(desk, request.attempt_id) == KvMismatchError.code
    await desk.until_free(3.0)


async def test_a_room_serves_one_attempt(desk: Desk) -> None:
    first = desk.request(prompt(30, salt=325), 4)
    bootstrap = await bootstrap_of(desk, first)
    with pytest.raises(RequestError, match="was used before"):
        await desk.ask_prefill(desk.request(prompt(30, salt=326), 4), bootstrap)
    expected = (await desk.aggregated(first)).ids
    assert (await desk.decode(first, bootstrap)).ids == expected
    again = msgspec.structs.replace(first, attempt_id=new_attempt_id())
    await desk.ask_decode(again, bootstrap)
    await failure(desk, again.attempt_id)


@pytest.mark.parametrize(
    "changes",
    [
        {"endpoint": BootstrapEndpoint(host="2.2.2.2", port=8998)},
        {"endpoint": BootstrapEndpoint()},
        {"endpoint": BootstrapEndpoint(host="127.0.0.1", port=0)},
    ],
)
async def test_an_endpoint_where_no_kv_comes_from_is_refused(desk: Desk, changes: dict[str, object]) -> None:
    request = desk.request(prompt(30, salt=327), 4)
    bootstrap = await bootstrap_of(desk, request)
    with pytest.raises(RequestError, match="no prefill can be met"):
        await desk.ask_decode(request, msgspec.structs.replace(bootstrap, **changes))
    await desk.until_free(3.0)


async def test_a_room_of_another_epoch_or_place_is_refused(desk: Desk) -> None:
    request = desk.request(prompt(30, salt=328), 4)
    record = await desk.record(desk.pair.prefill)
    assert record.bootstrap is not None
    room = BootstrapInfo(
        prefill_worker=desk.pair.prefill.id, epoch=record.epoch, room=new_room(), endpoint=record.bootstrap
    )
    with pytest.raises(UnavailableError):
        await desk.ask_prefill(request, msgspec.structs.replace(room, epoch=Epoch(1)))
    elsewhere = msgspec.structs.replace(room, endpoint=BootstrapEndpoint(host="127.0.0.1", port=1))
    with pytest.raises(RequestError, match="another endpoint"):
        await desk.ask_prefill(desk.request(prompt(30, salt=328), 4), elsewhere)


async def test_decode_alone_is_refused(desk: Desk) -> None:
    with pytest.raises(UnavailableError, match="computes no prompt"):
        await desk.ask_decode(desk.request(prompt(30), 4), worker=desk.pair.decode)


async def test_a_failed_prefill_ends_decode_within_a_second(desk: Desk) -> None:
    """The peers tell each other: there is no router here at all."""
    room = await strangers_room(desk)
    request = desk.request(prompt(30, salt=329), 4)
    await desk.ask_decode(request, room)
    await asyncio.sleep(0.3)  # it waits in SGLang now, which would let it wait for minutes
    error = EngineError("prefill ran out of luck")
    began = time.monotonic()
    subject = desk.bus.subjects.peer(desk.pair.decode.id, "stranded")
    await desk.bus.ask(subject, Stranded(attempt_id=request.attempt_id, error=error.record()), Ok)
    outcome = await desk.outcome(request.attempt_id)
    assert time.monotonic() - began < 1.0
    assert isinstance(outcome.end, Failed)
    assert "out of luck" in outcome.end.error.message
    await desk.until_free(3.0)


async def test_a_prefill_aborted_by_its_router_ends_decode_too(desk: Desk) -> None:
    request = desk.request(prompt(900, salt=330), 4)
    bootstrap = await bootstrap_of(desk, request)
    abort = Abort(attempt_id=request.attempt_id, reason="test", error=AbortedError("over").record())
    await desk.bus.ask(desk.bus.subjects.worker(desk.pair.prefill.id, "abort"), abort, Ok, timeout_s=5.0)
    began = time.monotonic()
    await desk.ask_decode(request, bootstrap)
    await failure(desk, request.attempt_id)
    assert time.monotonic() - began < 1.0
    await desk.until_free(3.0)


async def test_a_decode_that_never_comes_costs_a_lease(desk: Desk) -> None:
    request = desk.request(prompt(100, salt=331), 4)
    await desk.params(request)
    await desk.until_free(10.0)
    await desk.until(lambda: desk.result(request.attempt_id) is not None, 5.0)
    assert isinstance(desk.result(request.attempt_id), PrefillFailed)


async def test_strangers_on_the_rank_port_leave_prefill_unharmed(desk: Desk) -> None:
    record = await desk.record(desk.pair.prefill)
    assert record.bootstrap is not None
    ranks = "prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
    url = f"http://{record.bootstrap.host}:{record.bootstrap.port}/route?{ranks}"
    python = engine_python(WorkerConfig(engine="sglang"))
    await asyncio.to_thread(subprocess.run, [str(python), "-c", VICIOUS, url], check=True, timeout=60)
    request = desk.request(prompt(50, salt=332), 6)
    assert (await desk.disaggregated(request)).ids == (await desk.aggregated(request)).ids


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=3, temperature=0.0, repetition_penalty=2.0),
        Sampling(seed=3, temperature=0.0, frequency_penalty=1.9, presence_penalty=1.4),
        Sampling(seed=11, temperature=0.9, min_p=0.05, is_user_seeded=True),
        Sampling(seed=2**62, temperature=1.3, top_k=20, is_user_seeded=True),
    ],
    ids=["repetition", "frequency and presence", "min_p", "top_k"],
)
async def test_every_parameter_means_the_same_on_two_legs(desk: Desk, sampling: Sampling) -> None:
    ids, max_tokens = prompt(40, salt=333), 120  # long enough for the tiny model to repeat itself
    request = desk.request(ids, max_tokens, sampling=sampling)
    got, alone = await desk.disaggregated(request), await desk.aggregated(request)
    plain = await desk.aggregated(desk.request(ids, max_tokens))
    assert got.ids == alone.ids
    assert got.ids != plain.ids, "the parameter changed nothing"


async def test_a_repetition_penalty_sees_the_prompt(desk: Desk) -> None:
    """As everywhere else; SGLang's own begins with the completion."""
    penalized = Sampling(seed=1, temperature=0.0, repetition_penalty=2.0)
    for salt in range(8):  # half of all words in the prompt: soon the next one is among them
        ids = tuple(dict.fromkeys(prompt(700, salt=salt)))
        plain = (await desk.aggregated(desk.request(ids, 1))).ids
        if plain[0] in ids:
            break
    request = desk.request(ids, 1, sampling=penalized)
    got = await desk.disaggregated(request)
    assert got.ids == (await desk.aggregated(request)).ids
    assert got.ids != plain


async def test_what_changes_in_the_cache_is_told(desk: Desk) -> None:
    ids = prompt(64, salt=335)
    await desk.disaggregated(desk.request(ids, 2))
    wanted = set(block_hashes(ids, desk.pair.case.block_size).tolist()[:3])
    subject = desk.bus.subjects.peer(desk.pair.prefill.id, "kv_snapshot")
    async with asyncio.timeout(5.0):
        while True:
            snapshot = await desk.bus.ask(subject, KvSnapshotRequest(), KvSnapshot)
            if wanted <= set(np.frombuffer(snapshot.blocks, dtype="<u8").tolist()):
                break
            await asyncio.sleep(0.05)
    assert (await desk.load(desk.pair.prefill.id)).last_kv_event > 0
