"""DisaggregatedParams between the context's memory and the wire, field by field [D1, D2]. Pure.

On the wire: the dataclass' own names; opaque_state as base64; first_gen_log_probs, one {id: Logprob} a first token
(its docstring says a list a beam; all that fills it says otherwise [O, T]), each as {"id": [logprob, rank]} and a bare
number, which some samplers give, as it is. Going out, a field that is set and isn't carried (logits, multimodal
handles: memory of one process) is an error; coming in, fields the installed release doesn't have are left out.
"""

import dataclasses
from typing import Any

import msgspec

from schemas.errors import KvMismatchError, RequestError
from schemas.message import decode, encode
from services.engines.trtllm.api import TrtllmApi
from services.engines.trtllm.completion import LogprobRow

CONTEXT_ONLY = "context_only"
GENERATION_ONLY = "generation_only"
CONTEXT_FIRST = 0

_MAX_NESTING = 4


class WireParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What crosses the bus. `disagg_request_id` wins over `ctx_request_id` as the transfer's id."""

    first_gen_tokens: tuple[int, ...] | None = None
    first_gen_log_probs: Any = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: tuple[int, ...] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None
    ctx_usage: dict[str, Any] | None = None
    conversation_id: str | None = None


_CARRIED = frozenset(field.name for field in msgspec.structs.fields(WireParams))


def context_params(api: TrtllmApi, disagg_request_id: int) -> Any:
    """Return the context phase's DisaggregatedParams, under our id where the release knows such ids."""
    fields = api.disaggregated_fields()
    kwargs: dict[str, Any] = {"request_type": CONTEXT_ONLY}
    if "disagg_request_id" in fields:
        kwargs["disagg_request_id"] = disagg_request_id
    if "schedule_style" in fields and api.schedule_style is not None:
        kwargs["schedule_style"] = api.schedule_style(CONTEXT_FIRST)
    return api.disaggregated_params(**kwargs)


def to_wire(made: Any, sent: Any, first_row: LogprobRow | float | None) -> msgspec.Raw:
    """Return what the context phase made of the params we `sent`, as JSON.

    Some releases answer with less than they were given [R]: our id is added again, and `first_row` where the
    dataclass has no logprobs. Raises KvMismatchError for params that can't lead a generation phase to the KV.
    """
    values = {
        field.name: value
        for field in dataclasses.fields(made)
        if field.name != "request_type" and (value := getattr(made, field.name)) is not None
    }
    if lost := sorted(values.keys() - _CARRIED):
        raise KvMismatchError(f"TensorRT-LLM's handoff has {lost[0]}, which can't leave its process")
    if values.get("ctx_request_id") is None:
        raise KvMismatchError("TensorRT-LLM's context phase gave no ctx_request_id")
    if "disagg_request_id" not in values and "disagg_request_id" in _names(sent):
        values["disagg_request_id"] = sent.disagg_request_id
    log_probs = values.pop("first_gen_log_probs", None) or ([first_row] if first_row is not None else None)
    if log_probs is not None:
        values["first_gen_log_probs"] = _plain(log_probs)
    return msgspec.Raw(encode(msgspec.convert(values, WireParams, from_attributes=True)))


def from_wire(raw: msgspec.Raw) -> WireParams:
    """Return the params that a context phase handed over; raises RequestError when they aren't any."""
    wire = decode(bytes(raw), WireParams)
    if wire.ctx_request_id is None:
        raise RequestError("the handoff has no ctx_request_id", param="params")
    return wire


def generation_params(api: TrtllmApi, wire: WireParams) -> Any:
    """Return the generation phase's DisaggregatedParams."""
    values = {name: value for name in _CARRIED if (value := getattr(wire, name)) is not None}
    for name in ("first_gen_tokens", "draft_tokens"):
        if name in values:
            values[name] = list(values[name])
    if wire.first_gen_log_probs is not None:
        values["first_gen_log_probs"] = _rebuilt(api, wire.first_gen_log_probs)
    if wire.schedule_style is not None and api.schedule_style is not None:
        values["schedule_style"] = api.schedule_style(wire.schedule_style)
    known = api.disaggregated_fields()
    return api.disaggregated_params(
        request_type=GENERATION_ONLY, **{name: value for name, value in values.items() if name in known}
    )


def first_row(api: TrtllmApi, wire: WireParams) -> LogprobRow | float | None:
    """Return the logprobs of the first token, if they came along."""
    found = None if wire.first_gen_log_probs is None else _rebuilt(api, wire.first_gen_log_probs)
    while isinstance(found, list):
        found = found[0] if found else None
    return found


def _names(instance: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(instance))


def _plain(nested: Any) -> Any:
    if isinstance(nested, list | tuple):
        return [_plain(one) for one in nested]
    if isinstance(nested, int | float):
        return float(nested)
    return {str(token_id): [logprob.logprob, logprob.rank] for token_id, logprob in nested.items()}


def _rebuilt(api: TrtllmApi, nested: Any, depth: int = 0) -> Any:
    if isinstance(nested, list) and depth < _MAX_NESTING:
        return [_rebuilt(api, one, depth + 1) for one in nested]
    if isinstance(nested, int | float) and depth:
        return float(nested)
    try:
        return {
            int(token_id): api.logprob(logprob=float(logprob), rank=rank)
            for token_id, (logprob, rank) in nested.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise RequestError(f"the handoff's first_gen_log_probs can't be read: {error}", param="params") from error
