"""A model's chat template: messages -> the prompt's text. Pure but for strftime_now; step 2 of a request's walk.

The environment follows the conventions that Hugging Face templates are written for (docs "Writing a chat template",
transformers 4.4x/5.x): trim_blocks, lstrip_blocks, loop controls, tojson without HTML escapes, raise_exception,
strftime_now and the {% generation %} tag, in an immutable sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from schemas.errors import RequestError
from services.gateway.openai_request import ChatMessage

_RESERVED = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents"})


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %} marks the assistant's tokens for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - the type of jinja2's attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One model's template, compiled once. Raises jinja2.TemplateSyntaxError when it can't be."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        self._template = _environment().from_string(source)
        # jinja2 copies the globals for each rendering, and its own ChainMap took as long as the template itself.
        self._template.globals = dict(self._template.globals)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt; special tokens are part of it, so it is encoded without adding any.

        Raises RequestError with the template's own words when it refuses the messages.
        """
        reserved = _RESERVED & (kwargs or {}).keys()
        if reserved:
            name = f"chat_template_kwargs.{min(reserved)}"
            raise RequestError(f"{name}: this variable is set by the server", param=name)
        try:
            return self._template.render(
                {
                    **(kwargs or {}),
                    **self._tokens,
                    "messages": [_variables(message) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                    "tools": None,
                    "documents": None,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise RequestError(
                f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from error


def text_of(message: ChatMessage) -> str:
    """Return a message's text; several text parts are joined by a newline, as vLLM does."""
    if isinstance(message.content, list):
        return "\n".join(part.text or "" for part in message.content)
    return message.content or ""


def _variables(message: ChatMessage) -> dict[str, str]:
    """Return what the template sees of a message. OpenAI renamed `system` to `developer`; templates know the former."""
    role = "system" if message.role == "developer" else message.role
    variables = {"role": role, "content": text_of(message)}
    if message.name is not None:
        variables["name"] = message.name
    return variables
