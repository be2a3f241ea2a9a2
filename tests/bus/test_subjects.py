"""The subject table: names stay apart, nothing can be smuggled in, and a stream belongs to its sender."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.subjects import SUBJECT_TABLE, Subjects, check_subject, is_inbox, is_under_inbox, render_table, slug
from schemas.errors import BusError
from schemas.ids import Epoch
from schemas.worker import ServiceRecord
from tests.bus.records import worker_record

SUBJECTS = Subjects()
GATEWAY_REPLY = "_INBOX.busway.gw1.5f3a0"


@given(st.text(), st.text())
def test_two_names_never_share_a_slug(one: str, other: str) -> None:
    assert (slug(one) == slug(other)) == (one == other)


@given(st.text())
def test_a_slug_is_one_token_and_a_valid_kv_key(name: str) -> None:
    assert re.fullmatch(r"[-_=a-zA-Z0-9]+", slug(name))


def test_dots_in_model_names_are_slugged() -> None:
    assert SUBJECTS.requests("Qwen/Qwen2.5-0.5B") == "busway.v1.requests.Qwen=2FQwen2=2E5-0=2E5B"
    assert SUBJECTS.requests("a.b") != SUBJECTS.requests("a_b")
    assert SUBJECTS.requests("a.*").count(".") == SUBJECTS.requests("a").count(".")


@pytest.mark.parametrize("subject", ["a.*", "a.>", "a..b", ".a", "a.", "", "a b", "a\r\nPUB x 1", "*"])
def test_wildcards_and_malformed_subjects_are_no_place_to_publish(subject: str) -> None:
    with pytest.raises(BusError):
        check_subject(subject)


@pytest.mark.parametrize("namespace", ["", "a.b", "a b", ">", "*", "ä"])
def test_a_namespace_is_one_plain_token(namespace: str) -> None:
    with pytest.raises(BusError):
        Subjects(namespace)


def test_namespaces_share_nothing() -> None:
    other = Subjects("other")
    assert other.requests("m") == "other.v1.requests.m"
    assert {other.runtime_bucket, other.cards_bucket} == {"other_runtime", "other_cards"}


def test_every_subject_of_the_table_has_its_method_and_wildcard() -> None:
    made = [
        SUBJECTS.openai("chat", "m"),
        SUBJECTS.requests("m"),
        SUBJECTS.prefill("m", "c"),
        SUBJECTS.decode("m", "c"),
        SUBJECTS.worker("w", "prefill"),
        SUBJECTS.router("r", "abort"),
        SUBJECTS.gateway("g", "trace"),
        SUBJECTS.peer("w", "metadata"),
        SUBJECTS.admin("w", "drain"),
        SUBJECTS.kv_events("m", "w"),
        SUBJECTS.load("m", "w"),
        SUBJECTS.router_report("r"),
        SUBJECTS.heartbeat("worker", "w"),
    ]
    rows = [row.pattern for row in SUBJECT_TABLE if not row.pattern.startswith("_")]
    assert [one.split(".")[2] for one in made] == [row.split(".")[0] for row in rows]
    assert [one.count(".") - 2 for one in made] == [row.count(".") for row in rows]
    assert SUBJECTS.load("m", "w").startswith(SUBJECTS.all_loads[:-1])
    assert SUBJECTS.router_report("r").startswith(SUBJECTS.all_router_reports[:-1])
    assert SUBJECTS.heartbeat("router", "r").startswith(SUBJECTS.all_heartbeats[:-1])
    assert render_table().count("\n") == len(SUBJECT_TABLE) + 1


def test_record_keys_tell_roles_and_services_apart() -> None:
    assert SUBJECTS.record_key(worker_record("w.1", model="a/b", role="decode")) == "a=2Fb.decode.w=2E1"
    router = ServiceRecord(service="router", id="r1", epoch=Epoch(1), state="ready")
    assert SUBJECTS.record_key(router) == "_.router.r1"


@pytest.mark.parametrize(
    ("stream", "reply"),
    [
        ("_INBOX.busway.gw1.tok.s", GATEWAY_REPLY),
        ("_INBOX.abc.stream", "_INBOX.abc.1"),
        ("_INBOX.abc.stream", "_INBOX.abc"),  # the old request style: the reply is the inbox itself
    ],
)
def test_a_stream_under_its_senders_inbox_is_taken(stream: str, reply: str) -> None:
    assert is_under_inbox(stream, reply)


@pytest.mark.parametrize(
    ("stream", "reply"),
    [
        ("_INBOX.busway.gw2.tok.s", GATEWAY_REPLY),
        ("_INBOX.busway.gw11.tok.s", GATEWAY_REPLY),
        ("_INBOX.busway.gw1", GATEWAY_REPLY),
        ("_INBOX.busway.gw1.tok.>", GATEWAY_REPLY),
        ("_INBOX.busway.gw1.*", GATEWAY_REPLY),
        ("_INBOX.busway.gw1..s", GATEWAY_REPLY),
        ("_INBOX.busway.gw1.s x", GATEWAY_REPLY),
        ("busway.v1.admin.w1.drain", GATEWAY_REPLY),
        ("$KV.busway_runtime.x", "$KV.busway_runtime.y"),
        ("busway.v1.worker.w1.abort", "busway.v1.worker.w1.x"),
        ("_INBOX.busway.gw1.tok.s", "_INBOX.busway.x"),  # nobody's inbox is everybody's
        ("_INBOX.busway.gw1.tok.s", "_INBOX.busway"),
        ("_INBOX.other.tok.s", "_INBOX"),
        ("_INBOX.a.s", ""),
        ("", GATEWAY_REPLY),
    ],
)
def test_a_stream_outside_its_senders_inbox_is_refused(stream: str, reply: str) -> None:
    assert not is_under_inbox(stream, reply)


@pytest.mark.parametrize(
    "reply", ["$JS.API.STREAM.PURGE.KV_busway_runtime", "busway.v1.admin.w.drain", "_INBOX.*", "x"]
)
def test_answers_go_to_inboxes_only(reply: str) -> None:
    assert not is_inbox(reply)
