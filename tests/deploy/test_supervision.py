"""The small parts of supervision: when to restart, the notify protocol, dying with the parent, log floods."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.notify import notify
from deploy.ready_socket import ready_socket
from deploy.restarts import EXIT_USAGE, MAX_DELAY_S, GiveUp, Left, Restart, RestartPolicy
from services.telemetry import LogConfig, RepeatLimit, setup_logging


def test_a_process_that_leaves_by_itself_is_left_alone() -> None:
    assert RestartPolicy().ended(code=0, ran_s=1.0) == Left()


def test_a_process_with_a_wrong_configuration_is_given_up_at_once() -> None:
    assert isinstance(RestartPolicy().ended(code=EXIT_USAGE, ran_s=0.1), GiveUp)


def test_a_process_that_never_was_ready_gets_three_tries() -> None:
    policy = RestartPolicy()
    verdicts = [policy.ended(code=1, ran_s=0.1) for _ in range(3)]
    assert [type(verdict) for verdict in verdicts] == [Restart, Restart, GiveUp]


def test_the_delay_doubles_up_to_its_limit_and_starts_anew_after_health() -> None:
    policy = RestartPolicy()
    policy.was_ready()
    verdicts = [policy.ended(code=-9, ran_s=1.0) for _ in range(9)]
    delays = [verdict.delay_s for verdict in verdicts if isinstance(verdict, Restart)]
    assert delays[:3] == [0.2, 0.4, 0.8]
    assert delays[-1] == MAX_DELAY_S
    assert len(delays) == 9
    assert policy.ended(code=-9, ran_s=60.0) == Restart(delay_s=0.2)


async def test_the_launcher_hears_what_a_service_notifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with ready_socket(tmp_path / "notify", heard.put_nowait):
        notify("READY=1", "STATUS=http://h:1/?a=b", "MAINPID=7", "no assignment")
        assert await heard.get() == {"READY": "1", "STATUS": "http://h:1/?a=b", "MAINPID": "7"}


def test_notifying_without_a_service_manager_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")


CHILD = """
import sys
from deploy.processes import die_with_parent
die_with_parent(int(sys.argv[1]))
print("up", flush=True)
sys.stdin.read()
"""
PARENT = f"""
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())])
sys.stdin.read()
"""


def test_a_child_dies_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdin is not None
    assert parent.stdout.readline() == b"up\n"
    parent.send_signal(signal.SIGKILL)
    assert parent.stdout.read() == b""  # ends when the last holder of the pipe, the child, is gone; stdin is still open
    parent.stdin.close()
    parent.stdout.close()
    parent.wait()


def test_a_child_whose_parent_is_gone_before_it_asks_does_not_live() -> None:
    code = f"from deploy.processes import die_with_parent; die_with_parent({os.getpid()} + 1); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""


@given(st.lists(st.floats(0, 30), max_size=60), st.integers(1, 5))
def test_no_minute_holds_more_than_the_limit_and_no_refusal_is_forgotten(gaps: list[float], limit: int) -> None:
    repeats = RepeatLimit(limit)
    now, said, refused, told = 0.0, [], 0, 0
    for gap in gaps:
        now += gap
        unsaid = repeats.admit("key", now)
        if unsaid is None:
            refused += 1
        else:
            said.append(now)
            told += unsaid
    assert all(len([at for at in said if start <= at < start + 60.0]) <= limit for start in said)
    assert told <= refused
    final = repeats.admit("key", now + 61.0)
    assert final is not None
    assert told + final == refused


def test_a_flood_of_one_warning_is_cut_and_others_pass(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().handlers[:]
    setup_logging(LogConfig(format="json", max_repeats_per_minute=5), service="worker-1")
    try:
        for number in range(200):
            logging.getLogger("peer").warning("peer %s is dead", number)
            logging.getLogger("request").info("request %s", number)
        logging.getLogger("peer").error("another statement")
    finally:
        logging.getLogger().handlers[:] = before
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    by_level = {level: [line for line in lines if line["level"] == level] for level in ("info", "warning", "error")}
    assert {level: len(found) for level, found in by_level.items()} == {"info": 200, "warning": 5, "error": 1}
    assert by_level["warning"][0]["message"] == "peer 0 is dead"
    assert by_level["warning"][0]["service"] == "worker-1"
