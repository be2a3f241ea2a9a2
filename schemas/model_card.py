"""What a gateway needs of a model: published once by its workers, so that no other host needs the model's files."""

from schemas.message import Message


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
