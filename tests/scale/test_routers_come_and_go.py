"""A router that dies, and one that joins, change nothing about where prompts go: not even in the first 2 s."""

import pytest

from deploy.bench.router_changes import measure


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_no_decision_gets_worse_when_a_router_is_killed_or_added() -> None:
    phases = await measure()
    assert not [error for phase in phases.values() for error in phase.errors]
    before = phases["before"]
    assert set(before.routers) == {"r0", "r1"}
    assert before.reuse > 0.8
    assert "r2" in phases["2 s of a new router"].routers | phases["with the new router"].routers
    for name, phase in phases.items():
        # One prompt of the ten of a short phase may meet a worker whose heartbeat was late on a busy machine.
        assert phase.reuse > before.reuse - 0.12, name
        assert phase.regret_tokens < 64, name
        assert phase.num_explained >= 0.9 * sum(phase.routers.values()), name
