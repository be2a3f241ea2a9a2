"""What a decode leg on vLLM counts. vLLM itself is not needed."""

import pytest

from schemas.hop import DecodeRequest, Dispatch
from schemas.ids import Epoch
from services.engines.vllm.tally import Tally
from services.engines.vllm.words import CoreOutput, PromptStats
from tests.engines.scenes import a_request


@pytest.mark.parametrize("is_fetched", [True, False])
def test_resumed_ids_are_no_part_of_the_prompts_counts(is_fetched: bool) -> None:
    """To vLLM they are: all of them may be cached, or computed."""
    request = a_request((1, 2, 3, 4), resume=(5, 6, 7))
    leg = DecodeRequest(request=request, dispatch=Dispatch(router="r", epoch=Epoch(1), number=1))
    tally = Tally(leg, {"remote_prefill_cached_tokens": 6} if is_fetched else None)
    tally.note_first(
        CoreOutput(id="x", prompt=PromptStats(computed=7, local_cache=6, external=0, queue_s=0.0, prefill_s=0.0))
    )
    usage = tally.usage(9)
    assert (usage.prompt_tokens, usage.completion_tokens) == (4, 9)
    assert (usage.cached_tokens, usage.num_computed_prompt_tokens) == (4, 4)
