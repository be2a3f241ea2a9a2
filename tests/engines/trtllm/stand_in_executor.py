"""The stand-in's executor: a thread that steps over its requests, with counted KV blocks and a model that reads them.

See stand_in.py for what this is and isn't.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from services.engines.sim.arithmetic import MASK, mix, next_state
from services.engines.sim.card import builtin_word_ids

WORD_IDS = builtin_word_ids()
Row = tuple[int, int]
ROW_BYTES = 16


@dataclass(kw_only=True)
class Switches:
    """How this release behaves. `eos_one_in`: how often a drawn token is end_id; `first_token`: what a context or
    aggregated phase draws first, whatever the prompt (None: what the model says); `times_out_at`: with which token a
    request ends as timed out. `fills_first_logprobs`: a context's answer has its token's. `has_bare_logprobs`: as with
    samplers of a draft in the same model, the chosen token's come as numbers."""

    is_older: bool = False
    knows_capacity: bool = True
    ends_context_as: str = "length"
    eos_one_in: int = 0
    first_token: int | None = None
    times_out_at: int | None = None
    responses_per_context: int = 1
    fills_first_logprobs: bool = True
    has_bare_logprobs: bool = False


@dataclass
class WaitingKv:
    owner: "Executor"
    transfer_id: int
    rows: list[Row]
    first_token: int
    until: float


class Fabric:
    """What the transceivers reach each other by: opaque_state leads to a context's KV."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.waiting: dict[bytes, WaitingKv] = {}
        self.llms: list[Any] = []
        self._number = 0

    def offer(self, waiting: WaitingKv) -> bytes:
        with self.lock:
            self._number += 1
            opaque_state = b"\x00\xffkv" + self._number.to_bytes(8, "big")
            self.waiting[opaque_state] = waiting
            return opaque_state

    def fetch(self, opaque_state: bytes | None, transfer_id: int) -> WaitingKv | None:
        """Return the KV, which its owner frees with that; None where there is none (any more) under this id."""
        with self.lock:
            found = self.waiting.get(opaque_state or b"")
            if found is None or found.transfer_id != transfer_id or found.owner.is_shut_down:
                return None
            if found.until <= time.monotonic():  # its owner's thread will free it in its next turn
                return None
            del self.waiting[opaque_state or b""]
            return found

    def expire(self, owner: "Executor", now: float) -> None:
        with self.lock:
            for key in [key for key, one in self.waiting.items() if one.owner is owner and one.until <= now]:
                del self.waiting[key]

    def rows_of(self, owner: "Executor") -> list[int]:
        with self.lock:
            return [len(one.rows) for one in self.waiting.values() if one.owner is owner]


@dataclass
class Request:
    id: int
    prompt: list[int]
    sampling: Any
    params: Any
    post: Callable[[Any], None]
    is_streaming: bool
    cache_salt: str
    phase: str
    deadline: float
    priority: float
    trace_headers: dict[str, str] | None
    rows: list[Row] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    unsent: list[int] = field(default_factory=list)
    unsent_rows: list[Any] = field(default_factory=list)
    cached_tokens: int = 0
    is_cancelled: bool = False
    kv_cache_size: int = 0


class Executor:
    """One engine. Phases of a request: context, transfer, decode; put their names into `paused` to hold them."""

    def __init__(self, fabric: Fabric, args: Any, switches: Switches, params_class: Any) -> None:
        self.fabric = fabric
        self.switches = switches
        self.paused: set[str] = set()
        self.aborts_in_transfer: list[int] = []
        self.num_transfers = 0
        self.num_computed_prompt_tokens = 0
        self.statistics: deque[dict[str, Any]] = deque()
        self.kv_events: deque[dict[str, Any]] = deque()
        self._num_kv_events = 0
        self.has_begun = False
        self.is_shut_down = False
        self.submitted: list[Request] = []
        self._args = args
        self._params_class = params_class
        self._block_size = args.kv_cache_config.tokens_per_block
        self._requests: dict[int, Request] = {}
        self._prefixes: set[tuple[str, tuple[int, ...]]] = set()
        self._last_id = 0
        self._fault: Exception | None = None
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="stand-in-executor", daemon=True)
        self._thread.start()

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def submit(self, request_id: int, prompt: list[int], sampling: Any, params: Any, **more: Any) -> None:
        is_generation = params is not None and params.request_type == "generation_only"
        timeout_s = self._timeout_s() if is_generation else float("inf")
        request = Request(
            request_id,
            prompt,
            sampling,
            params,
            phase="transfer" if is_generation else "context",
            deadline=time.monotonic() + timeout_s,
            **more,
        )
        with self._news:
            self.has_begun = True
            self.submitted.append(request)
            self._requests[request_id] = request
            self._news.notify()

    def cancel(self, request_id: int) -> None:
        with self._news:
            request = self._requests.get(request_id)
            if request is not None:
                request.is_cancelled = True
                if request.phase == "transfer":
                    self.aborts_in_transfer.append(request_id)
                self._news.notify()

    def crash(self, error: Exception) -> None:
        """A background error: raised to everyone who iterates."""
        with self._news:
            self._fault = error
            self._news.notify()

    def shut_down(self) -> None:
        with self._news:
            self.is_shut_down = True
            self._news.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def num_used_blocks(self) -> int:
        """Blocks of requests under way and of context KV that waits."""
        with self._news:
            own = [len(one.prompt) + len(one.tokens) for one in self._requests.values()]
            return sum(-(-num // self._block_size) for num in own + self.fabric.rows_of(self))

    def _timeout_s(self) -> float:
        config = self._args.cache_transceiver_config
        timeout_ms = None if config is None else config.kv_transfer_timeout_ms
        return float("inf") if timeout_ms is None else timeout_ms / 1000

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait(timeout=0.002 if self._requests else 0.02)
                if self.is_shut_down:
                    return
                if self._fault is not None:
                    for request in self._requests.values():
                        request.post(self._fault)
                    self._requests.clear()
                    self._fault = None
                self.fabric.expire(self, time.monotonic())
                requests = list(self._requests.values())
                if requests and self._args.enable_iter_perf_stats:
                    self._note_statistics()  # of before the step: what an idle engine said last is never "nothing"
                for request in requests:
                    self._step(request)

    def _note_statistics(self) -> None:
        cache = self._args.kv_cache_config
        used = {"usedNumBlocks": self.num_used_blocks(), "maxNumBlocks": cache.max_blocks}
        self.statistics.append({"kvCacheStats": {**used, "tokensPerBlock": cache.tokens_per_block}})

    def _step(self, request: Request) -> None:
        if request.is_cancelled and request.phase != "transfer":
            self._end(request, "cancelled")
        elif request.phase in self.paused:
            if request.phase == "transfer" and time.monotonic() > request.deadline:
                self._fail(request, "KV cache transfer timed out")
        elif request.phase == "transfer":
            self._transfer(request)
        elif request.phase == "context":
            self._context(request)
        else:
            self._draw(request)

    def _transfer(self, request: Request) -> None:
        params = request.params
        disagg_id = None if self.switches.is_older else params.disagg_request_id
        found = self.fabric.fetch(params.opaque_state, disagg_id or params.ctx_request_id)
        if found is None:
            self._fail(request, "KV cache transfer failed: no such context request")
            return
        self.num_transfers += 1
        request.rows = list(found.rows)
        request.kv_cache_size = ROW_BYTES * len(found.rows)
        request.phase = "decode"
        row: Any = None
        if request.sampling.logprobs and not self.switches.is_older:
            (first,) = params.first_gen_log_probs
            row = first if isinstance(first, float) else [(one, it.logprob, it.rank) for one, it in first.items()]
        self._deliver(request, params.first_gen_tokens[0], row, is_tested=not self.switches.is_older)

    def _context(self, request: Request) -> None:
        size, prompt = self._block_size, request.prompt
        prefixes = [(request.cache_salt, tuple(prompt[:end])) for end in range(size, len(prompt) + 1, size)]
        hits = [len(ids) for salt, ids in prefixes[: (len(prompt) - 1) // size] if (salt, ids) in self._prefixes]
        request.cached_tokens = max(hits, default=0)
        self.num_computed_prompt_tokens += len(prompt) - request.cached_tokens
        self._tell_stored(request, [one for one in prefixes if one not in self._prefixes])
        self._prefixes.update(prefixes)
        for token_id in prompt:
            _append(request.rows, token_id)
        request.phase = "decode"
        self._draw(request)

    def evict(self) -> None:
        """Drop the whole prefix cache."""
        with self._news:
            hashes = [_block_hash(salt, ids) for salt, ids in self._prefixes]
            self._prefixes.clear()
            self._tell_kv_event({"type": "removed", "block_hashes": [*hashes, 12345]})

    def _tell_stored(self, request: Request, prefixes: list[tuple[str, tuple[int, ...]]]) -> None:
        """One event of the blocks that are new, the short one at the end included."""
        size, salt = self._block_size, request.cache_salt
        whole = tuple(request.prompt[: len(request.prompt) // size * size])
        told = [ids for _, ids in prefixes]
        if len(whole) < len(request.prompt):
            told.append(tuple(request.prompt))
        if not told:
            return
        before = told[0][: (len(told[0]) - 1) // size * size]
        blocks = [
            {
                "type": "stored_block",
                "block_hash": _block_hash(salt, ids),
                "tokens": [{"token_id": one, "token_extra_id": 0} for one in ids[(len(ids) - 1) // size * size :]],
                "cache_level": 0,
                "priority": 35,
                "cache_salt": salt or None,
            }
            for ids in told
        ]
        parent_hash = _block_hash(salt, before) if before else None
        self._tell_kv_event({"type": "stored", "parent_hash": parent_hash, "blocks": blocks})

    def _tell_kv_event(self, data: dict[str, Any]) -> None:
        self._num_kv_events += 1
        self.kv_events.append({"event_id": self._num_kv_events, "data": data, "window_size": 400})

    def _draw(self, request: Request) -> None:
        sampling = request.sampling
        if request.tokens:
            _append(request.rows, request.tokens[-1])
        draw = _read(request.rows)
        if not sampling.is_greedy:
            draw = mix(draw ^ mix((sampling.seed or 0) ^ mix(len(request.rows))))
        is_end_banned = len(request.tokens) < (sampling.min_tokens or 0)
        token_id = WORD_IDS[draw % len(WORD_IDS)]
        if not request.tokens and self.switches.first_token is not None:
            token_id = self.switches.first_token
        elif self.switches.eos_one_in and mix(draw) % self.switches.eos_one_in == 0:
            token_id = sampling.end_id
        if token_id == sampling.end_id and is_end_banned:
            token_id = WORD_IDS[draw % len(WORD_IDS)]
        row: Any = _logprobs(draw, token_id, sampling.logprobs)
        if row is not None and self.switches.has_bare_logprobs:
            row = row[0][1]
        self._deliver(request, token_id, row, is_tested=True)

    def _deliver(self, request: Request, token_id: int, row: Any, *, is_tested: bool) -> None:
        sampling = request.sampling
        request.tokens.append(token_id)
        request.unsent.append(token_id)
        if row is not None:
            request.unsent_rows.append(row)
        if not is_tested:
            self._respond(request, None)
        elif len(request.tokens) == self.switches.times_out_at:
            self._end(request, "timeout")
        elif token_id == sampling.end_id and not sampling.ignore_eos:
            if self.switches.is_older:  # keeps the token to itself
                request.unsent.pop()
                request.unsent_rows = request.unsent_rows[: len(request.unsent)]
            self._end(request, "stop")
        elif len(request.tokens) >= sampling.max_tokens:
            self._end(request, "length")
        elif token_id in (sampling.stop_token_ids or ()):
            self._end(request, "stop", is_stop_word=True)
        elif len(request.tokens) % self._args.stream_interval == 0 or len(request.tokens) == 1:
            self._respond(request, None)

    def _end(self, request: Request, reason: str, *, is_stop_word: bool = False) -> None:
        made = None
        if request.params is not None and request.params.request_type == "context_only" and reason != "cancelled":
            made = self._handoff(request, is_armed=reason == "length")
            reason = self.switches.ends_context_as if reason == "length" else reason
            for _ in range(self.switches.responses_per_context - 1):
                self._respond(request, None, is_forced=True)
        del self._requests[request.id]
        self._respond(request, reason, made=made, is_stop_word=is_stop_word)

    def _handoff(self, request: Request, *, is_armed: bool) -> Any:
        """R: the answer's params are new ones, with less in them than the request's had."""
        wanted = None if self.switches.is_older else request.params.disagg_request_id
        transfer_id = wanted or request.id
        made = {"request_type": "context_only", "first_gen_tokens": request.tokens[:1], "ctx_request_id": transfer_id}
        if is_armed:
            until = time.monotonic() + self._timeout_s()
            waiting = WaitingKv(self, transfer_id, request.rows, request.tokens[0], until)
            made["opaque_state"] = self.fabric.offer(waiting)
        return self._params_class(**made)

    def _fail(self, request: Request, message: str) -> None:
        del self._requests[request.id]
        request.post(message)

    def _respond(
        self,
        request: Request,
        reason: str | None,
        *,
        made: Any = None,
        is_stop_word: bool = False,
        is_forced: bool = False,
    ) -> None:
        if not (request.is_streaming or reason is not None or is_forced):
            return
        request.post(
            SimpleNamespace(
                is_final=reason is not None,
                finish_reason=reason,
                is_stop_word=is_stop_word,
                cached_tokens=request.cached_tokens,
                new_token_ids=request.unsent,
                new_logprobs=request.unsent_rows,
                disaggregated_params=made,
                kv_cache_size=request.kv_cache_size,
            )
        )
        request.unsent, request.unsent_rows = [], []


def _block_hash(salt: str, ids: tuple[int, ...]) -> int:
    return hash((salt, ids)) & MASK


def _append(rows: list[Row], token_id: int) -> None:
    state, previous = rows[-1] if rows else (0, None)
    rows.append((next_state(state, previous, token_id), token_id))


def _read(rows: list[Row]) -> int:
    """Return a draw that depends on every row and its place."""
    total = sum((mix(place) | 1) * (state + 3 * token_id) for place, (state, token_id) in enumerate(rows))
    return mix((rows[-1][0] ^ total) & MASK)


def _logprobs(draw: int, token_id: int, num_logprobs: int | None) -> list[tuple[int, float, int]] | None:
    if not num_logprobs:
        return None
    best = -((draw >> 40) / 2**24)
    others = [WORD_IDS[(draw + offset) % len(WORD_IDS)] for offset in range(1, num_logprobs)]
    ranked = [token_id, *(one for one in others if one != token_id)]
    return [(one, best - 0.5 * rank, rank + 1) for rank, one in enumerate(ranked)]
