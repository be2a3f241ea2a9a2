"""Log lines say which request they are about, also those of tasks that it started, and can't be forged by its names."""

import asyncio
import json
import logging

import pytest

from services.log_context import RequestNames, log_about, logging_about
from services.telemetry import JsonFormatter, LogConfig, TextFormatter, setup_logging

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NAMES = RequestNames("request-1", TRACEPARENT, "attempt-1")


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("a.b", logging.INFO, "f", 1, text, None, None)


async def test_a_line_names_its_request_wherever_its_task_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().handlers[:]
    setup_logging(LogConfig(format="json"), service="router-1")
    log = logging.getLogger("some.library")

    async def child() -> None:
        await asyncio.sleep(0)
        log.warning("a child")

    async def request(number: int) -> None:
        log_about(RequestNames(f"request-{number}", TRACEPARENT))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(child())
            log.warning("the task")

    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(request(number))
    log.warning("nobody's")
    logging.getLogger().handlers[:] = before
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    told = sorted((line.get("request_id", ""), line["message"]) for line in lines)
    wanted = [(f"request-{number}", text) for number in range(3) for text in ("a child", "the task")]
    assert told == [("", "nobody's"), *wanted]
    assert {line["trace_id"] for line in lines if "request_id" in line} == {"0af7651916cd43dd8448eb211c80319c"}


def test_a_task_that_serves_many_names_one_at_a_time() -> None:
    form = JsonFormatter("g")
    with logging_about(NAMES):
        inside = json.loads(form.format(record("x")))
    assert (inside["request_id"], inside["attempt_id"]) == ("request-1", "attempt-1")
    assert "request_id" not in json.loads(form.format(record("x")))


def test_a_text_line_stays_one_line_whatever_a_client_calls_its_request() -> None:
    with logging_about(RequestNames("one\n12:00:00.000 ERROR forged", "")):
        line = TextFormatter().format(record("text"))
    assert len(line.splitlines()) == 1
    assert "a.b: text [request_id='one\\n12:00:00.000 ERROR forged']" in line
    with logging_about(NAMES):
        assert (
            TextFormatter()
            .format(record("text"))
            .endswith("[request_id=request-1 trace_id=0af7651916cd43dd8448eb211c80319c attempt_id=attempt-1]")
        )
