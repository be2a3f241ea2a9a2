"""Requests posted to the engine and not yet applied, so that load counts a request from the moment it was taken."""

import threading

from msgspec import structs

from services.engines.paged.desk import DeskLoad


class Backlog:
    """Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_requests = 0
        self._num_prefill_tokens = 0

    def add(self, num_requests: int, num_prefill_tokens: int) -> None:
        """Count requests and the tokens they have to compute; negative when they are applied."""
        with self._lock:
            self._num_requests += num_requests
            self._num_prefill_tokens += num_prefill_tokens

    def added_to(self, load: DeskLoad) -> DeskLoad:
        """Return the load with what is posted."""
        if not self._num_requests:
            return load
        return structs.replace(
            load,
            waiting=load.waiting + self._num_requests,
            queued_prefill_tokens=load.queued_prefill_tokens + self._num_prefill_tokens,
        )
