"""OpenAI's two forms of logprobs. Pure.

A token whose bytes are no whole UTF-8 is written as OpenAI writes it, by its bytes: "\\xf0\\x9f" in chat,
"bytes:\\xf0\\x9f" in completions, so that different tokens never share a name.
"""

from collections.abc import Callable, Sequence

from services.gateway.choice import TokenScore

TokenBytesOf = Callable[[int], bytes]


def chat_logprobs(scores: Sequence[TokenScore], bytes_of: TokenBytesOf) -> dict[str, object]:
    """Return `choices[].logprobs` of a chat completion or chunk."""
    return {
        "content": [
            {
                **_chat_entry(score.token_id, score.logprob, bytes_of),
                "top_logprobs": [_chat_entry(token_id, logprob, bytes_of) for token_id, logprob in score.top],
            }
            for score in scores
        ],
        "refusal": None,
    }


def completion_logprobs(scores: Sequence[TokenScore], bytes_of: TokenBytesOf) -> dict[str, object]:
    """Return `choices[].logprobs` of a legacy completion or chunk; the chosen token is among the top ones, as ever."""
    tops: list[dict[str, float]] = []
    for score in scores:
        top = {_name(bytes_of(token_id), "bytes:"): logprob for token_id, logprob in score.top}
        top.setdefault(_name(bytes_of(score.token_id), "bytes:"), score.logprob)
        tops.append(top)
    return {
        "tokens": [_name(bytes_of(score.token_id), "bytes:") for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": tops,
        "text_offset": [score.text_offset for score in scores],
    }


def _chat_entry(token_id: int, logprob: float, bytes_of: TokenBytesOf) -> dict[str, object]:
    token = bytes_of(token_id)
    return {"token": _name(token, ""), "logprob": logprob, "bytes": list(token)}


def _name(token: bytes, prefix: str) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in token)
