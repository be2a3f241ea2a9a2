"""From an instruction to a message on the way: chooses the worker (or its queue group), numbers the dispatch, counts
its load. Step 2 of the walk; sends nothing itself.
"""

import logging
import time
from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec

from bus.subjects import Subjects
from schemas.errors import AdmissionError, BuswayError, CapacityError, UnavailableError
from schemas.explanation import Refusal
from schemas.handoff import BootstrapEndpoint, BootstrapInfo
from schemas.hop import DecodeRequest, Dispatch, PrefillRequest
from schemas.ids import AttemptId, Epoch, WorkerId, new_room
from schemas.request import GenerateRequest
from schemas.worker import RuntimeConfig
from services.lengths import Lengths
from services.router.admission import as_error, refusal
from services.router.candidates import RETRY_AFTER_S, Candidate, Path, decode_partners, find_path
from services.router.explanations import Explanations
from services.router.kv_desk import KvDesk
from services.router.kv_policy import Decision, without_local
from services.router.loads import LoadBook, WorkerLoad
from services.router.policies import Leg, Picker
from services.router.route_words import Ask
from services.router.tally import RoutingTally

logger = logging.getLogger(__name__)

TRIAL_EVERY_S = 10.0
"""While estimates refuse everybody, an idle fleet takes one request in so long."""


class Workers(Protocol):
    """Where the live workers come from: bus.discovery.Fleet."""

    @property
    def workers(self) -> dict[WorkerId, RuntimeConfig]: ...


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """A leg ready to be sent. `worker` is None for a queue group; `config` is who (or whose group) it goes to."""

    leg: Leg
    subject: str
    message: PrefillRequest | DecodeRequest
    config: RuntimeConfig
    worker: WorkerId | None
    number: int
    num_tokens: int
    decision: Decision | None = None


class Dispatcher:
    """Chooses who gets a leg, by policy over the live fleet and its loads."""

    def __init__(
        self,
        subjects: Subjects,
        workers: Workers,
        picker: Picker,
        book: LoadBook,
        *,
        router: str,
        epoch: Epoch,
        is_strict: bool,
        result_subject: str,
        kv: KvDesk | None = None,
        max_ttft_s: float = 0.0,
    ) -> None:
        self.book = book
        self.picker = picker
        self.kv = kv
        self.explanations = Explanations()
        self.tally = RoutingTally()
        self._subjects = subjects
        self._fleet = workers
        self._router = router
        self._epoch = epoch
        self._is_strict = is_strict
        self._result_subject = result_subject
        self._max_ttft_s = max_ttft_s
        self._last_prompt_at: dict[str, float] = {}

    def path(self, request: GenerateRequest) -> Path:
        """Return who can take a request's first leg; raises UnavailableError, CapacityError, or ContextOverflowError
        for one that is longer than the workers' sequences may be."""
        digest = request.model_digest
        configs = [one for one in self._of_model(request.model) if digest in ("", one.model_digest)]
        is_again = bool(request.resume or request.avoid)
        return find_path(configs, self._load_of, Lengths.of(request), is_strict=self._is_strict, is_again=is_again)

    def choose(
        self,
        ask: Ask,
        request: GenerateRequest,
        path: Path,
        *,
        tried: set[WorkerId],
        compat: str,
        may_stay: bool = True,
    ) -> Hop:
        """Return the leg's next hop; `compat` is the prefill worker's, "" for a first leg. Asked for a prefill leg it
        may be a decode leg without params, if `may_stay`: the prompt stays there.

        Raises CapacityError when everyone is full or was tried, UnavailableError when the path is gone (with a wait of
        0 s where another has taken its place), AdmissionError when the first token would come too late,
        ContextOverflowError when nobody that is left holds a request so long.
        """
        if compat:
            candidates: Iterable[Candidate] = self._decode_partners(request, compat)
        else:
            now = self.path(request)
            if now.handoff != path.handoff:
                raise UnavailableError("no prefill worker is left, or one has come", phase="queue", retry_after_s=0.0)
            candidates = now.first
        left = [one for one in candidates if one.config.worker_id not in tried]
        if not left:
            raise CapacityError(f"no {ask.leg} worker has room", phase="queue", retry_after_s=RETRY_AFTER_S)
        left = [one for one in left if one.config.worker_id not in request.avoid] or left
        decision = self._decide(ask, request, path, left, may_stay=may_stay)
        workers = self._fleet.workers
        picked = self.picker.pick(ask.leg, left).config if decision is None else workers[decision.worker]
        if logger.isEnabledFor(logging.DEBUG):
            loads = ", ".join(f"{one.config.worker_id} {one.load}" for one in left)
            logger.debug("%s of %s to %s; of %s", ask.leg, request.attempt_id, picked.worker_id, loads)
        return self._hop(ask, request, path, picked, decision)

    def refused(self, request: GenerateRequest, error: BuswayError) -> None:
        """Note that nobody takes the request, or one of its legs, for want of room; other errors are none of that."""
        if isinstance(error, CapacityError) and not isinstance(error, AdmissionError):
            reason: Literal["busy", "unavailable"] = "unavailable" if isinstance(error, UnavailableError) else "busy"
            self._refuse(
                request, Refusal(reason=reason, message=error.message, retry_after_s=error.retry_after_s or 0.0)
            )

    def _decide(
        self, ask: Ask, request: GenerateRequest, path: Path, candidates: list[Candidate], *, may_stay: bool
    ) -> Decision | None:
        """Return the kv policy's decision, None under any other policy."""
        if self.kv is None:
            return None
        if ask.params is not None:
            decision = self.kv.choose_decode(request, candidates, ask.prefill_worker)
        else:
            decision = self._place_prompt(self.kv, ask, request, path, candidates, may_stay=may_stay)
        self.explanations.note(request, decision.choice)
        return decision

    def forget(self, worker: WorkerId) -> None:
        """A worker left or began a new epoch."""
        self.book.forget(worker, self._fleet.workers)
        self.picker.forget(worker)

    def _place_prompt(
        self,
        kv: KvDesk,
        ask: Ask,
        request: GenerateRequest,
        path: Path,
        candidates: list[Candidate],
        *,
        may_stay: bool,
    ) -> Decision:
        """Return who computes the prompt; raises AdmissionError when that would be too late."""
        decision = kv.choose_prompt(request, candidates, time.monotonic())
        compat = ""
        if ask.leg == "prefill":
            compat = self._fleet.workers[decision.worker].compat
            if kv.local.is_on and may_stay:
                decision = self._stay_or_go(kv, request, decision, path, compat)
        estimate = kv.estimate(request, decision, compat)
        if estimate is None or request.resume or self._is_trial(request.model, decision):
            return decision
        refused = refusal(estimate, request.deadlines, time.time(), self._max_ttft_s)
        if refused is None:
            return decision
        self.explanations.note(request, decision.choice)
        self._refuse(request, refused)
        raise as_error(refused)

    def _is_trial(self, model: str, decision: Decision) -> bool:
        """Whether to take a prompt without regard to estimates: somebody is idle, and has had none of us for long. An
        estimate that was right once, or never, is only corrected by passes."""
        is_idle = any(not bid.queued_tokens and not bid.pass_rest_s for bid in decision.choice.bids)
        return is_idle and time.monotonic() - self._last_prompt_at.get(model, -TRIAL_EVERY_S) >= TRIAL_EVERY_S

    def _stay_or_go(self, kv: KvDesk, request: GenerateRequest, remote: Decision, path: Path, compat: str) -> Decision:
        """Return the decision after a look at the decode workers of that compatibility group."""
        decoders = [one for one in self._decode_partners(request, compat) if one.config.worker_id not in request.avoid]
        willing = [one for one in decoders if not (self._is_strict or one.config.is_strict)]
        if not willing:
            return without_local(remote, "strict" if decoders else "no room")
        return kv.stay_or_go(request, remote, willing, hides_transfer=path.handoff == "rendezvous")

    def _refuse(self, request: GenerateRequest, refused: Refusal) -> None:
        self.explanations.refuse(request, refused)
        self.tally.refused(request.model, refused.reason)

    def members(self, config: RuntimeConfig) -> list[WorkerId]:
        """Return everyone in the queue group that `config` belongs to."""
        return [
            one.worker_id
            for one in self._of_model(config.model)
            if one.role == config.role and one.compat == config.compat
        ]

    def sent(self, hop: Hop) -> None:
        """Count a hop to a chosen worker from its sending on."""
        if hop.worker is not None:
            now, request = time.monotonic(), hop.message.request
            self.book.add(hop.worker, hop.number, hop.num_tokens, now, kv_tokens=len(request.token_ids))
            if self.kv is not None and hop.decision is not None and hop.decision.choice.leg == "prefill":
                self._last_prompt_at[request.model] = now
                self.kv.sent(request, hop.number, hop.decision, hop.config, now)
                if hop.leg == "prefill" and hop.decision.is_measured:
                    self.tally.expect(request.attempt_id, request.model, hop.decision.score, now)

    def prefill_over(self, attempt_id: AttemptId, *, is_done: bool = False) -> None:
        """An attempt's prefill leg has ended, by success or not."""
        if is_done:
            self.tally.prefilled(attempt_id, time.monotonic())
        else:
            self.tally.forget(attempt_id)
        if self.kv is not None:
            self.kv.over(attempt_id)

    def accepted(self, hop: Hop, by: WorkerId) -> None:
        """Count a prompt taken, and the load of a hop to a queue group once it is known who got it."""
        is_prompt = hop.leg == "prefill" or (isinstance(hop.message, DecodeRequest) and hop.message.params is None)
        if is_prompt:
            self.tally.taken(hop.config.model, None if hop.decision is None else hop.decision.choice)
        if hop.worker is None:
            self.book.add(by, hop.number, hop.num_tokens, time.monotonic())

    def not_held(self, hop: Hop, *, is_silent: bool = False) -> None:
        """Give a hop's load back; a silent worker is avoided until it reports again."""
        if hop.worker is not None:
            self.book.give_back(hop.worker, hop.number)
            if hop.decision is not None and hop.decision.choice.leg == "prefill":
                self.prefill_over(hop.message.request.attempt_id)
            if is_silent:
                self.book.suspect(hop.worker)

    def _hop(
        self, ask: Ask, request: GenerateRequest, path: Path, config: RuntimeConfig, decision: Decision | None
    ) -> Hop:
        number = self.book.next_number()
        dispatch = Dispatch(router=self._router, epoch=self._epoch, number=number)
        leg: Leg = "decode" if decision is not None and decision.is_local else ask.leg
        is_for_any = self.picker.is_group and not request.avoid and self._is_held_by_any(request, leg, config)
        worker = None if is_for_any else config.worker_id
        worker_epoch = None if worker is None else config.epoch
        message: PrefillRequest | DecodeRequest
        if leg == "prefill":
            message = PrefillRequest(
                request=request,
                dispatch=dispatch,
                result_subject=self._result_subject,
                bootstrap=_bootstrap(config) if path.handoff == "rendezvous" and worker is not None else None,
                worker_epoch=worker_epoch,
            )
        else:
            message = DecodeRequest(
                request=request,
                dispatch=dispatch,
                params=ask.params,
                prefill_worker=ask.prefill_worker,
                prefill_timings=ask.prefill_timings,
                worker_epoch=worker_epoch,
            )
        return Hop(
            leg=leg,
            subject=self._subject(leg, config, worker),
            message=message,
            config=config,
            worker=worker,
            number=number,
            num_tokens=_num_to_compute(ask, request, decision),
            decision=decision,
        )

    def _is_held_by_any(self, request: GenerateRequest, leg: Leg, config: RuntimeConfig) -> bool:
        """Return whether whoever in the queue group gets the leg can hold it; those about to join it included."""
        lengths = Lengths.of(request)
        group = [one for one in self._of_model(config.model) if one.compat == config.compat]
        if leg == "prefill":
            return all(lengths.fit_prefill(one) for one in group if one.role == "prefill")
        return all(lengths.fit_decode(one) for one in group if one.role != "prefill")

    def _decode_partners(self, request: GenerateRequest, compat: str) -> list[Candidate]:
        return decode_partners(self._of_model(request.model), self._load_of, compat, Lengths.of(request))

    def _subject(self, leg: Leg, config: RuntimeConfig, worker: WorkerId | None) -> str:
        if worker is not None:
            return self._subjects.worker(worker, leg)
        group = self._subjects.prefill if leg == "prefill" else self._subjects.decode
        return group(config.model, config.compat)

    def _of_model(self, model: str) -> list[RuntimeConfig]:
        return [config for config in self._fleet.workers.values() if config.model == model]

    def _load_of(self, config: RuntimeConfig) -> WorkerLoad:
        return self.book.load(config.worker_id, time.monotonic())


def _num_to_compute(ask: Ask, request: GenerateRequest, decision: Decision | None) -> int:
    """Return the prompt tokens that a leg adds to its worker's queue, as far as is known here."""
    if ask.leg == "decode" and ask.params is not None:
        return 0
    return len(request.token_ids) if decision is None else decision.bid.uncached_tokens


def _bootstrap(config: RuntimeConfig) -> BootstrapInfo:
    """Make a fresh room at a prefill worker."""
    return BootstrapInfo(
        prefill_worker=config.worker_id,
        epoch=config.epoch,
        room=new_room(),
        endpoint=config.bootstrap or BootstrapEndpoint(),
    )
