"""Token ids to text, as they come. Pure; a step of every frame's way to the user.

What the pieces add up to equals decoding all ids at once, whatever the batches, and a character whose bytes come with
several tokens waits until it is whole. Two designs: a byte-level vocabulary (GPT-2's, Llama 3's, Qwen's, SmolLM2's)
maps each id to bytes, so an incremental UTF-8 decoder is exact and needs no call into the tokenizers library; all
others decode a small window again (the idea of Hugging Face's text-generation-inference).
"""

import codecs
from collections.abc import Callable, Sequence, Set
from typing import Protocol

_REPLACEMENT = "\ufffd"
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")  # looked up once: it cost 4% of a short request


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids complete."""
        ...

    def flush(self) -> str:
        """Return the text of what was held back: no more ids come. Bytes that are no UTF-8 become U+FFFD."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies. `text_bytes` maps every id to its bytes, special tokens to none."""

    def __init__(self, text_bytes: "TokenBytes") -> None:
        self._text_bytes = text_bytes
        self._decoder = _new_utf8_decoder("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        text_bytes = self._text_bytes
        if len(token_ids) == 1:
            return self._decoder.decode(text_bytes[token_ids[0]])
        return self._decoder.decode(b"".join([text_bytes[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class TokenBytes(dict[int, bytes]):
    """Id -> bytes, filled on demand; the caller's `lookup` is asked once for each id."""

    def __init__(self, lookup: Callable[[int], bytes]) -> None:
        super().__init__()
        self._lookup = lookup

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._lookup(token_id)
        return found


class WindowDetokenizer:
    """For any other tokenizer: decodes the ids since the last but one piece, and shows what goes beyond that piece.

    The older part of the window gives the decoder its context (a leading space that is stripped at the very start
    only). Held back: text that ends in U+FFFD, and runs of byte-fallback tokens, which the decoder judges as a whole,
    special tokens within them or not.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], is_byte: Callable[[int], bool], special_ids: Set[int]
    ) -> None:
        self._decode = decode
        self._is_byte = is_byte
        self._special_ids = special_ids
        self._window: list[int] = []
        self._num_shown = 0
        self._shown = ""

    def push(self, token_ids: Sequence[int]) -> str:
        self._window += [token_id for token_id in token_ids if token_id not in self._special_ids]
        if not self._window or self._is_byte(self._window[-1]):
            return ""
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._decode(self._window))

    def _show(self, text: str) -> str:
        piece = text[len(self._shown) :]
        if piece:
            del self._window[: self._num_shown]
            self._shown = self._decode(self._window)
        self._num_shown = len(self._window)
        return piece
