"""Tokenising off the event loop. A short text costs less than the hop to a thread and is encoded in place."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

from services.gateway.tokenizer import Tokenizer

T = TypeVar("T")

# About 2 ms of tokenising; every stream of the gateway waits as long.
MAX_INLINE_CHARS = 8 * 1024
NUM_THREADS = 2


class EncodingThreads:
    """Named threads for work that would stall the streams; the tokenizers library releases the GIL."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def encode(self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) <= MAX_INLINE_CHARS:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self.run(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, run in a thread; cancelling stops the wait, not the work."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
