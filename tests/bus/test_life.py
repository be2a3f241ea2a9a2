"""The life of a request against a naive model of the world: whatever happens in whatever order, every token comes once
and in order, one attempt at a time, one end.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bus.life import Life
from bus.life_events import (
    AbortAt,
    Acked,
    AskResend,
    CallerClosed,
    Deliver,
    End,
    Event,
    FrameCame,
    HolderLeft,
    Instruction,
    LossNoticed,
    NotTaken,
    Reconnected,
    ResendAgreed,
    ResendFailed,
    Send,
    TimerFired,
)
from bus.life_table import TABLE, State, Turn, render_diagram
from bus.patience import Patience
from schemas.errors import (
    AckTimeoutError,
    BusUnavailableError,
    BuswayError,
    CapacityError,
    DeadlineError,
    KvTransferFailedError,
    NoRespondersError,
    RequestError,
    StreamBrokenError,
    UnavailableError,
    WorkerLostError,
)
from schemas.frames import (
    Accepted,
    Begun,
    Decoding,
    Failed,
    Finished,
    FinishReason,
    Frame,
    Prefilling,
    Timings,
    TokenLogprobs,
    Tokens,
    Usage,
)
from schemas.ids import AttemptId, RequestId, WorkerId
from schemas.request import Deadlines, GenerateRequest, Sampling, StopConditions, StreamAddress

PAGE = Path(__file__).parents[2] / "ARCHITECTURE.md"
START = 1000.0
P, D = WorkerId("p"), WorkerId("d")
RETRYABLE = (WorkerLostError("x"), KvTransferFailedError("x"), UnavailableError("x", retry_after_s=0.0))
FINAL = (RequestError("x"), DeadlineError("x", phase="decode"))
PATIENCE = Patience()


def a_request(max_tokens: int = 6, **fields: object) -> GenerateRequest:
    values: dict[str, object] = {
        "request_id": RequestId("r"),
        "attempt_id": AttemptId("attempt-0"),
        "model": "m",
        "token_ids": (1, 2, 3),
        "sampling": Sampling(seed=1, temperature=0.0),
        "stop": StopConditions(max_tokens=max_tokens),
        "stream": StreamAddress(subject="_INBOX.x.s"),
    }
    return GenerateRequest(**(values | fields))  # type: ignore[arg-type]


def a_life(request: GenerateRequest, **settings: object) -> Life:
    numbers = itertools.count(1)
    return Life(
        request,
        START,
        new_id=lambda: AttemptId(f"attempt-{next(numbers)}"),
        jitter=lambda: 0.5,
        **settings,  # type: ignore[arg-type]
    )


class Holders:
    """What an honest worker sends of an attempt: ids are their positions; `sent` counts those sent so far."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.sent = len(request.resume)
        self.is_ended = False
        self.reason: FinishReason = "length"
        self.failure: list[Frame] = []

    def lifecycle(self) -> list[Frame]:
        attempt = self.request.attempt_id
        return [Accepted(attempt, "r"), Prefilling(attempt, P), Decoding(attempt, D, True)]

    def tokens(self, first: int, last: int) -> Tokens:
        ids = tuple(range(first, last))
        return Tokens(self.request.attempt_id, first, ids, tuple(TokenLogprobs(-float(one)) for one in ids))

    def next_frames(self, num: int) -> list[Frame]:
        """The next step: some tokens, with the end once there are enough."""
        if self.is_ended:
            return []
        last = min(self.sent + num, self.request.stop.max_tokens)
        frames: list[Frame] = [self.tokens(self.sent, last)] if last > self.sent else []
        self.sent = last
        if last == self.request.stop.max_tokens:
            self.is_ended = True
            frames.append(self.finished())
        return frames

    def finished(self) -> Finished:
        # An engine that takes resumed ids for prompt: the owner knows better.
        num_resumed = len(self.request.resume)
        usage = Usage(prompt_tokens=3 + num_resumed, completion_tokens=self.sent, cached_tokens=3 + num_resumed)
        return Finished(self.request.attempt_id, self.sent, self.reason, usage)

    def again(self, from_seq: int) -> list[Frame]:
        frames: list[Frame] = [self.tokens(from_seq, self.sent)] if from_seq < self.sent else []
        if self.failure:
            return [*frames, *self.failure]
        return [*frames, self.finished()] if self.is_ended else frames

    def fail(self, error: BuswayError) -> list[Frame]:
        if not self.is_ended:
            self.is_ended = True
            self.failure = [Failed(self.request.attempt_id, self.sent, error.record())]
        return self.failure


class Noted(dict[tuple[State, Turn], State]):
    """The table, and which of its turns were taken."""

    def __init__(self) -> None:
        super().__init__(TABLE)
        self.turns: set[tuple[State, Turn]] = set()

    def __getitem__(self, turn: tuple[State, Turn]) -> State:
        self.turns.add(turn)
        return super().__getitem__(turn)


@pytest.fixture(scope="module", autouse=True)
def noted() -> Iterator[Noted]:
    """The table that every life of this module goes by."""
    table = Noted()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bus.life.TABLE", table)
        yield table


class LifeMachine(RuleBasedStateMachine):
    """Rules are what the world may do; `take` is the naive model of what the owner may order."""

    @initialize(
        max_tokens=st.sampled_from([1, 2, 5, 40]),
        total=st.sampled_from([None, None, None, START + 30.0]),
        first_token=st.sampled_from([None, None, None, START + 8.0]),
    )
    def begin(self, max_tokens: int, total: float | None, first_token: float | None) -> None:
        self.now = START
        self.life = a_life(a_request(max_tokens, deadlines=Deadlines(total=total, first_token=first_token)))
        self.ids: list[int] = []
        self.sends: list[GenerateRequest] = []
        self.holders: dict[AttemptId, Holders] = {}
        self.in_flight: list[Frame] = []
        self.asked: list[AskResend] = []
        self.given_up: set[AttemptId] = set()
        self.heard: set[AttemptId] = set()
        self.unanswered: list[AttemptId] = []
        self.ends: list[End] = []
        self.is_closed = False
        self.has_finished = False
        self.take(self.life.start(self.now))

    def tell(self, event: Event) -> None:
        self.take(self.life.handle(event, self.now))

    def take(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(request):
                    self.on_send(request)
                case AskResend():
                    assert instruction.attempt_id == self.sends[-1].attempt_id
                    assert instruction.from_seq == len(self.ids)
                    self.asked.append(instruction)
                case AbortAt(attempt_id):
                    self.given_up.add(attempt_id)
                case Deliver(frame):
                    self.on_deliver(frame)
                case End():
                    self.ends.append(instruction)
                    assert (instruction.error is None) == self.has_finished

    def on_send(self, request: GenerateRequest) -> None:
        assert not self.ends
        assert not self.is_closed
        assert request.resume == tuple(self.ids)
        assert request.attempt_id not in self.holders
        assert not self.ids or request.deadlines.first_token is None
        if self.sends:
            last = self.sends[-1].attempt_id
            assert last in self.given_up or last not in self.heard, "two live attempts"
        self.sends.append(request)
        self.holders[request.attempt_id] = Holders(request)
        self.unanswered.append(request.attempt_id)

    def on_deliver(self, frame: Frame) -> None:
        assert not self.ends
        assert not self.is_closed
        assert not self.has_finished
        assert frame.attempt_id == self.sends[-1].attempt_id
        if isinstance(frame, Tokens):
            assert frame.token_ids
            assert frame.seq == len(self.ids)
            assert frame.logprobs == tuple(TokenLogprobs(-float(one)) for one in frame.token_ids)
            self.ids += frame.token_ids
        elif isinstance(frame, Finished):
            self.has_finished = True
            assert frame.seq == len(self.ids)
            assert frame.reason == "stop" or len(self.ids) == self.sends[0].stop.max_tokens
            usage = frame.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (3, len(self.ids))
            assert usage.cached_tokens <= 3
            assert usage.num_resubmits == self.life.num_resubmits

    # The usual, which takes a life to where more can happen to it.

    @rule(num=st.integers(1, 4), is_twice=st.booleans())
    def all_goes_well(self, num: int, is_twice: bool) -> None:
        while self.unanswered:
            self.router_says("ack")
        holder = self.holder(0)
        for frame in [*holder.lifecycle(), *holder.next_frames(num)]:
            for _ in range(1 + is_twice):
                self.arrive(frame)

    @rule(error=st.sampled_from(RETRYABLE))
    def the_holder_fails_and_another_is_found(self, error: BuswayError) -> None:
        for frame in self.holder(0).fail(error):
            self.arrive(frame)
        self.pass_time(1.0)

    @rule(num=st.integers(1, 3))
    def a_step_is_lost_and_the_next_arrives(self, num: int) -> None:
        self.holder(0).next_frames(num)
        for frame in self.holder(0).next_frames(1):
            self.arrive(frame)

    # Routers answer, or don't.

    @precondition(lambda self: self.unanswered)
    @rule(what=st.sampled_from([*["ack"] * 12, *["silent", "outage"] * 3, "busy", "full", "nobody", "refused"]))
    def router_answers(self, what: str) -> None:
        self.router_says(what)

    def router_says(self, what: str) -> None:
        if not self.unanswered:
            return
        attempt = self.unanswered.pop(0)
        answers: dict[str, Event] = {
            "ack": Acked(attempt, "r"),
            "busy": NotTaken(attempt, CapacityError("full"), is_busy=True),
            "full": NotTaken(attempt, CapacityError("full", retry_after_s=1.0)),
            "nobody": NotTaken(attempt, NoRespondersError("x")),
            "silent": NotTaken(attempt, AckTimeoutError("x")),
            "outage": NotTaken(attempt, BusUnavailableError("x")),
            "refused": NotTaken(attempt, RequestError("x")),
        }
        if what == "ack":
            self.heard.add(attempt)
        self.tell(answers[what])

    # Holders speak; the wire drops, delays, reorders lifecycles, and delivers twice.

    @rule(which=st.integers(0, 3), num=st.integers(1, 3), is_lost=st.booleans())
    def holder_steps(self, which: int, num: int, is_lost: bool) -> None:
        holder = self.holder(which)
        frames = holder.next_frames(num)
        if not is_lost:
            self.in_flight += frames

    @rule(which=st.integers(0, 3), at=st.integers(0, 2))
    def holder_says_that_it_has_it(self, which: int, at: int) -> None:
        self.in_flight.append(self.holder(which).lifecycle()[at])

    @rule(which=st.integers(0, 3), error=st.sampled_from(4 * RETRYABLE + FINAL))
    def holder_fails(self, which: int, error: BuswayError) -> None:
        self.in_flight += self.holder(which).fail(error)

    @precondition(lambda self: self.in_flight)
    @rule(is_twice=st.booleans(), is_backlog=st.booleans())
    def a_frame_arrives(self, is_twice: bool, is_backlog: bool) -> None:
        frame = self.in_flight.pop(0)
        for _ in range(1 + is_twice):
            self.arrive(frame, is_backlog=is_backlog)

    def arrive(self, frame: Frame, *, is_backlog: bool = False) -> None:
        if isinstance(frame, Failed):
            self.given_up.add(frame.attempt_id)  # nobody holds it any more
        if self.life.is_out:
            self.heard.add(frame.attempt_id)
        self.tell(FrameCame(frame, is_backlog))

    def holder(self, which: int) -> Holders:
        holders = list(self.holders.values())
        return holders[-1 - min(which, len(holders) - 1)]

    def steps(self, num: int) -> None:
        for frame in self.holder(0).next_frames(num):
            self.arrive(frame)

    def says(self, at: int) -> None:
        self.arrive(self.holder(0).lifecycle()[at])

    def stops(self) -> None:
        """By a token that the owner doesn't know as an end, and has; or had."""
        holder = self.holder(0)
        if not holder.is_ended:
            holder.is_ended, holder.reason = True, "stop"
            self.arrive(holder.finished())

    # Whoever is asked to send again answers somehow.

    @rule(
        what=st.sampled_from([*["agree"] * 5, "names", "ignorant", "nobody", "silent", "outage"]),
        is_lost=st.booleans(),
    )
    def asked_one_answers(self, what: str, is_lost: bool) -> None:
        if not self.asked:
            return
        ask = self.asked.pop(0)
        errors: dict[str, BuswayError] = {
            "ignorant": StreamBrokenError("x"),
            "nobody": NoRespondersError("x"),
            "silent": AckTimeoutError("x"),
            "outage": BusUnavailableError("x"),
        }
        if what in errors:
            self.tell(ResendFailed(ask.attempt_id, errors[what]))
        elif what == "names":
            self.tell(ResendAgreed(ask.attempt_id, D if ask.holder.service == "router" else ask.holder.id))
        else:
            holder = self.holders[ask.attempt_id]
            if not is_lost and ask.holder.service == "worker":
                self.in_flight += holder.again(ask.from_seq)
            self.tell(ResendAgreed(ask.attempt_id, ask.holder.id))

    # The rest of the world.

    @rule(who=st.sampled_from(["r", "p", "d", "other"]))
    def leaves(self, who: str) -> None:
        self.tell(HolderLeft(who))

    @rule(event=st.sampled_from([LossNoticed(), Reconnected()]))
    def frames_may_be_lost(self, event: Event) -> None:
        self.tell(event)

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.pass_time(seconds)

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        for _ in range(50):
            wake_at = self.life.wake_at
            if wake_at is None or wake_at > until:
                break
            self.now = max(self.now, wake_at)
            self.tell(TimerFired())
        self.now = until

    @rule(is_patient=st.integers(0, 99))
    def caller_leaves(self, is_patient: int) -> None:
        if not is_patient:
            self.tell(CallerClosed())
            self.is_closed = True

    @invariant()
    def what_holds_always(self) -> None:
        if not hasattr(self, "life"):
            return
        assert self.ids == list(range(len(self.ids)))
        assert len(self.ends) <= 1
        assert self.life.num_resubmits <= PATIENCE.max_resubmits
        assert (self.life.state == "over") == (bool(self.ends) or self.is_closed)
        if self.life.state == "over":
            assert self.life.wake_at is None

    def teardown(self) -> None:
        """In a world that is well again, every life ends, and well unless it had ended or was out of time."""
        if not hasattr(self, "life"):
            return
        self.in_flight.clear()
        for _ in range(100):
            if self.life.state == "over":
                return
            while self.unanswered:
                attempt = self.unanswered.pop(0)
                self.heard.add(attempt)
                self.tell(Acked(attempt, "r"))
            holder = self.holders[self.sends[-1].attempt_id]
            if holder.request.attempt_id not in self.given_up and not holder.is_ended:
                for frame in [*holder.lifecycle(), *holder.next_frames(100)]:
                    self.arrive(frame)
            while self.asked:
                ask = self.asked.pop(0)
                self.tell(ResendAgreed(ask.attempt_id, D if ask.holder.service == "router" else ask.holder.id))
                for frame in self.holders[ask.attempt_id].again(len(self.ids)):
                    self.arrive(frame)
            wake_at = self.life.wake_at
            if wake_at is not None:
                self.now = max(self.now, wake_at)
                self.tell(TimerFired())
        pytest.fail(f"it never ends: {self.life.state}")


LifeMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLife = LifeMachine.TestCase


# Besides random worlds, every state meets everything that can happen once; the world's own model judges.


def _stream(world: LifeMachine) -> None:
    world.all_goes_well(1, False)


def _fall_silent(world: LifeMachine) -> None:
    world.pass_time(2.5)


def _lose(world: LifeMachine) -> None:
    for frame in world.holder(0).fail(WorkerLostError("x")):
        world.arrive(frame)


WAYS: dict[str, list[Callable[[LifeMachine], None]]] = {
    "sent": [],
    "held": [lambda world: world.router_says("ack")],
    "held, a worker's": [lambda world: world.router_says("ack"), lambda world: world.says(2)],
    "streaming": [_stream],
    "mending": [_stream, lambda world: world.a_step_is_lost_and_the_next_arrives(1)],
    "mending, nothing missing": [_stream, _fall_silent],
    "mending, without a token": [lambda world: world.router_says("ack"), _fall_silent],
    "waiting": [_stream, _lose],
    "over": [lambda world: world.caller_leaves(0)],
}
HAPPENINGS: dict[str, Callable[[LifeMachine], None]] = {
    **{
        f"the router: {what}": partial(LifeMachine.router_says, what=what)
        for what in ("ack", "busy", "full", "nobody", "silent", "outage", "refused")
    },
    **{
        f"asked: {what}": partial(LifeMachine.asked_one_answers, what=what, is_lost=False)
        for what in ("agree", "names", "ignorant", "nobody", "silent", "outage")
    },
    **{f"{who} leaves": partial(LifeMachine.leaves, who=who) for who in ("r", "p", "d")},
    **{f"says {at}": partial(LifeMachine.says, at=at) for at in range(3)},
    "a token": lambda world: world.steps(1),
    "the last tokens": lambda world: world.steps(40),
    "the end at once": lambda world: world.stops(),
    "a step is lost": lambda world: world.a_step_is_lost_and_the_next_arrives(1),
    "fails, another may not": _lose,
    "fails for good": lambda world: [world.arrive(frame) for frame in world.holder(0).fail(RequestError("x"))],
    "loss noticed": lambda world: world.tell(LossNoticed()),
    "reconnected": lambda world: world.tell(Reconnected()),
    "a moment": lambda world: world.pass_time(1.0),
    "a while": lambda world: world.pass_time(10.0),
    "its deadline": lambda world: world.pass_time(31.0),
    "the caller leaves": lambda world: world.caller_leaves(0),
}


@pytest.mark.parametrize("state", WAYS)
def test_every_state_meets_everything_that_can_happen(state: str) -> None:
    for happening in HAPPENINGS.values():
        for total in (None, START + 30.0):
            world = LifeMachine()
            world.begin(20, total, None)
            for step in WAYS[state]:
                step(world)
            assert world.life.state == state.partition(",")[0]
            happening(world)
            world.what_holds_always()
            world.teardown()


def test_a_request_may_be_late_or_unwanted_before_it_is_sent() -> None:
    late = a_life(a_request(deadlines=Deadlines(total=START - 1.0)))
    (end,) = late.start(START)
    assert isinstance(end, End)
    assert isinstance(end.error, DeadlineError)
    unwanted = a_life(a_request())
    assert unwanted.handle(CallerClosed(), START) == []
    assert late.state == unwanted.state == "over"


def test_a_request_may_run_out_of_time_between_two_attempts() -> None:
    world = LifeMachine()
    world.begin(20, START + 0.01, None)
    _stream(world)
    _lose(world)
    assert world.life.state == "waiting"
    world.pass_time(1.0)
    (end,) = world.ends
    assert isinstance(end.error, DeadlineError)


def test_that_was_every_turn_of_the_table(noted: Noted) -> None:
    assert TABLE.keys() - noted.turns == set()


def test_a_resumed_attempt_lost_before_its_first_token_is_sent_anew_whatever_its_engine() -> None:
    """Nobody had told yet whether it could have gone on exactly."""
    life = a_life(a_request(sampling=Sampling(seed=1, temperature=1.0, is_user_seeded=True)))
    (send,) = life.start(START)
    assert isinstance(send, Send)
    for frame in (*Holders(send.request).lifecycle(), Tokens(send.request.attempt_id, 0, (0, 1))):
        life.handle(FrameCame(frame), START)
    for number in (1, 2):
        attempt = life.attempt.id
        life.handle(FrameCame(Failed(attempt, 2, WorkerLostError("x").record())), START + number)
        assert life.state == "waiting"
        assert life.wake_at is not None
        (send,) = life.handle(TimerFired(), life.wake_at)
        assert isinstance(send, Send)
        assert send.request.resume == (0, 1)
        life.handle(FrameCame(Accepted(send.request.attempt_id, "r")), START + number)


@pytest.mark.parametrize(("told", "num_first", "hit"), [(2, 2, 2), (None, 2, 0), (2, 0, 3)])
def test_the_prompts_hit_is_that_of_the_attempt_that_gave_the_first_token(
    told: int | None, num_first: int, hit: int
) -> None:
    """The next one finds in the cache what this one has put there: all 3 tokens."""
    life = a_life(a_request())
    (send,) = life.start(START)
    assert isinstance(send, Send)
    first = Holders(send.request)
    for frame in [*first.lifecycle(), *([Begun(send.request.attempt_id, Timings(), told)] if num_first else [])]:
        life.handle(FrameCame(frame), START)
    for frame in (*(first.next_frames(num_first) if num_first else []), *first.fail(WorkerLostError("x"))):
        life.handle(FrameCame(frame), START)
    assert life.wake_at is not None
    (send,) = life.handle(TimerFired(), life.wake_at)
    assert isinstance(send, Send)
    second = Holders(send.request)
    delivered: list[Frame] = []
    for frame in [*second.lifecycle(), Begun(send.request.attempt_id, Timings(), 3), *second.next_frames(100)]:
        delivered += [one.frame for one in life.handle(FrameCame(frame), START) if isinstance(one, Deliver)]
    assert isinstance(delivered[-1], Finished)
    assert delivered[-1].usage.cached_tokens == hit


def test_the_diagram_on_the_page_is_the_tables() -> None:
    page = PAGE.read_text()
    assert page.split("<!-- life -->\n")[1].split("<!-- /life -->")[0].strip() == render_diagram()


def test_every_state_can_be_reached_and_left() -> None:
    states = {state for state, _ in TABLE}
    assert set(TABLE.values()) | {"new"} == states | {"over"}
    for state in states:
        assert {TABLE[state, "closed"], TABLE[state, "failed"]} == {"over"}
