"""`busway serve` end to end with the sim engine: real processes, a real nats-server, the real command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from deploy.launcher import missing_role
from deploy.settings import ServeConfig, Settings
from services.config import RouterConfig, WorkerConfig

if TYPE_CHECKING:
    from tests.deploy.conftest import Home, Served


def worker(fleet: dict[str, Any], worker_id: str) -> dict[str, Any] | None:
    return next((row for row in fleet["workers"] if row["worker_id"] == worker_id), None)


def pid_of(served: Served, worker_id: str) -> int:
    row = worker(served.home.status(), worker_id)
    assert row is not None
    return int(row["pid"])


def test_it_serves_shows_its_fleet_and_stops_without_a_trace(home: Home) -> None:
    started = time.monotonic()
    with home.serving() as served:
        print(f"ready after {time.monotonic() - started:.2f} s")
        assert "curl http://127.0.0.1:" in home.log()
        assert "@127.0.0.1" in home.log(), "the NATS URL is shown"
        password = served.note()["nats_url"].split("@")[0].rsplit(":", 1)[1]
        assert password not in home.log()

        fleet = home.status()
        assert {row["worker_id"]: row["role"] for row in fleet["workers"]} == {
            "prefill-0": "prefill",
            "decode-0": "decode",
        }
        for row in fleet["workers"]:
            wanted = {"model": "sim", "engine": "sim", "state": "ready", "running": 0, "waiting": 0}
            assert {key: row[key] for key in wanted} == wanted
            assert row["kv_blocks_used"] == 0
            assert row["kv_blocks_total"] > 0
            assert psutil.pid_exists(row["pid"])
            assert row["epoch"] > 0
            assert row["host"]
        assert set(fleet) == {"workers", "routers", "gateways", "incompatible", "short_contexts"}
        assert [row["id"] for row in fleet["gateways"]] == ["gateway-0"]
        assert [row["url"] for row in fleet["gateways"]] == [served.url]
        assert [row["id"] for row in fleet["routers"]] == ["router-0"]
        assert fleet["incompatible"] == fleet["short_contexts"] == []
        assert "prefill-0" in home.run("status").stdout

        chat = home.run("chat", "Hello!", "--max-tokens", "8")
        assert chat.returncode == 0, chat.stderr
        assert chat.stdout.strip()

        family = served.family()
        assert len(family) == 5, "nats-server, gateway, router, prefill, decode"
        for process in family:
            assert password not in " ".join(process.cmdline())
        assert served.stop() == 0, home.log()
    assert [process for process in family if process.is_running()] == []
    assert home.notes() == []
    assert list((home.folder / "tmp").iterdir()) == []


def test_a_worker_that_joins_serves_and_one_that_is_drained_leaves_for_good(served: Served) -> None:
    home = served.home
    joiner = home.start("worker", "--role", "decode", "--engine", "sim", "--id", "joiner", log="joiner.log")
    try:
        served.home.until(lambda: worker(home.status(), "joiner"), "the worker has joined")
        drained = home.run("drain", "decode-0")
        assert drained.returncode == 0, drained.stderr
        served.home.until(lambda: worker(home.status(), "decode-0") is None, "the drained worker has left discovery")
        assert home.run("chat", "Hello!", "--max-tokens", "4").returncode == 0
        assert "decode-0   | has left" in home.log()
        assert home.run("drain", "joiner").returncode == 0
        assert joiner.wait(timeout=20) == 0
    finally:
        joiner.kill()
        joiner.wait()
    unknown = home.run("drain", "joiner")
    assert unknown.returncode == 1
    assert "joiner" in unknown.stderr
    assert "Traceback" not in unknown.stderr


def test_a_killed_worker_and_a_killed_nats_server_are_started_again(served: Served) -> None:
    home = served.home
    before = pid_of(served, "decode-0")
    os.kill(before, signal.SIGKILL)

    def is_back() -> bool:
        row = worker(home.status(), "decode-0")
        return row is not None and row["pid"] != before and row["state"] == "ready"

    served.home.until(is_back, "the worker is back")
    served.home.until(served.answers, "the stack is ready again")
    (nats,) = [process for process in served.family() if process.name() == "nats-server"]
    nats.kill()
    served.home.until(lambda: "starting it again" in home.log(), "the death of nats-server is noticed")
    served.home.until(
        lambda: home.run("status").returncode == 0 and len(home.status()["workers"]) == 2, "the fleet is back"
    )
    served.home.until(served.answers, "the stack is ready again")
    assert home.run("chat", "Hello!", "--max-tokens", "4").returncode == 0


def test_children_die_with_a_launcher_that_is_killed(served: Served) -> None:
    family = served.family()
    served.process.kill()
    served.process.wait()
    served.home.until(
        lambda: not [it for it in family if it.is_running() and it.status() != "zombie"], "all children are gone"
    )
    assert served.home.run("status").returncode == 2, "the dead stack's note counts no more"
    assert served.home.notes() == []


def test_ctrl_c_before_it_is_ready_leaves_nothing_behind(home: Home) -> None:
    process = home.start("serve", "--engine", "sim", "--port", "0")
    home.until(home.notes, "the note is written")
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 0, home.log()
    assert [it for it in family if it.is_running()] == []
    assert home.notes() == []


SLOW = ("--engine-arg", "decode_ms_per_step=50")


def ask_slowly(home: Home, max_tokens: int) -> subprocess.Popen[bytes]:
    """Return a chat that has begun to print its answer to chat.log."""
    chat = home.start("chat", "Hello!", "--max-tokens", str(max_tokens), log="chat.log")
    home.until(lambda: home.log("chat.log").strip(), "the answer has begun")
    return chat


def test_ctrl_c_lets_an_answer_under_way_end(home: Home) -> None:
    with home.serving(*SLOW) as served:
        chat = ask_slowly(home, 40)
        assert served.stop() == 0, home.log()
        assert chat.wait(timeout=10) == 0, home.log("chat.log")
        assert len(home.log("chat.log").split()) == 40


def test_a_second_ctrl_c_kills_what_is_still_under_way(home: Home) -> None:
    with home.serving(*SLOW) as served:
        chat = ask_slowly(home, 4000)
        family = served.family()
        served.process.send_signal(signal.SIGINT)
        home.until(lambda: "gateway-0 is draining" in home.log(), "the gateway drains")
        assert served.process.poll() is None
        assert served.stop() == 1, home.log()
        assert [process for process in family if process.is_running()] == []
        assert home.notes() == []
        assert chat.wait(timeout=10) == 1
        assert "broke off" in home.log("chat.log")


def test_a_stack_whose_gateway_cannot_listen_says_why_and_stops(served: Served, other_home: Home) -> None:
    port = served.url.rsplit(":", 1)[1]
    done = other_home.run("serve", "--engine", "sim", "--port", port)
    assert done.returncode == 1
    assert "gateway-0 can't be kept running" in done.stderr
    assert f"{port}" in done.stderr.split("can't be kept running")[0]
    assert other_home.notes() == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "--engine", "sim", "--policy", "best"), ["router.policy", "least_loaded"]),
        (("worker", "--engine", "sim"), ["--nats-url", "busway serve"]),
        (("status",), ["no running stack"]),
        (("chat", "Hi"), ["no running stack"]),
        (("serve", "--engine", "torch", "--model", "/no/such/model"), ["/no/such/model"]),
    ],
)
def test_wrong_calls_end_with_2_and_one_line(home: Home, arguments: tuple[str, ...], words: list[str]) -> None:
    done = home.run(*arguments)
    assert done.returncode == 2
    assert [word for word in words if word not in done.stderr] == []
    assert "Traceback" not in done.stderr


def test_a_config_file_with_an_unknown_key_starts_nothing(home: Home) -> None:
    Path(home.folder / "busway.toml").write_text("[gateway]\nprot = 1\n")
    done = home.run("serve", "--engine", "sim")
    assert done.returncode == 2
    assert "'prot'" in done.stderr
    assert "'port'" in done.stderr
    assert home.notes() == []


def test_workers_that_answer_nothing_alone_are_said_to_wait_for_which_and_get_it(home: Home) -> None:
    served = home.start("serve", "--engine", "sim", "--port", "0", "--prefill", "0", "--decode", "0")
    try:
        home.until(
            lambda: "waiting for a worker of role both to join: `busway worker --role both`" in home.log(), "it says so"
        )
        home.until(lambda: any(json.loads(note.read_text()).get("gateway_url") for note in home.notes()), "its note")
        joined = home.start("worker", "--engine", "sim", "--role", "both", log="worker.log")
        try:
            home.until(lambda: "Ready. Ask it" in home.log(), "it serves")
        finally:
            joined.terminate()
            joined.wait(30)
    finally:
        served.send_signal(signal.SIGINT)
        served.wait(30)


@pytest.mark.parametrize(
    ("numbers", "is_strict", "missing"),
    [
        ((0, 0, 0), False, "both"),
        ((2, 0, 0), False, "decode"),
        ((0, 1, 0), False, None),
        ((0, 1, 0), True, "prefill"),
        ((1, 1, 0), True, None),
        ((0, 0, 1), True, None),
    ],
)
def test_which_role_a_stack_lacks(numbers: tuple[int, int, int], is_strict: bool, missing: str | None) -> None:
    serve = ServeConfig(prefill=numbers[0], decode=numbers[1], both=numbers[2])
    assert missing_role(Settings(serve=serve, router=RouterConfig(is_strict=is_strict))) == missing
    assert missing_role(Settings(serve=serve, worker=WorkerConfig(is_strict=is_strict))) == missing


def test_the_version_is_printed_without_a_stack(home: Home) -> None:
    assert home.run("version").stdout.strip() == "0.1.0"


@pytest.mark.slow
def test_a_worker_whose_engine_loop_dies_is_started_again_with_growing_pauses(home: Home) -> None:
    """The engine's thread hits a fault with every prompt: its process says so, ends with an error, and comes back."""
    points = home.folder / "points"
    points.mkdir()
    fault = points / "before_prefill.hit"
    flags = ("--prefill", "0", "--decode", "0", "--both", "1", "--engine-arg", f"pause_dir={points}")
    with home.serving(*flags) as served:
        fault.mkdir()  # what a pause point writes to can't be opened any more
        for pause_s in ("0.2", "0.4"):
            served.home.until(served.answers, "the stack is ready")
            pid = pid_of(served, "both-0")
            chat = home.start("chat", "Hello!", "--max-tokens", "2", log="chat.log")
            wanted = f"ended with exit code 1; restart in {pause_s} s"
            served.home.until(lambda wanted=wanted: wanted in home.log(), wanted)
            chat.kill()
            chat.wait()
            assert not psutil.pid_exists(pid)
        assert "the engine's loop died" in home.log()
        fault.rmdir()
        served.home.until(served.answers, "the stack is ready again")
        assert home.run("chat", "Hello!", "--max-tokens", "4").returncode == 0
