"""Which models have a complete path from prompt to answer, and what is missing where they haven't. Pure.

A path is a live router plus, within one compatibility group, a prefill worker and a worker that decodes; or one that
may serve aggregated: role `both`, or `decode` unless it or a router is strict (any router may get the request).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from schemas.worker import RuntimeConfig


@dataclass(frozen=True, slots=True)
class ModelPath:
    """What of a model's path is live and ready. `digest` is the one requests go to (the newest complete one).

    `max_context_tokens`: prompt and completion together that the best of its ways holds. Routers send each request to
    workers that hold it, so the smaller ones limit nobody. `decode_contexts`: what those who would decode hold."""

    model: str
    digest: str
    num_prefill: int
    num_decode: int
    num_both: int
    num_routers: int
    num_starting: int
    num_draining: int
    is_disaggregated: bool
    is_aggregated: bool
    is_strict: bool
    max_context_tokens: int
    decode_contexts: tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        return self.num_routers > 0 and (self.is_disaggregated or self.is_aggregated)

    @property
    def is_leaving(self) -> bool:
        """Whether all of its workers are draining: nobody means to serve it any more."""
        return not (self.num_prefill or self.num_decode or self.num_both or self.num_starting)

    @property
    def missing(self) -> str:
        """Say what the path lacks, "" when it is complete."""
        if self.is_complete:
            return ""
        lacks = [] if self.num_routers else ["no router is live"]
        if not (self.is_disaggregated or self.is_aggregated):
            lacks.append(self._missing_workers())
        return " and ".join(lacks)

    def _missing_workers(self) -> str:
        if self.num_decode and not self.num_prefill:
            return "decode serves strictly and no prefill worker is ready"
        if self.num_prefill and not self.num_decode:
            return "no decode worker is ready"
        if self.num_prefill:
            return "its prefill and decode workers are not compatible"
        return "no worker is ready"


def model_paths(
    workers: Iterable[RuntimeConfig], num_routers: int, *, has_strict_router: bool = False
) -> dict[str, ModelPath]:
    """Return each model's path; `workers` are the live ones, whatever their state."""
    by_model: dict[str, dict[str, list[RuntimeConfig]]] = {}
    for worker in workers:
        by_model.setdefault(worker.model, {}).setdefault(worker.model_digest, []).append(worker)
    return {model: _best(model, by_digest, num_routers, has_strict_router) for model, by_digest in by_model.items()}


def _best(
    model: str, by_digest: dict[str, list[RuntimeConfig]], num_routers: int, has_strict_router: bool
) -> ModelPath:
    """During a rolling update two digests serve one name: the complete one whose workers are newest is it."""
    paths = [
        (_path(model, digest, workers, num_routers, has_strict_router), workers)
        for digest, workers in by_digest.items()
    ]
    best, _ = max(paths, key=lambda found: (found[0].is_complete, max(worker.epoch for worker in found[1])))
    return best


def _path(
    model: str, digest: str, workers: Sequence[RuntimeConfig], num_routers: int, has_strict_router: bool
) -> ModelPath:
    ready = [worker for worker in workers if worker.state == "ready"]
    prefill_groups = {worker.compat for worker in ready if worker.role == "prefill"}
    decode = [worker for worker in ready if worker.role == "decode"]
    decode_groups = {worker.compat for worker in decode}
    num_both = sum(worker.role == "both" for worker in ready)
    pair_groups = prefill_groups & decode_groups
    lenient = [worker for worker in decode if not (worker.is_strict or has_strict_router)]
    alone = [worker for worker in ready if worker.role == "both"] + ([] if pair_groups else lenient)
    contexts = [_longest(alone), *(_pair_context(ready, compat) for compat in pair_groups)]
    return ModelPath(
        model=model,
        digest=digest,
        num_prefill=sum(worker.role == "prefill" for worker in ready),
        num_decode=len(decode),
        num_both=num_both,
        num_routers=num_routers,
        num_starting=sum(worker.state == "starting" for worker in workers),
        num_draining=sum(worker.state == "draining" for worker in workers),
        is_disaggregated=bool(pair_groups),
        is_aggregated=num_both > 0 or bool(lenient),
        is_strict=bool(decode) and not lenient,
        max_context_tokens=max(contexts) or _longest(ready),
        decode_contexts=tuple(sorted({one.longest_sequence_tokens for one in ready if one.role != "prefill"})),
    )


def _pair_context(ready: Sequence[RuntimeConfig], compat: str) -> int:
    """Return what the largest prefill worker of a compatibility group and its largest decode worker both hold."""
    group = [worker for worker in ready if worker.compat == compat]
    prefill, decode = ([worker for worker in group if worker.role == role] for role in ("prefill", "decode"))
    return min(_longest(prefill), _longest(decode))


def _longest(workers: Sequence[RuntimeConfig]) -> int:
    return max((worker.longest_sequence_tokens for worker in workers), default=0)
