"""The main job on real input: the official client, SmolLM2, 1P1D over NIXL, compared with the aggregated engine's
answer and with transformers' own."""

import openai
import pytest
from tokenizers import Tokenizer

from tests.e2e.conftest import Stack
from tests.e2e.prompts import LENGTHS, QUICK_LENGTHS, Reference, prompt_ids


@pytest.fixture
def client(disaggregated: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{disaggregated.url}/v1", api_key="none", max_retries=0, timeout=120)


def greedy_ids(stack: Stack, tokenizer: Tokenizer, ids: list[int], max_tokens: int) -> tuple[tuple[str, ...], int]:
    """Return the completion's tokens as OpenAI's logprobs name them, and usage.completion_tokens."""
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120)
    done = client.completions.create(model=stack.model, prompt=ids, max_tokens=max_tokens, temperature=0, logprobs=0)
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(ids)
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    return tuple(logprobs.tokens), done.usage.completion_tokens


def expected_texts(tokenizer: Tokenizer, ids: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(tokenizer.decode([token], skip_special_tokens=False) for token in ids)


def assert_equal_to_reference(
    stack: Stack, tokenizer: Tokenizer, reference: Reference, lengths: tuple[int, ...]
) -> None:
    for length in lengths:
        ids = prompt_ids(tokenizer, length)
        expected = reference.greedy(tuple(ids), 16)
        tokens, completion_tokens = greedy_ids(stack, tokenizer, ids, 16)
        assert completion_tokens == len(expected), f"prompt of {length} tokens"
        assert tokens == expected_texts(tokenizer, expected), f"prompt of {length} tokens"


def test_the_openai_client_chats_through_one_prefill_and_one_decode_worker(
    client: openai.OpenAI, disaggregated: Stack
) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    done = client.chat.completions.create(model=disaggregated.model, messages=question, max_tokens=20, temperature=0)  # type: ignore[call-overload]
    assert "Paris" in done.choices[0].message.content
    assert done.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(
            model=disaggregated.model,
            messages=question,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )  # type: ignore[call-overload]
    )
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == done.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == done.usage.completion_tokens
    disaggregated.assert_idle()


def test_greedy_answers_equal_transformers_for_short_prompts(
    disaggregated: Stack, tokenizer: Tokenizer, reference: Reference
) -> None:
    assert_equal_to_reference(disaggregated, tokenizer, reference, QUICK_LENGTHS)
    disaggregated.assert_idle()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_answers_equal_transformers_for_twenty_prompts_up_to_2000_tokens(
    disaggregated: Stack, tokenizer: Tokenizer, reference: Reference
) -> None:
    assert_equal_to_reference(disaggregated, tokenizer, reference, LENGTHS)
    disaggregated.assert_idle()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_aggregated_engine_gives_the_same_twenty_answers(
    aggregated: Stack, tokenizer: Tokenizer, reference: Reference
) -> None:
    assert_equal_to_reference(aggregated, tokenizer, reference, LENGTHS)
    aggregated.assert_idle()


def test_the_kv_really_moved_and_nothing_was_recomputed(client: openai.OpenAI, disaggregated: Stack) -> None:
    before = metric(disaggregated.get("/metrics"), "busway_kv_transfer_bytes_total", 'transport="nixl"')
    client.completions.create(model=disaggregated.model, prompt="The sea is " * 40, max_tokens=4)
    disaggregated.assert_idle()
    body = disaggregated.get("/metrics")
    assert metric(body, "busway_kv_transfer_bytes_total", 'transport="nixl"') > before
    assert metric(body, "busway_decode_recomputed_tokens_total", "") == 0
    assert metric(body, "busway_remote_prefills_total", "") > 0


def metric(body: str, name: str, label: str) -> float:
    """Return the sum of a metric's samples that carry the label."""
    rows = [row for row in body.splitlines() if row.startswith(name) and label in row]
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows)


def test_twenty_four_mixed_requests_leave_no_block_behind(client: openai.OpenAI, disaggregated: Stack) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(number: int) -> str:
        done = client.chat.completions.create(
            model=disaggregated.model,
            messages=[{"role": "user", "content": f"Count to {number} " * (1 + number % 7)}],
            max_tokens=1 + number % 9,
            temperature=(number % 3) * 0.5,
            seed=number,
            n=1 + number % 2,
        )
        return str(done.choices[0].finish_reason)

    with ThreadPoolExecutor(24) as pool:
        reasons = list(pool.map(ask, range(24)))
    assert set(reasons) <= {"stop", "length"}
    disaggregated.assert_idle()
