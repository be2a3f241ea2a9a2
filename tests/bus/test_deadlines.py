"""Which deadline counts in which stage, and which phase gets the blame."""

import pytest

from bus.deadlines import Due, Stage, check_deadlines, next_due
from schemas.errors import DeadlineError
from schemas.request import Deadlines


@pytest.mark.parametrize(
    ("deadlines", "stage", "due"),
    [
        (Deadlines(), "sent", None),
        (Deadlines(queue=1.0, prefill=2.0, transfer=3.0), "sent", Due(1.0, "queue")),
        (Deadlines(queue=1.0, prefill=2.0, transfer=3.0), "accepted", Due(1.0, "queue")),
        (Deadlines(queue=1.0, prefill=2.0, transfer=3.0), "prefilling", Due(2.0, "prefill")),
        (Deadlines(queue=1.0, prefill=2.0, transfer=3.0), "decoding", Due(3.0, "transfer")),
        (Deadlines(queue=1.0, prefill=2.0, transfer=3.0), "streaming", None),
        (Deadlines(first_token=2.0), "accepted", Due(2.0, "queue")),
        (Deadlines(first_token=2.0), "decoding", Due(2.0, "transfer")),
        (Deadlines(first_token=2.0), "streaming", None),
        (Deadlines(total=9.0, inter_token_s=0.5), "streaming", Due(1.5, "decode")),
        (Deadlines(total=1.2, inter_token_s=0.5), "streaming", Due(1.2, "total")),
        (Deadlines(total=9.0), "prefilling", Due(9.0, "total")),
    ],
)
def test_the_earliest_deadline_that_counts_is_next(deadlines: Deadlines, stage: Stage, due: Due | None) -> None:
    assert next_due(deadlines, stage, last_token_at=1.0) == due


def test_a_passed_deadline_raises_with_its_phase() -> None:
    check_deadlines(Deadlines(queue=5.0), "accepted", now=4.9)
    with pytest.raises(DeadlineError) as caught:
        check_deadlines(Deadlines(queue=5.0), "accepted", now=5.0)
    assert caught.value.phase == "queue"
