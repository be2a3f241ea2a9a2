"""Named points at which a test can stop an engine, so that races are staged, not slept for.

Driven from outside through a directory: at point P the process appends the attempt's id as a line to the file
`P.hit` and waits while the file `P.pause` exists. Without a directory a point costs one comparison.

Points: before_prefill (the first chunk of a prompt is about to run), before_ticket, mid_transfer, before_confirm,
after_first_token (a completion's second token is about to be computed).
"""

import asyncio
import time
from pathlib import Path

from schemas.errors import RequestError
from schemas.ids import AttemptId

_POLL_S = 0.005


class PausePoints:
    """`pause_dir` "" switches all points off; a folder that doesn't exist is refused with RequestError."""

    def __init__(self, pause_dir: str = "") -> None:
        self._folder = Path(pause_dir) if pause_dir else None
        if self._folder is not None and not self._folder.is_dir():
            raise RequestError(f"pause_dir: there is no folder {pause_dir!r}", param="pause_dir")

    @property
    def is_armed(self) -> bool:
        return self._folder is not None

    def block(self, point: str, attempt_id: AttemptId) -> None:
        """Hit a point and hold the calling thread while it is paused."""
        pause = self._hit(point, attempt_id)
        while pause is not None and pause.exists():
            time.sleep(_POLL_S)

    async def wait(self, point: str, attempt_id: AttemptId) -> None:
        """Hit a point and hold the calling task while it is paused."""
        pause = self._hit(point, attempt_id)
        while pause is not None and pause.exists():  # noqa: ASYNC110  (another process sets no event of ours)
            await asyncio.sleep(_POLL_S)

    def _hit(self, point: str, attempt_id: AttemptId) -> Path | None:
        if self._folder is None:
            return None
        with (self._folder / f"{point}.hit").open("a") as hits:
            hits.write(f"{attempt_id}\n")
        return self._folder / f"{point}.pause"
