"""Pause points: hit files say who came by, pause files hold them."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.errors import RequestError
from services.engines.pause import PausePoints


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  (files and threads set no event)
            await asyncio.sleep(0.002)


def test_without_a_folder_a_point_does_nothing() -> None:
    points = PausePoints()
    assert not points.is_armed
    points.block("before_ticket", "a")


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(RequestError, match="pause_dir"):
        PausePoints("/nowhere/at/all")


async def test_a_task_waits_at_a_paused_point_and_goes_on_when_it_is_lifted(tmp_path: Path) -> None:
    points, pause = PausePoints(str(tmp_path)), tmp_path / "mid_transfer.pause"
    pause.touch()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(points.wait("mid_transfer", "attempt"))
        hits = tmp_path / "mid_transfer.hit"
        await until(lambda: hits.exists() and hits.read_text() == "attempt\n")
        assert not task.done()
        await points.wait("before_ticket", "attempt")
        pause.unlink()


async def test_a_thread_is_held_at_a_paused_point_alone(tmp_path: Path) -> None:
    points, pause = PausePoints(str(tmp_path)), tmp_path / "after_first_token.pause"
    pause.touch()
    thread = threading.Thread(target=points.block, args=("after_first_token", "attempt"))
    thread.start()
    await until((tmp_path / "after_first_token.hit").exists)
    assert thread.is_alive()
    pause.unlink()
    await until(lambda: not thread.is_alive())
