"""Who may be asked for whose ids."""

from typing import NamedTuple

import msgspec
import pytest

from bus.subjects import Subjects
from schemas.errors import UnavailableError
from schemas.ids import Epoch, WorkerId
from schemas.worker import RuntimeConfig
from services.config import PolicyName
from services.router.dispatch import Dispatcher
from services.router.loads import LoadBook
from services.router.policies import Leg, Picker
from services.router.route_words import Ask
from tests.router.conftest import MakeConfig, MakeRequest


class Fleet(NamedTuple):
    workers: dict[WorkerId, RuntimeConfig]


COMPAT_OF_LEG: dict[Leg, str] = {"prefill": "", "decode": "c1"}


def a_dispatcher(
    configs: list[RuntimeConfig], book: LoadBook | None = None, policy: PolicyName = "round_robin"
) -> Dispatcher:
    return Dispatcher(
        Subjects(),
        Fleet({config.worker_id: config for config in configs}),
        Picker(policy),
        book or LoadBook(Epoch(1)),
        router="r",
        epoch=Epoch(1),
        is_strict=False,
        result_subject="_INBOX.r.p",
    )


def test_a_prefill_worker_that_vanished_is_no_overload(make_config: MakeConfig, make_request: MakeRequest) -> None:
    """Nobody waits for it: decode computes the prompt, as a new attempt is told at once."""
    book = LoadBook(Epoch(1))
    dispatcher = a_dispatcher([make_config("p1", "prefill"), make_config("d1", "decode")], book)
    request = make_request()
    path = dispatcher.path(request)
    hop = dispatcher.choose(Ask(leg="prefill"), request, path, tried=set(), compat="")
    dispatcher.not_held(hop, is_silent=True)
    with pytest.raises(UnavailableError) as raised:
        dispatcher.choose(Ask(leg="prefill"), request, path, tried={WorkerId("p1")}, compat="")
    assert raised.value.retry_after_s == 0.0
    again = dispatcher.path(request)
    assert dispatcher.choose(Ask(leg="decode"), request, again, tried=set(), compat="").worker == "d1"


def test_ids_of_one_tokenizer_never_go_to_workers_of_another(
    make_config: MakeConfig, make_request: MakeRequest
) -> None:
    """A rolling update: two digests serve one name, and the gateway has encoded the prompt for one of them."""
    configs = [make_config("old", "both", model_digest="d1"), make_config("new", "both", model_digest="d2")]
    dispatcher = a_dispatcher(configs)

    def chosen(model_digest: str) -> set[WorkerId | None]:
        request = msgspec.structs.replace(make_request(), model_digest=model_digest)
        path = dispatcher.path(request)
        return {dispatcher.choose(Ask(leg="decode"), request, path, tried=set(), compat="").worker for _ in range(4)}

    assert chosen("d1") == {"old"}
    assert chosen("d2") == {"new"}
    assert chosen("") == {"old", "new"}
    with pytest.raises(UnavailableError):
        chosen("d3")


def test_a_leg_names_the_process_it_is_for(make_config: MakeConfig, make_request: MakeRequest) -> None:
    epochs_of: dict[PolicyName, tuple[int | None, int | None]] = {"round_robin": (3, 4), "queue": (None, None)}
    configs = [
        msgspec.structs.replace(make_config("p1", "prefill"), epoch=Epoch(3)),
        msgspec.structs.replace(make_config("d1", "decode"), epoch=Epoch(4)),
    ]
    request = make_request()
    for policy, epochs in epochs_of.items():
        dispatcher = a_dispatcher(configs, policy=policy)
        path = dispatcher.path(request)
        hops = [
            dispatcher.choose(Ask(leg=leg), request, path, tried=set(), compat=compat)
            for leg, compat in COMPAT_OF_LEG.items()
        ]
        assert tuple(hop.message.worker_epoch for hop in hops) == epochs


def test_a_queue_group_with_a_member_too_small_for_a_request_is_passed_by(
    make_config: MakeConfig, make_request: MakeRequest
) -> None:
    """NATS picks any member; a worker about to join is one before the router hears that it is ready."""
    configs = [make_config("p1", "prefill"), make_config("d1", "decode")]
    small = [
        msgspec.structs.replace(one, worker_id=WorkerId(f"small-{one.role}"), max_context_tokens=20, state="starting")
        for one in configs
    ]
    dispatcher = a_dispatcher([*configs, *small], policy="queue")

    def chosen(num_tokens: int) -> list[WorkerId | None]:
        request = make_request(num_tokens)
        path = dispatcher.path(request)
        return [
            dispatcher.choose(Ask(leg=leg), request, path, tried=set(), compat=compat).worker
            for leg, compat in COMPAT_OF_LEG.items()
        ]

    assert chosen(12) == [None, None]
    assert chosen(13) == ["p1", "d1"]
