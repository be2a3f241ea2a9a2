"""The official openai client against a whole gateway."""

import openai
import pytest
from openai import AsyncOpenAI

from tests.gateway.conftest import MODEL, Rig
from tests.gateway.peer import Attempt, say
from tests.gateway.vocabularies import IM_END

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(rig: Rig) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)


async def test_a_chat_answers_with_text_reason_and_usage(rig: Rig, client: AsyncOpenAI) -> None:
    ids = rig.says("Hello, wörld 🙂")
    answer = await client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == "Hello, wörld 🙂"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(ids) + 1
    assert answer.usage.prompt_tokens == len(rig.peer.last.request["token_ids"])
