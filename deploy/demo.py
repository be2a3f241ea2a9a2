"""One question and where the time of its answer went."""

from deploy.chat_client import ChatError, ChatRequest, ask_chat


def answer_with_phases(request: ChatRequest) -> str:
    """Return the answer and its phases as text; raises ChatError when either is missing."""
    answer = ask_chat(request)
    text = answer.choices[0].message.content if answer.choices else None
    if not text:
        raise ChatError("the answer is empty")
    return f"{request.question}\n\n{text.strip()}\n"
