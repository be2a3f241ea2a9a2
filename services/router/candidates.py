"""Who may serve a request: live, ready, compatible, not full. Pure.

A path is complete when its workers can serve a whole request: a prefill and a decode worker that share `compat`
(backend, model digest, KV layout, handoff), or one worker that does both.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from schemas.errors import CapacityError, UnavailableError
from schemas.handoff import Handoff
from schemas.worker import RuntimeConfig
from services.router.loads import WorkerLoad

RETRY_AFTER_S = 1.0

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


def find_path(configs: Iterable[RuntimeConfig], load_of: LoadOf, *, is_strict: bool) -> Path:
    """Return the path for a new request on one model, given that model's live workers.

    Disaggregated where a compatible pair lives; else aggregated on `both` workers, and on decode workers unless
    strict. Raises UnavailableError when no path is complete, CapacityError when every one is full.
    """
    ready = _usable(configs, load_of)
    pairs = _pairs(ready)
    paths = [_disaggregated(pairs), *_aggregated(ready, has_pair=bool(pairs), is_strict=is_strict)]
    complete = [path for path in paths if path is not None]
    if not complete:
        raise UnavailableError(_why_unavailable(ready), phase="queue", retry_after_s=RETRY_AFTER_S)
    for path in complete:
        if path.first:
            return path
    raise CapacityError("all workers of the model are busy", phase="queue", retry_after_s=RETRY_AFTER_S)


def decode_partners(configs: Iterable[RuntimeConfig], load_of: LoadOf, compat: str) -> list[Candidate]:
    """Return who can take over from a prefill worker of that compatibility group now; may be empty: all are full.

    Raises UnavailableError when there is none at all.
    """
    usable = _usable(configs, load_of)
    partners = [one for one in usable if one.config.role == "decode" and one.config.compat == compat]
    if not partners:
        raise UnavailableError("no decode worker is left", phase="queue", retry_after_s=RETRY_AFTER_S)
    return [one for one in partners if one.has_room]


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
    """Return, for each model whose workers hold sequences of different lengths, who is the least: any of them may get a
    request, so that is what gateways let in."""
    by_model: dict[tuple[str, str], list[RuntimeConfig]] = {}
    for config in configs:
        if config.state == "ready":
            by_model.setdefault((config.model, config.model_digest), []).append(config)
    reasons = []
    for (model, _), workers in by_model.items():
        lengths = {one.longest_sequence_tokens for one in workers}
        if len(lengths) > 1:
            least = min(lengths)
            shortest = ", ".join(sorted(one.worker_id for one in workers if one.longest_sequence_tokens == least))
            reasons.append(
                f"prompt and answer of {model} may have {least} tokens: no more fit {shortest}; "
                f"others hold {max(lengths)}"
            )
    return reasons


def _usable(configs: Iterable[RuntimeConfig], load_of: LoadOf) -> list[Candidate]:
    """Return the workers that take new work. A suspect one doesn't count, as if it were gone already: it let a hop's
    second pass, and it isn't overload that others would have to wait for."""
    ready = [Candidate(config=config, load=load_of(config)) for config in configs if config.state == "ready"]
    return [one for one in ready if not one.load.is_suspect]


class _Pair(msgspec.Struct, frozen=True):
    prefill: list[Candidate]
    decode: list[Candidate]


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


def _disaggregated(pairs: list[_Pair]) -> Path | None:
    if not pairs:
        return None
    usable = [pair for pair in pairs if any(one.has_room for one in pair.decode)]
    first = tuple(one for pair in usable for one in pair.prefill if one.has_room)
    handoff = first[0].config.handoff if first else pairs[0].prefill[0].config.handoff
    return Path(handoff=handoff, first=tuple(one for one in first if one.config.handoff == handoff))


def _aggregated(ready: list[Candidate], *, has_pair: bool, is_strict: bool) -> list[Path]:
    """A decode worker computes prompts only where no prefill worker could: an overload never falls back on it."""
    whole = [one for one in ready if one.config.role == "both"]
    if not has_pair:
        whole += [one for one in ready if one.config.role == "decode" and not is_strict and not one.config.is_strict]
    return [Path(handoff=None, first=tuple(one for one in whole if one.has_room))] if whole else []


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
