"""The route of one request: events in, instructions out."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import CapacityError, EngineError, RequestError, WorkerLostError
from schemas.frames import TERMINAL_FRAMES, Failed, Finished, Timings, TokenLogprobs, Tokens
from schemas.handoff import BootstrapEndpoint, BootstrapInfo, Handoff, KvTicket
from schemas.hop import PrefillDone, PrefillEnded, PrefillFailed
from schemas.ids import AttemptId, Epoch, WorkerId
from schemas.request import Deadlines
from services.router.route import Route
from services.router.route_words import (
    AbortAsked,
    AbortLeg,
    Ask,
    Event,
    Instruction,
    LegAccepted,
    LegBusy,
    LegElsewhere,
    LegRefused,
    LegSent,
    LegSilent,
    RequestFailed,
    Say,
    StaysOnDecode,
    WorkerLeft,
)
from tests.router.conftest import MakeRequest, a_request

P, D, ATTEMPT, EPOCH = WorkerId("p"), WorkerId("d"), AttemptId("a" * 22), Epoch(1)
ROOM = BootstrapInfo(prefill_worker=P, epoch=EPOCH, room=7)
ROOM_ELSEWHERE = BootstrapInfo(prefill_worker=P, epoch=EPOCH, room=7, endpoint=BootstrapEndpoint(host="h", port=1))
TICKET = KvTicket(
    attempt_id=ATTEMPT,
    prefill_worker=P,
    epoch=EPOCH,
    block_ids=(1,),
    num_tokens=3,
    layout="l",
    lease_s=10.0,
    first_token_id=5,
)
DONE = PrefillDone(attempt_id=ATTEMPT, params=TICKET, timings=Timings(prefill_s=0.5))
BAD = RequestError("too long").record()


def kinds(instructions: list[Instruction]) -> list[str]:
    return [f"{type(one).__name__}:{one.leg}" if not isinstance(one, Say) else "Say" for one in instructions]


def failed(instructions: list[Instruction]) -> Failed:
    (say,) = [one for one in instructions if isinstance(one, Say)]
    (frame,) = say.frames
    assert isinstance(frame, Failed)
    return frame


def route_to(stage: str, make_request: MakeRequest, handoff: Handoff | None, *, room: BootstrapInfo = ROOM) -> Route:
    """A route that has come as far as `stage`: prefill_asked, prefill_held, decode_asked or decode_held."""
    route = Route(make_request(), handoff)
    route.start()
    steps: list[tuple[str, Event]] = [
        ("prefill_asked", LegSent("prefill", P)),
        ("prefill_held", LegAccepted("prefill", P, EPOCH)),
        (
            "decode_asked",
            DONE if handoff == "after_prefill" else LegAccepted("prefill", P, EPOCH, room),
        ),
        ("decode_asked", LegSent("decode", D)),
        ("decode_held", LegAccepted("decode", D, EPOCH)),
    ]
    if handoff is None:
        steps = steps[3:]
    for index, (name, event) in enumerate(steps):
        route.handle(event)
        if name == stage and all(later != stage for later, _ in steps[index + 1 :]):
            break
    return route


def test_after_prefill_asks_decode_with_the_result(make_request: MakeRequest) -> None:
    route = Route(make_request(), "after_prefill")
    assert kinds(route.start()) == ["Ask:prefill"]
    assert route.handle(LegSent("prefill", P)) == []
    assert route.handle(LegAccepted("prefill", P, EPOCH)) == []
    (ask,) = route.handle(DONE)
    assert ask == Ask(leg="decode", params=TICKET, prefill_worker=P, prefill_timings=Timings(prefill_s=0.5))
    assert not route.is_settled
    assert route.handle(LegAccepted("decode", D, EPOCH)) == []
    assert route.is_settled
    assert route.stage == "handed_over"


def test_a_rendezvous_asks_decode_with_prefills_ack(make_request: MakeRequest) -> None:
    route = Route(make_request(), "rendezvous")
    route.start()
    assert route.handle(LegSent("prefill", None)) == []
    (ask,) = route.handle(LegAccepted("prefill", P, EPOCH, ROOM))
    assert ask == Ask(leg="decode", params=ROOM, prefill_worker=P)


def test_aggregated_asks_decode_without_params(make_request: MakeRequest) -> None:
    assert Route(make_request(), None).start() == [Ask(leg="decode")]


@pytest.mark.parametrize("handoff", ["after_prefill", "rendezvous"])
def test_a_prompt_that_stays_is_decodes_alone(make_request: MakeRequest, handoff: Handoff) -> None:
    route = Route(make_request(), handoff)
    assert kinds(route.start()) == ["Ask:prefill"]
    assert route.handle(StaysOnDecode()) == []
    assert route.handle(LegSent("decode", D)) == []
    assert kinds(route.handle(LegAccepted("decode", D, EPOCH))) == []
    assert (route.is_settled, route.stage) == (True, "handed_over")
    assert kinds(route.handle(AbortAsked("client"))) == ["AbortLeg:decode"]


def test_a_prompt_whose_decode_worker_is_busy_goes_the_usual_way(make_request: MakeRequest) -> None:
    route = Route(make_request(), "after_prefill")
    route.start()
    route.handle(StaysOnDecode())
    assert route.handle(LegBusy("decode")) == [Ask(leg="prefill")]
    route.handle(LegAccepted("prefill", P, EPOCH))
    assert kinds(route.handle(DONE)) == ["Ask:decode"]
    assert kinds(route.handle(LegBusy("decode"))) == ["Ask:decode"]


def test_a_result_that_overtakes_its_ack_waits_for_it(make_request: MakeRequest) -> None:
    route = route_to("prefill_asked", make_request, "after_prefill")
    assert route.handle(DONE) == []
    assert kinds(route.handle(LegAccepted("prefill", P, EPOCH))) == ["Ask:decode"]


def test_a_prefill_that_ends_the_request_ends_it(make_request: MakeRequest) -> None:
    route = Route(make_request(4, resume=(9, 9)), "after_prefill")
    route.start()
    route.handle(LegAccepted("prefill", P, EPOCH))
    logprobs = TokenLogprobs(logprob=-0.5)
    ended = PrefillEnded(attempt_id=ATTEMPT, token_id=5, reason="stop", num_cached_tokens=2, logprobs=logprobs)
    (say,) = route.handle(ended)
    assert isinstance(say, Say)
    tokens, finished = say.frames
    assert tokens == Tokens(attempt_id=ATTEMPT, seq=2, token_ids=(5,), logprobs=(logprobs,))
    assert isinstance(finished, Finished)
    assert (finished.seq, finished.reason) == (3, "stop")
    usage = finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (4, 3, 2)
    assert route.is_settled


def test_a_busy_worker_never_held_the_leg_and_another_is_asked(make_request: MakeRequest) -> None:
    route = route_to("prefill_asked", make_request, "after_prefill")
    assert kinds(route.handle(LegBusy("prefill"))) == ["Ask:prefill"]
    route = route_to("decode_asked", make_request, "after_prefill")
    (ask,) = route.handle(LegBusy("decode"))
    assert isinstance(ask, Ask)
    assert ask.params == TICKET


def test_a_silent_prefill_is_aborted_and_the_attempt_fails_as_lost(make_request: MakeRequest) -> None:
    route = route_to("prefill_asked", make_request, "after_prefill")
    instructions = route.handle(LegSilent("prefill"))
    assert kinds(instructions) == ["AbortLeg:prefill", "Say"]
    assert failed(instructions).error.code == WorkerLostError.code
    assert route.is_settled


def test_a_refusal_keeps_its_own_code(make_request: MakeRequest) -> None:
    route = route_to("prefill_asked", make_request, "after_prefill")
    assert failed(route.handle(LegRefused("prefill", BAD))).error == BAD
    route = route_to("prefill_held", make_request, "after_prefill")
    assert failed(route.handle(PrefillFailed(attempt_id=ATTEMPT, error=BAD))).error == BAD


def test_a_refusal_by_decode_frees_prefill_at_once(make_request: MakeRequest) -> None:
    route = route_to("decode_asked", make_request, "after_prefill")
    full = CapacityError("full").record()
    instructions = route.handle(LegRefused("decode", full))
    assert kinds(instructions) == ["Say", "AbortLeg:prefill"]
    assert failed(instructions).error == full


def test_a_request_that_another_router_has_is_left_to_it_without_a_word(make_request: MakeRequest) -> None:
    route = route_to("prefill_asked", make_request, "after_prefill")
    assert route.handle(LegElsewhere("prefill")) == []
    assert route.is_settled
    route = route_to("decode_asked", make_request, "after_prefill")
    assert kinds(route.handle(LegElsewhere("decode"))) == ["AbortLeg:prefill"]


def test_a_failed_prefill_behind_a_held_decode_is_told_to_decode_alone(make_request: MakeRequest) -> None:
    route = route_to("decode_held", make_request, "rendezvous", room=ROOM_ELSEWHERE)
    error = EngineError("boom").record()
    (abort,) = route.handle(PrefillFailed(attempt_id=ATTEMPT, error=error))
    assert abort == AbortLeg(leg="decode", reason="boom", error=error)


@pytest.mark.parametrize("event", [PrefillFailed(attempt_id=ATTEMPT, error=BAD), WorkerLeft(P, EPOCH)])
def test_a_held_decode_that_hears_from_its_peer_judges_a_lost_prefill(make_request: MakeRequest, event: Event) -> None:
    route = route_to("decode_held", make_request, "rendezvous")
    assert route.handle(event) == []
    assert route.stage == "handed_over"
    assert kinds(route.handle(AbortAsked("client"))) == ["AbortLeg:decode"]


@pytest.mark.parametrize("handoff", ["after_prefill", "rendezvous"])
def test_an_abort_reaches_both_legs_in_any_phase(make_request: MakeRequest, handoff: Handoff) -> None:
    expected = {
        "prefill_asked": {"AbortLeg:prefill"},
        "prefill_held": {"AbortLeg:prefill"},
        "decode_asked": {"AbortLeg:prefill", "AbortLeg:decode"},
        "decode_held": {"AbortLeg:prefill", "AbortLeg:decode"},
    }
    for stage, legs in expected.items():
        route = route_to(stage, make_request, handoff)
        assert set(kinds(route.handle(AbortAsked("client")))) == legs
        assert route.stage == "ended"


def test_an_ack_after_the_abort_is_answered_by_an_abort(make_request: MakeRequest) -> None:
    route = route_to("prefill_asked", make_request, "after_prefill")
    route.handle(AbortAsked("client"))
    assert not route.is_settled
    assert kinds(route.handle(LegAccepted("prefill", P, EPOCH))) == ["AbortLeg:prefill"]
    assert kinds(route.handle(DONE)) == ["AbortLeg:prefill"]
    assert route.is_settled


def test_a_prefill_worker_that_dies_computing_fails_the_request_as_lost(make_request: MakeRequest) -> None:
    route = route_to("prefill_held", make_request, "after_prefill")
    assert failed(route.handle(WorkerLeft(P, EPOCH))).error.code == WorkerLostError.code
    route = route_to("decode_held", make_request, "rendezvous", room=ROOM_ELSEWHERE)
    (abort,) = route.handle(WorkerLeft(P, EPOCH))
    assert isinstance(abort, AbortLeg)
    assert abort.leg == "decode"
    assert abort.error is not None
    assert abort.error.code == WorkerLostError.code


def test_a_worker_that_left_before_it_acked_is_judged_by_its_hop(make_request: MakeRequest) -> None:
    route = route_to("decode_asked", make_request, "after_prefill")
    assert route.handle(WorkerLeft(D, EPOCH)) == []
    assert kinds(route.handle(LegBusy("decode"))) == ["Ask:decode"]


def test_another_epoch_of_a_worker_leaves_a_leg_alone(make_request: MakeRequest) -> None:
    route = route_to("prefill_held", make_request, "after_prefill")
    assert route.handle(WorkerLeft(P, Epoch(EPOCH - 1))) == []


def test_a_prefill_worker_that_dies_after_the_handover_is_decodes_to_judge(make_request: MakeRequest) -> None:
    assert route_to("decode_held", make_request, "after_prefill").handle(WorkerLeft(P, EPOCH)) == []
    route = route_to("decode_held", make_request, "rendezvous")
    route.handle(PrefillDone(attempt_id=ATTEMPT, params=ROOM))
    assert route.handle(WorkerLeft(P, EPOCH)) == []


def test_a_decode_worker_that_dies_frees_prefill(make_request: MakeRequest) -> None:
    route = route_to("decode_held", make_request, "after_prefill")
    assert kinds(route.handle(WorkerLeft(D, EPOCH))) == ["AbortLeg:prefill"]


def test_the_deadline_watched_follows_the_phase(make_request: MakeRequest) -> None:
    deadlines = Deadlines(queue=1.0, prefill=2.0, transfer=3.0, total=9.0)
    route = Route(make_request(deadlines=deadlines), "after_prefill")
    route.start()
    phases = []
    for event in (LegAccepted("prefill", P, EPOCH), DONE, LegAccepted("decode", D, EPOCH)):
        due = route.due()
        assert due is not None
        phases.append((due.at, due.phase))
        route.handle(event)
    assert phases == [(1.0, "queue"), (2.0, "prefill"), (3.0, "transfer")]
    assert route.due() is None


@dataclass
class World:
    """Workers and a network that deliver in any order, hold what they accept, and forget what is aborted."""

    route: Route
    rng: random.Random
    is_group: bool
    mail: list[Event] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    holding: set[str] = field(default_factory=set)
    terminals: int = 0
    may_stay: bool = False

    def carry_out(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            match one:
                case Ask():
                    self.ask(one)
                case AbortLeg():
                    self.holding.discard(one.leg)
                    if one.error is not None:
                        assert one.leg == "decode"
                        assert self.route.stage == "ended"
                        self.terminals += 1
                case Say(frames):
                    assert not self.decode_acked, "the router spoke after decode took over"
                    self.terminals += sum(isinstance(frame, TERMINAL_FRAMES) for frame in frames)

    decode_acked: bool = False

    def ask(self, ask: Ask) -> None:
        if self.may_stay and ask.leg == "prefill" and "decode" not in self.asked and self.rng.random() < 0.7:
            assert self.route.handle(StaysOnDecode()) == []
            ask = Ask(leg="decode")
        rendezvous = self.route.handoff == "rendezvous" and ask.leg == "prefill"
        worker = P if ask.leg == "prefill" else D
        self.asked.append(ask.leg)
        outcome = self.rng.choice(["accept", "accept", "accept", "busy", "elsewhere", "refuse", "silent"])
        if self.asked.count(ask.leg) > 3:
            outcome = "refuse"
        if outcome == "accept":
            self.holding.add(ask.leg)
            self.mail.append(LegAccepted(ask.leg, worker, EPOCH, ROOM if rendezvous else None))
            if ask.leg == "prefill":
                params = ROOM if self.route.handoff == "rendezvous" else TICKET
                self.mail.append(
                    self.rng.choice(
                        [
                            PrefillDone(attempt_id=ATTEMPT, params=params),
                            PrefillDone(attempt_id=ATTEMPT, params=params),
                            PrefillFailed(attempt_id=ATTEMPT, error=BAD),
                            *([PrefillEnded(attempt_id=ATTEMPT, token_id=1, reason="stop")] if not rendezvous else []),
                        ]
                    )
                )
        else:
            events: dict[str, Event] = {
                "busy": LegBusy(ask.leg),
                "elsewhere": LegElsewhere(ask.leg),
                "refuse": LegRefused(ask.leg, BAD),
                "silent": LegSilent(ask.leg),
            }
            self.mail.append(events[outcome])
        self.carry_out(self.route.handle(LegSent(ask.leg, None if self.is_group else worker)))

    def deliver(self, event: Event) -> None:
        if isinstance(event, PrefillFailed | PrefillEnded):
            self.holding.discard("prefill")
        if isinstance(event, PrefillDone) and self.route.handoff == "rendezvous":
            self.holding.discard("prefill")
        was_routing = self.route.stage == "routing"
        self.carry_out(self.route.handle(event))
        if isinstance(event, LegAccepted) and event.leg == "decode" and was_routing:
            self.decode_acked = True


@settings(max_examples=400, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([None, "after_prefill", "rendezvous"]),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from(["abort", "deadline", "left_p", "left_d"]), max_size=2),
)
def test_whatever_happens_one_holder_ends_the_request_and_no_leg_is_left(
    seed: int, handoff: Handoff | None, is_group: bool, may_stay: bool, incidents: list[str]
) -> None:
    rng = random.Random(seed)
    route = Route(a_request(), handoff)
    world = World(route, rng, is_group, may_stay=may_stay)
    world.carry_out(route.start())
    happenings: dict[str, Event] = {
        "abort": AbortAsked("client"),
        "deadline": RequestFailed(BAD),
        "left_p": WorkerLeft(P, EPOCH),
        "left_d": WorkerLeft(D, EPOCH),
    }
    for _ in range(40):
        if incidents and (not world.mail or rng.random() < 0.3):
            incident = incidents.pop()
            if incident.startswith("left"):
                world.holding.discard("prefill" if incident == "left_p" else "decode")
            world.carry_out(route.handle(happenings[incident]))
        elif world.mail:
            world.deliver(world.mail.pop(rng.randrange(len(world.mail))))
    assert world.terminals <= 1
    assert route.is_settled
    if route.stage == "ended":
        assert not world.holding, "a leg was left behind"
