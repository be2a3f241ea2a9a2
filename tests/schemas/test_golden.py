"""The wire format: golden bytes of every message, what is ignored, what is refused, and the codec's round trip."""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import schemas
from schemas.errors import ERRORS_BY_CODE, BuswayError, ErrorRecord, RequestError, error_from
from schemas.frames import Frame, decode_frames, encode_frames
from schemas.handoff import DisaggregatedParams
from schemas.hop import Abort, AcceptedHop, Ack
from schemas.message import Message, decode, encode
from schemas.request import GenerateRequest
from tests.schemas.golden_messages import MESSAGES, REQUEST
from tests.schemas.shapes import messages

GOLDEN = (Path(__file__).parent / "golden.jsonl").read_bytes().splitlines()
FRAME_CLASSES = Frame.__args__


def all_message_classes() -> set[type[msgspec.Struct]]:
    for module in pkgutil.iter_modules(schemas.__path__):
        importlib.import_module(f"schemas.{module.name}")
    return set(Message.__subclasses__()) | set(FRAME_CLASSES) | {ErrorRecord}


@pytest.mark.parametrize(
    ("message", "golden"), list(zip(MESSAGES, GOLDEN, strict=True)), ids=lambda one: type(one).__name__
)
def test_every_message_has_its_golden_bytes(message: msgspec.Struct, golden: bytes) -> None:
    assert encode(message) == golden
    # Not by ==: msgspec.Raw compares by identity.
    assert encode(decode(golden, type(message))) == golden


def test_every_message_class_is_among_the_golden_ones() -> None:
    assert {type(message) for message in MESSAGES} == all_message_classes()


def test_tags_are_unique_and_versioned() -> None:
    tags = [cls.__struct_config__.tag for cls in all_message_classes() - set(FRAME_CLASSES)]
    assert len(tags) == len(set(tags))
    assert all(str(tag).rsplit(".v", 1)[-1].isdigit() for tag in tags)


def test_unknown_fields_are_ignored() -> None:
    fields = msgspec.json.decode(encode(REQUEST))
    fields["a_field_of_next_year"] = {"deep": [1]}
    fields["sampling"]["another"] = 1
    assert decode(encode(fields), GenerateRequest) == REQUEST


def test_unknown_tags_are_refused() -> None:
    with pytest.raises(RequestError, match="malformed"):
        decode(b'{"type":"accepted.v2","by":"r","epoch":1}', AcceptedHop)
    with pytest.raises(RequestError):
        decode(b'{"by":"r","epoch":1}', Ack)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        decode(b'{"type":"pickle.v1"}', DisaggregatedParams)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        decode_frames(b'[["x","attempt",1]]')


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"type":"abort.v1","attempt_id":1,"reason":""}'],
)
def test_what_is_no_message_raises_request_error_and_nothing_else(payload: bytes) -> None:
    with pytest.raises(RequestError):
        decode(payload, Abort)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("top_p", 0.0), ("top_k", -1), ("seed", 2**63), ("repetition_penalty", 0)],
)
def test_sampling_out_of_range_is_refused_naming_the_field(field: str, value: object) -> None:
    fields = msgspec.json.decode(encode(REQUEST))
    fields["sampling"][field] = value
    with pytest.raises(RequestError, match=field):
        decode(encode(fields), GenerateRequest)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_any_valid_message_survives_the_wire(data: st.DataObject) -> None:
    cls = data.draw(st.sampled_from(sorted(all_message_classes(), key=lambda one: one.__name__)))
    message = data.draw(messages(cls))
    payload = encode(message)
    assert encode(decode(payload, cls)) == payload


@given(st.lists(st.sampled_from([one for one in MESSAGES if isinstance(one, FRAME_CLASSES)])))
def test_frames_of_a_step_survive_the_wire_in_order(frames: list[Any]) -> None:
    assert decode_frames(encode_frames(frames)) == frames


@pytest.mark.parametrize("cls", ERRORS_BY_CODE.values(), ids=lambda cls: cls.code)
def test_every_error_crosses_the_bus_as_itself(cls: type[BuswayError]) -> None:
    error = cls("why", phase="prefill", param="n", retry_after_s=1.5)
    back = error_from(decode(encode(error.record()), ErrorRecord))
    assert type(back) is cls
    assert (back.message, back.phase, back.param, back.retry_after_s) == ("why", "prefill", "n", 1.5)


def test_an_error_of_a_newer_release_becomes_the_root_error() -> None:
    assert type(error_from(ErrorRecord(code="from_the_future", message="?"))) is BuswayError
