"""What SGLang says of a request, in our words."""

from typing import Any

import pytest

from schemas.errors import BuswayError, EngineError, KvTransferFailedError, RequestError
from schemas.frames import TokenLogprobs
from schemas.handoff import BootstrapEndpoint
from services.engines.sglang.translate import Translator, arguments_of
from services.engines.sglang.words import Submission

ALONE = Submission(rid="r", token_ids=[1, 2], sampling={})
LEG = Submission(rid="r", token_ids=[1, 2], sampling={}, room=7, endpoint=BootstrapEndpoint(host="h", port=8))


def chunk(ids: list[int], reason: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"finish_reason": reason, **meta}}


def test_a_leg_names_its_room_and_where_it_is() -> None:
    arguments = arguments_of(LEG)
    assert (arguments["bootstrap_host"], arguments["bootstrap_port"], arguments["bootstrap_room"]) == ("h", 8, 7)
    assert not any(name.startswith("bootstrap") for name in arguments_of(ALONE))


def test_a_chunk_brings_what_is_new() -> None:
    wanting = Submission(rid="r", token_ids=[1], sampling={}, num_logprobs=2)
    said = {"output_token_logprobs": [(-0.5, 9, None)], "output_top_logprobs": [[(-0.5, 9, None), (-1.5, 3, None)]]}
    output = Translator(wanting).output(chunk([9], cached_tokens=4, **said))
    assert (output.token_ids, output.num_cached_tokens, output.is_last) == ((9,), 4, False)
    assert output.logprobs == (TokenLogprobs(-0.5, ((9, -0.5), (3, -1.5))),)


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_an_end_is_an_end_once(finish: str) -> None:
    translator = Translator(ALONE)
    output = translator.output(chunk([9], {"type": finish}))
    assert (output.finish, output.is_last, output.error) == (finish, True, None)
    assert translator.ended() is None


@pytest.mark.parametrize(
    ("submission", "reason", "error"),
    [
        (ALONE, {"type": "abort", "message": "m", "status_code": 400}, RequestError),
        (LEG, {"type": "abort", "message": "m", "status_code": 400}, RequestError),
        (LEG, {"type": "abort", "message": "m", "status_code": 500}, KvTransferFailedError),
        (LEG, {"type": "abort", "message": "m"}, KvTransferFailedError),
        (ALONE, {"type": "abort", "message": "m", "status_code": 503}, EngineError),
        (ALONE, {"type": "stop", "matched": "NaN happened"}, EngineError),
    ],
)
def test_what_sglang_calls_an_end_and_isnt_one_is_an_error(
    submission: Submission, reason: dict[str, Any], error: type[BuswayError]
) -> None:
    output = Translator(submission).output(chunk([9], reason))
    assert type(output.error) is error
    assert (output.is_last, output.token_ids) == (True, ()), "its ids may be old ones"


def test_silence_and_exceptions_are_ends_too() -> None:
    ended = Translator(ALONE).ended()
    assert ended is not None
    assert isinstance(ended.error, EngineError)
    refused = Translator(ALONE).refused(ValueError("too long"))
    assert refused is not None
    assert isinstance(refused.error, RequestError)
