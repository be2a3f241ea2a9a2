"""Three minutes of chaos in each handoff."""

import asyncio

import pytest

from services.config import HandoffMode
from tests.faults.chaos import run_chaos

SECONDS = 180.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("handoff", "seed"), [("pull", 11), ("rendezvous", 12)])
def test_chaos_loses_nothing_says_nothing_wrong_and_leaves_nothing(
    handoff: HandoffMode, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    report = asyncio.run(run_chaos(seconds=SECONDS, seed=seed, handoff=handoff))
    with capsys.disabled():
        print(f"\n{handoff}, seed {seed}: {report}")
    assert not report.problems, report.problems
    assert report.num_requests > 100
    assert sum(report.faults.values()) > 10
