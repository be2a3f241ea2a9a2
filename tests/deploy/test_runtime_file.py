"""The note of a running stack: found while its process lives, private, tidied when it is dead."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from deploy.processes import is_same_process, start_time_of
from deploy.runtime_file import RuntimeNote, live_notes, new_note, newest_note, remove_note, runtime_dir, write_note


@pytest.fixture
def note() -> RuntimeNote:
    return new_note(nats_url="nats://i:secret@h:1", client_url="nats://c:secret@h:1", namespace="busway", model="sim")


def test_a_note_is_found_by_its_user_alone_and_goes_with_its_stack(tmp_path: Path, note: RuntimeNote) -> None:
    folder = tmp_path / "busway"
    path = write_note(folder, note)
    assert newest_note({"XDG_RUNTIME_DIR": str(tmp_path)}) == note
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    remove_note(folder)
    remove_note(folder)
    assert list(folder.iterdir()) == []
    assert newest_note({"XDG_RUNTIME_DIR": str(tmp_path)}) is None


def test_notes_of_dead_processes_and_of_reused_pids_are_removed(tmp_path: Path, note: RuntimeNote) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale = [
        msgspec.structs.replace(note, pid=ended.pid),
        msgspec.structs.replace(note, pid=os.getppid(), start_time=start_time_of(os.getppid()) + 1),
    ]
    for other in stale:
        (tmp_path / f"{other.pid}.json").write_bytes(msgspec.json.encode(other))
    (tmp_path / "broken.json").write_text("{")
    write_note(tmp_path, note)
    assert live_notes(tmp_path) == [note]
    assert [path.name for path in tmp_path.iterdir()] == [f"{note.pid}.json"]


def test_the_newest_live_stack_comes_first(tmp_path: Path, note: RuntimeNote) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        started = msgspec.structs.replace(note, pid=other.pid, start_time=start_time_of(other.pid))
        newer = msgspec.structs.replace(started, started_at=note.started_at + 1)
        (tmp_path / f"{other.pid}.json").write_bytes(msgspec.json.encode(newer))
        write_note(tmp_path, note)
        assert live_notes(tmp_path) == [newer, note]
        other.kill()
    assert live_notes(tmp_path) == [note]


def test_notes_lie_in_the_runtime_dir_else_in_the_state_dir() -> None:
    assert runtime_dir({"XDG_RUNTIME_DIR": "/run/user/1", "HOME": "/h"}) == Path("/run/user/1/busway")
    assert runtime_dir({"XDG_STATE_HOME": "/s", "HOME": "/h"}) == Path("/s/busway")
    assert runtime_dir({"HOME": "/h"}) == Path("/h/.local/state/busway")


def test_a_process_is_known_by_its_pid_and_start_time_and_a_zombie_is_none() -> None:
    mine = start_time_of(os.getpid())
    assert is_same_process(os.getpid(), mine)
    assert not is_same_process(os.getpid(), mine + 1)
    assert not is_same_process(os.getpid(), 0)
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_time_of(child.pid) == 0
    child.wait()
