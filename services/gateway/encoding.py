"""Tokenising off the event loop. A short text costs less than the hop to a thread and is encoded in place."""

import asyncio
from collections.abc import Callable, Sequence
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

    async def encode(self, tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of each text."""

        def encode_all() -> list[list[int]]:
            return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        return await self.run(encode_all, is_long=sum(map(len, texts)) > MAX_INLINE_CHARS)

    async def run(self, work: Callable[[], T], *, is_long: bool = True) -> T:
        """Return what `work` returns, run in a thread if it is long; cancelling stops the wait, not the work."""
        if not is_long:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
