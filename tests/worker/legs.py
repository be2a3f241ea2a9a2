"""Builders of legs and events."""

from schemas.frames import TokenLogprobs, Tokens
from schemas.hop import DecodeRequest, Dispatch, PrefillRequest
from schemas.ids import AttemptId, Epoch, RequestId
from schemas.request import Deadlines, GenerateRequest, Sampling, StopConditions, StreamAddress


def attempt(number: int) -> AttemptId:
    return AttemptId(f"{number:022d}")


def a_request(
    number: int = 1, *, deadlines: Deadlines | None = None, owner: str = "", resume: tuple[int, ...] = ()
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("label"),
        attempt_id=attempt(number),
        model="m",
        token_ids=(1, 2, 3),
        sampling=Sampling(seed=1),
        stop=StopConditions(max_tokens=8),
        stream=StreamAddress(subject="_INBOX.x.tok.s", owner=owner),
        deadlines=deadlines or Deadlines(),
        resume=resume,
    )


def a_dispatch(number: int = 1, epoch: int = 7) -> Dispatch:
    return Dispatch(router="r", epoch=Epoch(epoch), number=number)


def a_decode(number: int = 1, *, deadlines: Deadlines | None = None) -> DecodeRequest:
    return DecodeRequest(request=a_request(number, deadlines=deadlines), dispatch=a_dispatch())


def a_prefill(number: int = 1, *, deadlines: Deadlines | None = None) -> PrefillRequest:
    return PrefillRequest(
        request=a_request(number, deadlines=deadlines), dispatch=a_dispatch(), result_subject="_INBOX.r.p"
    )


def some_tokens(num: int, *, seq: int = 0, num_top: int = 0) -> Tokens:
    one = TokenLogprobs(logprob=-0.5, top=tuple((index, -1.0) for index in range(num_top)))
    return Tokens(attempt(1), seq, tuple(range(num)), (one,) * num if num_top else None)
