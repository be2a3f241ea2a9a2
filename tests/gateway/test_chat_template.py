"""Templates render as Hugging Face's do, in a sandbox."""

import pytest

from schemas.errors import RequestError
from services.gateway.chat_template import ChatTemplate
from services.gateway.openai_request import ChatMessage, ContentPart

HI = [ChatMessage(role="user", content="hi")]


def render(source: str, messages: list[ChatMessage] | None = None, **kwargs: object) -> str:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    return template.render(messages or HI, kwargs=kwargs)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0]['role'] }}: {{ messages[0].content }}{{ eos_token }}", "<s>user: hi</s>"),
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\n", "x\n"),
        ("{{ {'a': 'ä<b>'} | tojson }}", '{"a": "ä<b>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ tools is none }} {{ documents is none }} {{ undefined_thing is defined }}", "True True False"),
        ("{{ add_generation_prompt }}", "True"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
    ],
)
def test_the_conventions_of_hugging_face_templates_hold(source: str, expected: str) -> None:
    assert render(source) == expected


def test_a_template_that_refuses_the_messages_is_a_400_with_its_words() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at_all }}",
        "{{ messages[7].content }}",
        "{{ 'a' + 1 }}",
    ],
)
def test_what_a_template_may_not_or_cannot_do_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)


def test_variables_can_be_given_but_not_those_of_the_server() -> None:
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    with pytest.raises(RequestError, match=r"chat_template_kwargs\.bos_token"):
        render("x", bos_token="y")


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts: list[ContentPart] = [ContentPart("text", "a"), ContentPart("text", "b")]
    message = ChatMessage(role="developer", content=parts, name="ann")
    source = "{{ messages[0].role }} {{ messages[0].content }} {{ messages[0].name }}"
    assert render(source, [message]) == "system a\nb ann"
