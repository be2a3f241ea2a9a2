"""A chat through a gateway and a router: the text is the aggregated engine's, made by the pair."""

import json
from typing import Any

import aiohttp

from schemas.message import decode
from schemas.request import GenerateRequest
from services.engines.sim.card import builtin_card
from services.gateway.tokenizer import Tokenizer
from tests.conformance.front import front, until_ready
from tests.conformance.pair import MODEL, Desk, namespace

NUM_TOKENS = 12
QUESTION = "what is it that moves from one engine to the other, and how does anybody know that it arrived"
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": NUM_TOKENS,
    "temperature": 0,
    "ignore_eos": True,
}


async def whole(http: aiohttp.ClientSession, desk: Desk) -> str:
    async with http.post("/v1/chat/completions", json=BODY, headers={"X-Busway-Timings": "1"}) as response:
        answer = await response.json()
    assert response.status == 200, answer
    seen = answer["busway"]
    assert (seen["prefill_worker"], seen["decode_worker"]) == (desk.pair.prefill.id, desk.pair.decode.id)
    assert (seen["num_computed_prompt_tokens"], seen["num_resubmits"]) == (0, 0)
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    text: str = answer["choices"][0]["message"]["content"]
    return text


async def streamed(http: aiohttp.ClientSession) -> str:
    text = ""
    async with http.post("/v1/chat/completions", json=BODY | {"stream": True}) as response:
        assert response.status == 200
        async for line in response.content:
            event = line.removeprefix(b"data: ").strip()
            if event.startswith(b"{"):
                text += json.loads(event)["choices"][0]["delta"].get("content") or ""
    return text


async def test_the_text_is_the_aggregated_engines_streamed_and_whole(desk: Desk) -> None:
    asked: list[GenerateRequest] = []
    await desk.bus.listen(
        desk.bus.subjects.requests(desk.model), lambda subject, payload: asked.append(decode(payload, GenerateRequest))
    )
    async with front(desk.pair.server, namespace(desk.pair.case)) as url, aiohttp.ClientSession(url) as http:
        await until_ready(http)
        texts = [await whole(http, desk), await streamed(http)]
    alone = await desk.aggregated(desk.request(asked[0].token_ids, NUM_TOKENS))
    assert texts == [Tokenizer(builtin_card().tokenizer_json).decode(alone.ids)] * 2
    assert len(texts[0]) > NUM_TOKENS
