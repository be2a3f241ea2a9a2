"""Who may serve a request: live, ready, compatible, large enough, not full. Pure.

A path is complete when its workers can serve a whole request: a prefill and a decode worker that share `compat`
(backend, model digest, KV layout, handoff), or one worker that does both. Workers that can't hold a request's sequence
are no candidates for it, on its first way as on any later one; a request that no complete path holds is refused.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from schemas.errors import CapacityError, ContextOverflowError, UnavailableError
from schemas.handoff import Handoff
from schemas.worker import RuntimeConfig
from services.lengths import Lengths
from services.router.loads import WorkerLoad

RETRY_AFTER_S = 1.0
_NO_LOAD = WorkerLoad(requests=0, queued_tokens=0, kv_used=0.0, is_suspect=False)

LoadOf = Callable[[RuntimeConfig], WorkerLoad]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    config: RuntimeConfig
    load: WorkerLoad

    @property
    def has_room(self) -> bool:
        """Whether the worker would take one more request, as far as is known here."""
        config = self.config
        return config.max_waiting == 0 or self.load.requests < config.max_num_seqs + config.max_waiting


class Path(msgspec.Struct, frozen=True, kw_only=True):
    """Who can take the first leg now. `handoff` None: aggregated, the decode leg is the first and only one."""

    handoff: Handoff | None
    first: tuple[Candidate, ...]


def find_path(
    configs: Iterable[RuntimeConfig], load_of: LoadOf, lengths: Lengths, *, is_strict: bool, is_again: bool = False
) -> Path:
    """Return the path for a request on one model, given that model's live workers. `is_again`: a path held it before.

    Disaggregated where a compatible pair lives; else aggregated on `both` workers, and on decode workers unless
    strict. Raises UnavailableError when no path is complete (or none that holds a request that one held before),
    ContextOverflowError when no complete one holds a request so long, CapacityError when every one that does is full.
    """
    configs = list(configs)
    usable = _usable(configs, load_of)
    ways = _ways(usable, is_strict=is_strict)
    if not ways:
        raise UnavailableError(_why_unavailable(usable), phase="queue", retry_after_s=RETRY_AFTER_S)
    fitting = ways.for_those(lengths)
    if not fitting:
        everybody = _ways(_ready(configs, load_of), is_strict=is_strict)
        too_long = _too_long(lengths, everybody.max_sequence_tokens)
        if is_again or everybody.for_those(lengths):
            raise UnavailableError(too_long.message, phase="queue", retry_after_s=RETRY_AFTER_S)
        raise too_long
    for path in fitting.paths():
        if path.first:
            return path
    raise CapacityError("all workers of the model are busy", phase="queue", retry_after_s=RETRY_AFTER_S)


def decode_partners(
    configs: Iterable[RuntimeConfig], load_of: LoadOf, compat: str, lengths: Lengths
) -> list[Candidate]:
    """Return who can take over from a prefill worker of that compatibility group now; may be empty: all are full.

    Raises UnavailableError when there is none at all that holds the request.
    """
    usable = _usable(configs, load_of)
    partners = [one for one in usable if one.config.role == "decode" and one.config.compat == compat]
    if not partners:
        raise UnavailableError("no decode worker is left", phase="queue", retry_after_s=RETRY_AFTER_S)
    fitting = [one for one in partners if lengths.fit_decode(one.config)]
    if not fitting:
        limit = max(one.config.longest_sequence_tokens for one in partners)
        raise UnavailableError(_too_long(lengths, limit).message, phase="queue", retry_after_s=RETRY_AFTER_S)
    return [one for one in fitting if one.has_room]


def incompatibilities(configs: Sequence[RuntimeConfig]) -> list[str]:
    """Return, for each prefill worker without a partner of its model, why; and for each lonely decode worker."""
    reasons = []
    for config in configs:
        if config.role == "both":
            continue
        others = [one for one in configs if one.model == config.model and one.role not in (config.role, "both")]
        if others and not any(one.compat == config.compat for one in others):
            differing = sorted({field for one in others for field in _differences(config, one)})
            reasons.append(
                f"{config.role} worker {config.worker_id} matches no worker of the other role: "
                f"differs in {', '.join(differing)}"
            )
    return reasons


def short_contexts(configs: Iterable[RuntimeConfig]) -> list[str]:
    """Return, for each model whose serving workers hold sequences of different lengths, who holds less than its best
    path: they get only what fits them, and nothing that leaves max_tokens open (that asks for all there is)."""
    by_model: dict[tuple[str, str], list[RuntimeConfig]] = {}
    for config in configs:
        by_model.setdefault((config.model, config.model_digest), []).append(config)
    reasons = []
    for (model, _), workers in by_model.items():
        ways = _ways(_ready(workers, lambda _: _NO_LOAD), is_strict=False)
        longest = ways.max_sequence_tokens
        shorter = {
            f"{one.config.worker_id} ({one.config.longest_sequence_tokens})"
            for one in ways.everybody
            if one.config.longest_sequence_tokens < longest
        }
        if shorter:
            reasons.append(
                f"{model} is served up to {longest} tokens of prompt and answer: requests that exceed their own, and "
                f"those that leave max_tokens open, pass by {', '.join(sorted(shorter))}"
            )
    return reasons


def _ready(configs: Iterable[RuntimeConfig], load_of: LoadOf) -> list[Candidate]:
    return [Candidate(config=config, load=load_of(config)) for config in configs if config.state == "ready"]


def _usable(configs: Iterable[RuntimeConfig], load_of: LoadOf) -> list[Candidate]:
    """Return the workers that take new work. A suspect one doesn't count, as if it were gone already: it let a hop's
    second pass, and it isn't overload that others would have to wait for."""
    return [one for one in _ready(configs, load_of) if not one.load.is_suspect]


class _Pair(msgspec.Struct, frozen=True):
    prefill: list[Candidate]
    decode: list[Candidate]

    @property
    def max_sequence_tokens(self) -> int:
        return min(_longest(self.prefill), _longest(self.decode))


class _Ways(msgspec.Struct, frozen=True):
    """Compatibility groups that have both roles, and who serves a request alone."""

    pairs: list[_Pair]
    whole: list[Candidate]

    def __bool__(self) -> bool:
        return bool(self.pairs or self.whole)

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and completion together that some way holds."""
        return max([_longest(self.whole), *(pair.max_sequence_tokens for pair in self.pairs)])

    @property
    def everybody(self) -> list[Candidate]:
        return [*self.whole, *(one for pair in self.pairs for one in (*pair.prefill, *pair.decode))]

    def for_those(self, lengths: Lengths) -> "_Ways":
        """Return what is left of them for a request of that size."""
        pairs = [
            _Pair(
                [one for one in pair.prefill if lengths.fit_prefill(one.config)],
                [one for one in pair.decode if lengths.fit_decode(one.config)],
            )
            for pair in self.pairs
        ]
        whole = [one for one in self.whole if lengths.fit_decode(one.config)]
        return _Ways([pair for pair in pairs if pair.prefill and pair.decode], whole)

    def paths(self) -> list[Path]:
        """Return the disaggregated path, then the aggregated one: who has room."""
        paths = [_disaggregated(self.pairs)] if self.pairs else []
        return [*paths, Path(handoff=None, first=tuple(one for one in self.whole if one.has_room))]


def _ways(ready: list[Candidate], *, is_strict: bool) -> _Ways:
    """A decode worker computes prompts only where no prefill worker could: neither an overload nor a prompt too long
    for the prefill workers falls back on it."""
    pairs = _pairs(ready)
    whole = [one for one in ready if one.config.role == "both"]
    if not pairs:
        whole += [one for one in ready if one.config.role == "decode" and not is_strict and not one.config.is_strict]
    return _Ways(pairs, whole)


def _pairs(ready: list[Candidate]) -> list[_Pair]:
    """Return the compatibility groups that have both roles."""
    groups: dict[str, _Pair] = {}
    for one in ready:
        group = groups.setdefault(one.config.compat, _Pair([], []))
        if one.config.role == "prefill":
            group.prefill.append(one)
        elif one.config.role == "decode":
            group.decode.append(one)
    return [group for group in groups.values() if group.prefill and group.decode]


def _disaggregated(pairs: list[_Pair]) -> Path:
    usable = [pair for pair in pairs if any(one.has_room for one in pair.decode)]
    first = tuple(one for pair in usable for one in pair.prefill if one.has_room)
    handoff = first[0].config.handoff if first else pairs[0].prefill[0].config.handoff
    return Path(handoff=handoff, first=tuple(one for one in first if one.config.handoff == handoff))


def _longest(candidates: list[Candidate]) -> int:
    return max((one.config.longest_sequence_tokens for one in candidates), default=0)


def _too_long(lengths: Lengths, limit: int) -> ContextOverflowError:
    return ContextOverflowError(
        f"{lengths.num_prompt_tokens} prompt tokens and max_tokens={lengths.max_tokens} exceed the {limit} tokens that "
        "the model's workers hold",
        param="messages" if lengths.num_prompt_tokens >= limit else "max_tokens",
    )


def _differences(one: RuntimeConfig, other: RuntimeConfig) -> list[str]:
    pairs = {
        "backend": (one.backend, other.backend),
        "model digest": (one.model_digest, other.model_digest),
        "KV layout": (one.kv_layout, other.kv_layout),
        "KV dtype": (one.kv_dtype, other.kv_dtype),
        "KV transfer": (one.kv_transport, other.kv_transport),
        "handoff": (one.handoff, other.handoff),
    }
    return [name for name, (mine, theirs) in pairs.items() if mine != theirs]


def _why_unavailable(ready: list[Candidate]) -> str:
    roles = sorted({one.config.role for one in ready})
    if not roles:
        return "no worker of the model is ready"
    reasons = incompatibilities([one.config for one in ready])
    return f"no complete path for the model: only {' and '.join(roles)} workers are ready" + "".join(
        f"; {reason}" for reason in reasons
    )
