"""What a gateway needs of a model: published once by its workers, so that no other host needs the model's files."""

from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.message import Message


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the model's makers want where a user says nothing; ranges as in schemas.request.Sampling."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0


class ModelCard(Message, frozen=True, kw_only=True, omit_defaults=True, tag="model_card.v1"):
    """`tokenizer_json` is a Hugging Face tokenizers file; `chat_template` is Jinja ("" when the model has none).

    `digest` covers weights and tokenizer: workers of other digests are another model. `eos_token_ids` are what
    the engine stops at; `bos_token` and `eos_token` are the template's variables.
    """

    model: str
    digest: str
    tokenizer_json: str
    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""
    eos_token_ids: tuple[int, ...] = ()
    max_context_tokens: int = 0
    vocab_size: int = 0
    sampling: SamplingDefaults = SamplingDefaults()
