"""The walk of one request: parse, find the model, encode, plan, run, assemble. Knows neither HTTP nor NATS subjects."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from time import perf_counter

from bus.client import Client
from schemas.errors import RequestError
from schemas.frames import Frame
from schemas.ids import AttemptId
from schemas.request import Deadlines
from services.config import GatewayConfig
from services.gateway.assembling import Assembly, StreamedAnswer, WholeAnswer
from services.gateway.choice import Choice
from services.gateway.encoding import EncodingThreads
from services.gateway.exchange import Exchange
from services.gateway.explaining import Explainer
from services.gateway.fan_out import Leg, run_legs
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import ModelDirectory, ServedModel
from services.gateway.openai_request import (
    BuswayOptions,
    ChatRequest,
    CompletionRequest,
    Endpoint,
    check_body_size,
    parse_chat,
    parse_completion,
)
from services.gateway.phases import Phases
from services.gateway.plan import CompletionPlan, Limits, check_choices, plan_completions
from services.gateway.prompting import encode_prompts
from services.gateway.rendering import Heading, renderer_for
from services.gateway.reply import Reply
from services.gateway.usage import PromptChoices, usage_of

# About 2 ms of parsing; every stream of the gateway waits as long.
_MAX_INLINE_BODY_BYTES = 256 * 1024
_ID_PREFIX: dict[Endpoint, str] = {"chat": "chatcmpl-", "completions": "cmpl-"}


class Walk:
    """What every request needs on its way; one per gateway."""

    def __init__(
        self,
        *,
        models: ModelDirectory,
        client: Client,
        threads: EncodingThreads,
        metrics: GatewayMetrics,
        explainer: Explainer,
        config: GatewayConfig,
    ) -> None:
        self._models = models
        self._explainer = explainer
        self._client = client
        self._threads = threads
        self._metrics = metrics
        self._config = config

    async def run(self, exchange: Exchange, body: bytes, reply: Reply) -> None:
        """Answer a request in full; raises BuswayError with nothing sent, or in the middle of a stream.

        Cancelling aborts its completions on the bus.
        """
        check_body_size(len(body), self._config.max_body_bytes)
        request = await self._threads.run(lambda: _parse(exchange, body), is_long=len(body) > _MAX_INLINE_BODY_BYTES)
        reply.ignored_fields = exchange.ignored_fields
        reply.is_stream = exchange.is_stream
        model = await self._models.get(request.model)
        exchange.model = model.name
        check_choices(request, 1, self._config.max_choices)
        prompts = await encode_prompts(request, model, self._threads)
        exchange.prompt_tokens = sum(map(len, prompts))
        plans = plan_completions(request, prompts, self._limits(model), secrets.randbits(63))
        legs = [self._leg(exchange, request, model, plan) for plan in plans]
        exchange.phases = [leg.phases for leg in legs]
        assembly = _assembly(exchange, request, model, reply, num_choices=len(legs))
        try:
            await run_legs(legs, assembly.deliver, self._metrics.gaps(model.name))
        finally:
            exchange.note([leg.choice.num_tokens for leg in legs], [leg.phases.first_token_at for leg in legs])
        timings = _timings(exchange, legs[0].phases) if exchange.wants_timings else {}
        busway = timings | await self.asides(exchange)
        await assembly.close(usage_of(_by_prompt(prompts, legs)), busway or None)

    async def asides(self, exchange: Exchange) -> dict[str, object]:
        """Return what the caller asked to be told beside its answer or error: the ways of the choices that a router has
        taken."""
        if not exchange.wants_explanation:
            return {}
        return {"routing": await self._explainer.explain([one for one in exchange.phases if one.router])}

    def _limits(self, model: ServedModel) -> Limits:
        return Limits(
            max_context_tokens=model.max_context_tokens,
            decode_contexts=model.decode_contexts,
            vocab_size=model.vocabulary.vocab_size,
            max_choices=self._config.max_choices,
            default_max_tokens=self._config.default_max_tokens,
            sampling=model.vocabulary.sampling,
        )

    def _leg(
        self, exchange: Exchange, request: ChatRequest | CompletionRequest, model: ServedModel, plan: CompletionPlan
    ) -> Leg:
        phases = Phases(exchange.caller.received_at, plan.index)
        end_ids = frozenset(plan.stop.stop_token_ids)
        if not plan.stop.ignore_eos:
            end_ids |= model.vocabulary.eos_token_ids
        choice = Choice(
            plan.index,
            model.vocabulary.tokenizer.detokenizer(),
            stop_strings=request.stop_strings,
            end_ids=end_ids,
            has_logprobs=request.num_logprobs is not None,
        )

        def on_send(attempt_id: AttemptId, reason: str) -> None:
            phases.sent(attempt_id, reason, perf_counter())

        def open_stream() -> AsyncGenerator[list[Frame], None]:
            return self._client.generate(
                model=model.name,
                token_ids=plan.token_ids,
                sampling=plan.sampling,
                stop=plan.stop,
                request_id=exchange.caller.request_id,
                num_logprobs=request.num_logprobs,
                cache_salt=request.cache_salt or "",
                session=request.prompt_cache_key or "",
                priority=-(request.priority or 0),
                model_digest=model.vocabulary.digest,
                end_ids=end_ids,
                deadlines=self._deadlines(request),
                traceparent=exchange.caller.traceparent,
                on_send=on_send,
            )

        return Leg(choice, phases, open_stream)

    def _deadlines(self, request: ChatRequest | CompletionRequest) -> Deadlines:
        now, first_token_s = time.time(), request.first_token_s
        return Deadlines(
            total=now + self._config.request_timeout_s,
            first_token=None if first_token_s is None else now + first_token_s,
        )


def _parse(exchange: Exchange, body: bytes) -> ChatRequest | CompletionRequest:
    implied_model = exchange.caller.implied_model
    request: ChatRequest | CompletionRequest
    if exchange.endpoint == "chat":
        request, exchange.ignored_fields = parse_chat(body, implied_model)
    else:
        request, exchange.ignored_fields = parse_completion(body, implied_model)
    if implied_model is not None and request.model != implied_model:
        raise RequestError(f"model: {request.model!r} asked on the subject of {implied_model!r}", param="model")
    exchange.is_stream = bool(request.stream)
    options, caller = request.busway or BuswayOptions(), exchange.caller
    exchange.wants_timings = caller.wants_timings or options.timings
    exchange.wants_explanation = caller.wants_explanation or options.explain
    return request


def _assembly(
    exchange: Exchange, request: ChatRequest | CompletionRequest, model: ServedModel, reply: Reply, *, num_choices: int
) -> Assembly:
    heading = Heading(
        id=_ID_PREFIX[exchange.endpoint] + exchange.caller.request_id,
        created=int(time.time()),
        model=model.name,
        fingerprint=f"fp_{model.vocabulary.digest[:10]}",
        has_usage=request.has_usage_chunk,
        has_logprobs=request.num_logprobs is not None,
    )
    renderer = renderer_for(exchange.endpoint, heading, model.vocabulary.tokenizer.token_bytes)
    if request.stream:
        return StreamedAnswer(renderer, reply, has_usage=request.has_usage_chunk)
    return WholeAnswer(renderer, reply, num_choices=num_choices)


def _timings(exchange: Exchange, phases: Phases) -> dict[str, object]:
    """Return a choice's phases, and how to find the request again."""
    caller = exchange.caller
    return phases.render(perf_counter()) | {"request_id": caller.request_id, "trace_id": caller.trace_id}


def _by_prompt(prompts: Sequence[Sequence[int]], legs: Sequence[Leg]) -> list[PromptChoices]:
    n = len(legs) // len(prompts)
    choices = [leg.choice for leg in legs]
    return [PromptChoices(len(prompt), choices[i * n : (i + 1) * n]) for i, prompt in enumerate(prompts)]
