"""vLLM's own command line: what it can't use is said by name, and the worker doesn't come back to try again."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.engines import CASES, environment

VLLM = next(case for case in CASES if case.name == "vllm")
SHORT = '{"kv_connector": "NixlPushConnector", "kv_role": "kv_producer"}'
UNKNOWN = '{"kv_connector": "NoSuchConnector"}'

pytestmark = [pytest.mark.conformance_vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--kv-transfer-config", UNKNOWN), "no KV connector 'NoSuchConnector'; it has"),
        (("--no-such-flag",), "--no-such-flag"),
        (("--kv-transfer", SHORT), "give --kv-transfer-config by that name"),
    ],
    ids=["vllm-connector", "vllm-flag", "vllm-short-flag"],
)
def test_it_is_refused_by_name(
    words: tuple[str, ...], said: str, conformance_server, tiny_model, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    if why := VLLM.why_not():
        pytest.skip(why)
    command = [sys.executable, "-m", "deploy.cli", "worker", "--engine", "vllm", "--role", "prefill"]
    done = subprocess.run(
        [*command, "--model", str(tiny_model), *VLLM.flags, *words],
        env=environment(VLLM, tmp_path) | {"BUSWAY_NATS_URL": conformance_server.internal_url},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    assert said in done.stdout + done.stderr
