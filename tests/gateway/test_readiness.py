"""A path is complete exactly when some way from prompt to answer is live."""

from typing import Any

import msgspec
import pytest

from schemas.ids import WorkerId
from schemas.worker import RuntimeConfig
from services.gateway.readiness import ModelPath, model_paths
from tests.gateway.conftest import MODEL, runtime_config


def path(*workers: Any, num_routers: int = 1) -> ModelPath:
    return model_paths(workers, num_routers)[MODEL]


P = runtime_config("p", "prefill")
D = runtime_config("d", "decode")
STRICT = runtime_config("d", "decode", is_strict=True)
BOTH = runtime_config("b", "both")
OTHER = runtime_config("p2", "prefill", compat="other")


@pytest.mark.parametrize(
    ("workers", "num_routers", "is_complete", "missing"),
    [
        ((P, D), 1, True, ""),
        ((P, D), 0, False, "no router is live"),
        ((P,), 1, False, "no decode worker is ready"),
        ((D,), 1, True, ""),
        ((STRICT,), 1, False, "decode serves strictly and no prefill worker is ready"),
        ((P, STRICT), 1, True, ""),
        ((OTHER, STRICT), 1, False, "its prefill and decode workers are not compatible"),
        ((OTHER, D), 1, True, ""),
        ((BOTH,), 1, True, ""),
        ((P, BOTH), 1, True, ""),
        ((msgspec.structs.replace(D, state="draining"), P), 1, False, "no decode worker is ready"),
        ((msgspec.structs.replace(BOTH, state="starting"),), 0, False, "no router is live and no worker is ready"),
    ],
)
def test_what_is_live_decides_and_what_lacks_is_named(
    workers: tuple[Any, ...], num_routers: int, is_complete: bool, missing: str
) -> None:
    found = path(*workers, num_routers=num_routers)
    assert (found.is_complete, found.missing) == (is_complete, missing)


def test_the_context_is_what_both_ends_of_a_path_hold() -> None:
    small_pool = msgspec.structs.replace(D, total_kv_blocks=4, block_size=16)
    assert path(P, D).max_context_tokens == 512
    assert path(P, small_pool).max_context_tokens == 64
    assert path(P, D, msgspec.structs.replace(small_pool, state="starting")).max_context_tokens == 512


def test_a_small_worker_leaves_the_context_of_larger_ones_as_it_is() -> None:
    def small(worker: RuntimeConfig, **changes: str) -> RuntimeConfig:
        return msgspec.structs.replace(worker, worker_id=WorkerId("small"), max_context_tokens=20, **changes)

    for joined in (small(P), small(D), small(P, compat="other"), small(D, compat="other"), small(BOTH)):
        assert path(P, D, joined).max_context_tokens == 512
    assert path(BOTH, small(STRICT)).max_context_tokens == 512
    assert path(BOTH, small(P), small(D)).max_context_tokens == 512
    assert path(D, small(D)).max_context_tokens == 512
    assert path(P, D, small(D), small(P)).decode_contexts == (20, 512)


def test_a_worker_without_a_partner_as_large_promises_nothing() -> None:
    small = msgspec.structs.replace(D, worker_id=WorkerId("small"), max_context_tokens=20)
    assert path(P, small).max_context_tokens == 20
    lonely = msgspec.structs.replace(D, compat="other")
    assert path(P, small, lonely).max_context_tokens == 20
    assert path(P, small, BOTH).max_context_tokens == 512


def test_of_two_digests_the_complete_one_whose_workers_are_newest_serves() -> None:
    old = [msgspec.structs.replace(w, model_digest="old", epoch=1) for w in (P, D)]
    new = [msgspec.structs.replace(w, model_digest="new", epoch=2) for w in (P, D)]
    assert path(*old, new[0]).digest == "old"
    assert path(*old, *new).digest == "new"


def test_a_worker_of_both_roles_is_no_decode_half_of_a_pair() -> None:
    """The router never hands a prefill worker's KV to it, so the path isn't disaggregated."""
    found = path(P, BOTH)
    assert (found.is_complete, found.is_disaggregated, found.is_aggregated) == (True, False, True)


def test_a_model_whose_workers_all_drain_is_leaving() -> None:
    draining = [msgspec.structs.replace(w, state="draining") for w in (P, D)]
    assert path(*draining).is_leaving
    assert not path(*draining, BOTH).is_leaving
    assert not path(*draining, msgspec.structs.replace(BOTH, state="starting")).is_leaving


def test_a_strict_router_makes_decode_alone_no_path() -> None:
    found = model_paths([D], 2, has_strict_router=True)[MODEL]
    assert not found.is_complete
    assert "strict" in found.missing
    assert model_paths([P, D], 2, has_strict_router=True)[MODEL].is_complete
