"""busway's torch engine as a side of a bench: its own scheduler over its runner, on one thread, without the bus.

`python -m deploy.bench.torch_side MODEL_FOLDER`
"""

import mmap
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from deploy.bench.sides import Job, Spent, Watch, own_channel, serve
from schemas.ids import AttemptId, RequestId, new_attempt_id
from schemas.request import GenerateRequest, Sampling, StopConditions, StreamAddress
from services.engines.paged.limits import Limits
from services.engines.paged.scheduler import Scheduler
from services.engines.torch.runner import TorchRunner

ARGS = {"device": "cpu", "kv_memory_gib": "1", "max_num_seqs": "32", "max_batched_tokens": "2048"}
NUM_SETTLING_STEPS = 2


class TorchSide:
    """Loads at once; all methods on the same thread."""

    def __init__(self, folder: str) -> None:
        threads = torch.get_num_threads()
        self._runner = TorchRunner(folder, "bench", {**ARGS, "threads": str(threads)})
        spec = self._runner.load(lambda num_bytes: memoryview(mmap.mmap(-1, num_bytes)))
        self._scheduler = Scheduler(Limits.of(spec))
        self.facts = {"engine": f"torch {spec.engine_version}", "dtype": spec.layout.dtype, "threads": str(threads)}

    def decode(self, job: Job) -> list[Spent]:
        """See Job: contexts that were computed before are found in the prefix cache."""
        self.prefill(msgspec.structs.replace(job, kind="prefill", batch=1, steps=job.batch))
        live = [self._submit([*job.prompt(i), 7], job.steps + 8) for i in range(job.batch)]
        for _ in range(NUM_SETTLING_STEPS):
            self._step()
        spent = [self._step(expected=job.batch) for _ in range(job.steps)]
        for attempt_id in live:
            self._scheduler.abort(attempt_id)
        self._scheduler.take()
        return spent

    def prefill(self, job: Job) -> list[Spent]:
        """See Job."""
        spent = []
        for number in range(job.steps):
            self._submit(job.prompt(number), 1)
            watch = Watch()
            while self._scheduler.load().running + self._scheduler.load().waiting:
                self._step()
            spent.append(watch.read())
        return spent

    def _submit(self, token_ids: list[int], max_tokens: int) -> AttemptId:
        attempt_id = new_attempt_id()
        request = GenerateRequest(
            request_id=RequestId("bench"),
            attempt_id=attempt_id,
            model="bench",
            token_ids=tuple(token_ids),
            sampling=Sampling(seed=0, temperature=0.0),
            stop=StopConditions(max_tokens=max_tokens, ignore_eos=True),
            stream=StreamAddress(subject="bench"),
        )
        self._scheduler.generate(request, time.time())
        return attempt_id

    def _step(self, expected: int = 0) -> Spent:
        """Return what it took from planning a step to its tokens."""
        watch = Watch()
        plan = self._scheduler.schedule(time.time())
        assert plan is not None
        assert expected in (0, len(plan.slices)), f"{len(plan.slices)} sequences in a step, not {expected}"
        self._scheduler.apply(plan, self._runner.execute(plan.slices), time.time())
        self._scheduler.take()
        self._scheduler.cache_changes()
        return watch.read()


def main() -> None:
    """Serve on a thread of its own, as in the engine: glibc's main arena gives large temporaries back each time."""
    channel = own_channel()

    def run() -> None:
        serve(TorchSide(sys.argv[1]), channel, sys.stdin.buffer)

    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(run).result()


if __name__ == "__main__":
    main()
