"""A suite that is killed leaves no worker behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

from bus.server import NatsServer
from deploy.processes import start_time_of

RUN = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from tests.conformance.engines import SIM
from tests.conformance.pair import WorkerProcess
worker = WorkerProcess(SimpleNamespace(internal_url=sys.argv[1]), SIM, "prefill", None, Path(sys.argv[2]))
worker.start()
worker.wait_ready()
print(worker.pid, flush=True)
time.sleep(600)
"""


def test_a_worker_dies_with_the_tests_that_started_it(conformance_server: NatsServer, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, conformance_server.internal_url, str(tmp_path)]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as tests:
        assert tests.stdout is not None
        pid = int(tests.stdout.readline())
        assert start_time_of(pid)
        tests.kill()
    end = time.monotonic() + 10.0
    while start_time_of(pid):
        assert time.monotonic() < end, "it lives on"
        time.sleep(0.02)
