"""An OpenAI request's prompts as token ids: template, then tokenizer. Step 2 of a request's walk."""

from collections.abc import Sequence

from schemas.errors import ContextOverflowError, RequestError
from services.gateway.encoding import EncodingThreads
from services.gateway.models import ServedModel
from services.gateway.openai_request import ChatRequest, CompletionRequest


async def encode_prompts(
    request: ChatRequest | CompletionRequest, model: ServedModel, threads: EncodingThreads
) -> list[list[int]]:
    """Return the ids of each prompt; long texts are encoded in a thread.

    Raises RequestError naming the field, ContextOverflowError at once for a text that can't fit.
    """
    if isinstance(request, ChatRequest):
        # The template writes the special tokens itself.
        return await _encode([_render(request, model)], model, threads, "messages", add_special_tokens=False)
    prompts = request.prompts()
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(await _encode(texts, model, threads, "prompt", add_special_tokens=True))
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]


def _render(request: ChatRequest, model: ServedModel) -> str:
    template = model.vocabulary.template
    if template is None:
        raise RequestError(
            f"model {model.name!r} has no chat template; /v1/completions takes plain prompts", param="messages"
        )
    return template.render(
        request.messages,
        add_generation_prompt=request.add_generation_prompt is not False,
        kwargs=request.chat_template_kwargs,
    )


async def _encode(
    texts: Sequence[str], model: ServedModel, threads: EncodingThreads, param: str, *, add_special_tokens: bool
) -> list[list[int]]:
    tokenizer = model.vocabulary.tokenizer
    for text in texts:
        fewest = tokenizer.fewest_tokens(text)
        if fewest > model.max_context_tokens:
            raise ContextOverflowError(
                f"{param}: the prompt of {len(text)} characters has at least {fewest} tokens, "
                f"which exceed the model's context of {model.max_context_tokens} tokens",
                param=param,
            )
    return await threads.encode(tokenizer, texts, add_special_tokens=add_special_tokens)
