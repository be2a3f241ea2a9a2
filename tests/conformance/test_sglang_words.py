"""SGLang's own command line: what it or busway can't use is said by name, and the worker doesn't try again."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.engines import case_named, environment

SGLANG = case_named("sglang")

pytestmark = [pytest.mark.conformance_sglang, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--no-such-flag",), "--no-such-flag"),
        (("--dp-size", "2"), "one busway worker for each data-parallel replica"),
        (("--disaggregation-mo", "decode"), "--disaggregation-mode (--disaggregation-mo for short) is busway's to set"),
    ],
    ids=["sglang-flag", "sglang-replicas", "sglang-short-flag"],
)
def test_it_is_refused_by_name(
    words: tuple[str, ...], said: str, conformance_server, tiny_model, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    if why := SGLANG.why_not():
        pytest.skip(why)
    command = [sys.executable, "-m", "deploy.cli", "worker", "--engine", "sglang", "--role", "prefill"]
    done = subprocess.run(
        [*command, "--model", str(tiny_model), *SGLANG.flags, *words],
        env=environment(SGLANG, tmp_path) | {"BUSWAY_NATS_URL": conformance_server.internal_url},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 2, done.stderr
    assert said in done.stdout + done.stderr
