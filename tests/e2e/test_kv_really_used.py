"""Silent recompute is the toy that passes every equality test: decode is told a wrong prompt and given the real KV."""

import asyncio
import time
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from bus.connection import Bus
from schemas.frames import Failed, Finished, Tokens, decode_frames
from schemas.hop import AcceptedHop, Busy, DecodeRequest, Dispatch, PrefillDone, PrefillRequest
from schemas.ids import AttemptId, Epoch, RequestId, WorkerId, new_attempt_id
from schemas.message import decode
from schemas.request import GenerateRequest, Sampling, StopConditions, StreamAddress
from tests.e2e.conftest import TORCH_FLAGS, Stack, running_stack
from tests.e2e.prompts import Reference, prompt_ids


@pytest.fixture(scope="module")
def pull_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A rendezvous refuses legs whose prompts differ, so only pull can be given a wrong prompt."""
    with running_stack(tmp_path_factory.mktemp("kv"), "--handoff", "pull", *TORCH_FLAGS) as stack:
        yield stack


def request_for(stack: Stack, ids: list[int], attempt: AttemptId, subject: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("kv-really-used"),
        attempt_id=attempt,
        model=stack.model,
        token_ids=tuple(ids),
        sampling=Sampling(seed=1, temperature=0.0),
        stop=StopConditions(max_tokens=12),
        stream=StreamAddress(subject=subject),
    )


def worker_of(stack: Stack, role: str) -> WorkerId:
    return WorkerId(next(w["worker_id"] for w in stack.status()["workers"] if w["role"] == role))


async def test_decode_given_wrong_ids_and_the_real_kv_gives_the_real_output(
    pull_stack: Stack, tokenizer: Tokenizer, reference: Reference
) -> None:
    ids = prompt_ids(tokenizer, 150)
    wrong = list(reversed(ids))
    attempt = new_attempt_id()
    async with Bus.connect(pull_stack.nats_url, name="test", client_id="kvtest") as bus:
        results: asyncio.Queue[bytes] = asyncio.Queue()
        stream = f"{bus.inbox}.tok.s"
        dispatch = Dispatch(router="test", epoch=Epoch(time.time_ns()), number=1)
        result = await bus.listen(f"{bus.inbox}.res", lambda _, payload: results.put_nowait(payload))
        frames: asyncio.Queue[bytes] = asyncio.Queue()
        tokens = await bus.listen(stream, lambda _, payload: frames.put_nowait(payload))
        prefill = PrefillRequest(
            request=request_for(pull_stack, ids, attempt, stream),
            dispatch=dispatch,
            result_subject=f"{bus.inbox}.res",
        )
        subject = bus.subjects.worker(worker_of(pull_stack, "prefill"), "prefill")
        assert isinstance(await bus.ask(subject, prefill, AcceptedHop | Busy), AcceptedHop)  # type: ignore[arg-type]
        done = decode(await asyncio.wait_for(results.get(), 60), PrefillDone)
        decode_leg = DecodeRequest(
            request=request_for(pull_stack, wrong, attempt, stream),
            dispatch=dispatch,
            params=done.params,
            prefill_worker=worker_of(pull_stack, "prefill"),
        )
        subject = bus.subjects.worker(worker_of(pull_stack, "decode"), "decode")
        assert isinstance(await bus.ask(subject, decode_leg, AcceptedHop | Busy), AcceptedHop)  # type: ignore[arg-type]
        got: list[int] = []
        finished: Finished | None = None
        while finished is None:
            for frame in decode_frames(await asyncio.wait_for(frames.get(), 60)):
                assert not isinstance(frame, Failed), frame
                if isinstance(frame, Tokens):
                    got.extend(frame.token_ids)
                elif isinstance(frame, Finished):
                    finished = frame
        await result.stop()
        await tokens.stop()
    assert tuple(got) == reference.greedy(tuple(ids), 12)
    assert finished.usage.num_computed_prompt_tokens == 0
    pull_stack.assert_idle()
