"""Routing: what a decision costs, and what it is worth on real traces beside Dynamo's replay of the same traces.

BUSWAY_TRACES names the folder of the traces (mooncake_conversation_trace.jsonl, mooncake_synthetic_trace.jsonl; see
kvcache-ai/Mooncake, FAST25-release/traces); without it the replays are left out.
"""

import os
import random
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

from deploy.bench.dynamo_figures import FIGURES, Cell, Figures
from deploy.replay.outcome import Outcome
from deploy.replay.router_side import EPOCH, ReplayPolicy, RouterSettings
from deploy.replay.scene import EngineSize, Scene, config_of
from deploy.replay.simulation import Simulation
from deploy.replay.trace import read_trace
from schemas.worker import LoadReport, PrefillCost, RuntimeConfig
from services.prefix_hash import block_hashes
from services.router.candidates import Candidate
from services.router.kv_policy import KvPolicy, KvSettings
from services.router.kv_routing import KvMemory, KvRouting
from services.router.loads import LoadBook

BLOCK_SIZE = 64
ROLES: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
POLICIES: tuple[ReplayPolicy, ...] = ("round_robin", "kv")


class Desk:
    """What a live router asks for one request, with every worker known and half of the prompt cached on some; with
    `looks_at_decode` also whether its prefill stays on decode."""

    def __init__(self, num_workers: int, *, looks_at_decode: bool) -> None:
        self.looks_at_decode = looks_at_decode
        self.kv = KvRouting(KvPolicy(KvSettings(), random.Random(1)), BLOCK_SIZE, KvMemory())
        self.book = LoadBook(EPOCH)
        self.sides: dict[str, list[RuntimeConfig]] = {
            role: [config_of(EngineSize(), role, n) for n in range(num_workers)] for role in ROLES
        }
        for config in (one for side in self.sides.values() for one in side):
            self.book.report(
                LoadReport(
                    worker_id=config.worker_id,
                    epoch=EPOCH,
                    running=3,
                    waiting=1,
                    kv_blocks_used=9000,
                    kv_blocks_cached=5000,
                    kv_blocks_total=16384,
                    queued_prefill_tokens=5000,
                    prefill_cost=PrefillCost(num_passes=99, base_s=0.016, token_s=1.5e-5, token2_s=4e-10),
                )
            )

    def candidates(self, role: str) -> list[Candidate]:
        return [Candidate(config=one, load=self.book.load(one.worker_id, 1.0)) for one in self.sides[role]]

    def decide(self, ids: tuple[int, ...], number: int) -> None:
        """Choose both legs for a prompt and count them, as for one request."""
        hashes = block_hashes(ids, BLOCK_SIZE)
        decision = self.kv.choose_prefill(len(ids), hashes, self.candidates("prefill"), 1.0)
        if self.looks_at_decode:
            decision = self.kv.stay_or_go(len(ids), hashes, decision, self.candidates("decode"), None)
        self.kv.dispatched(number, decision, hashes, 16384 * BLOCK_SIZE, 1.0)
        self.kv.prefilled(number)
        self.kv.choose_decode(len(ids), self.candidates("decode"), {})


def measure_decision(num_tokens: int, num_workers: int, rounds: int, *, looks_at_decode: bool) -> float:
    """Return the CPU milliseconds of both choices for a request, hashing included."""
    desk, rng = Desk(num_workers, looks_at_decode=looks_at_decode), np.random.default_rng(3)
    ids = tuple(rng.integers(0, 150_000, num_tokens).tolist())
    half = block_hashes(ids[: num_tokens // 2], BLOCK_SIZE)
    for config in desk.sides["prefill"][::2]:
        desk.kv.index.stored(config.worker_id, half)
    start = time.process_time()
    for number in range(rounds):
        desk.decide(ids, number)
    return (time.process_time() - start) / rounds * 1e3


def measure_decisions(rounds: int) -> dict[str, dict[str, float]]:
    """Return CPU milliseconds by prompt length, size of the fleet, and what is looked at."""
    return {
        f"{num_workers}P{num_workers}D{', decode looked at' if looks_at_decode else ''}": {
            f"isl {num_tokens}": measure_decision(
                num_tokens, num_workers, max(2, rounds * 8 // num_workers), looks_at_decode=looks_at_decode
            )
            for num_tokens in (128, 8192, 131_072)
        }
        for num_workers in (8, 1000)
        for looks_at_decode in (False, True)
    }


def replay_cell(folder: Path, cell: Cell, policy: ReplayPolicy, max_requests: int) -> tuple[Outcome, float]:
    """Return what a policy made of a trace, and the seconds it took."""
    path = folder / f"mooncake_{cell.trace}_trace.jsonl"
    requests = read_trace(path, speed=cell.speed, max_requests=max_requests)
    scene = Scene(num_prefill=cell.num_prefill, num_decode=cell.num_decode, router=RouterSettings(policy=policy))
    start = time.perf_counter()
    outcome = Simulation(scene).run(requests)
    return outcome, time.perf_counter() - start


def beside(outcome: Outcome, theirs: Figures, seconds: float) -> dict[str, float]:
    """Return our figures, and their ratios to Dynamo's."""
    ttft, itl = outcome.ttft(), outcome.itl()
    return {
        "ttft_mean_ms": ttft.mean,
        "ttft_mean_ratio": ttft.mean / theirs.ttft_mean,
        "ttft_p99_ms": ttft.p99,
        "ttft_p99_ratio": ttft.p99 / theirs.ttft_p99,
        "itl_mean_ratio": outcome.itl().mean / theirs.itl_mean,
        "itl_p99_ms": itl.p99,
        "itl_p99_ratio": itl.p99 / theirs.itl_p99,
        "reuse": outcome.prefix_reuse,
        "reuse_theirs": theirs.reuse,
        "replay_s": seconds,
    }


def replay_table(folder: Path, *, quick: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Return every cell under both policies; quick: the first 300 requests, whose ratios mean nothing."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for cell, theirs in FIGURES.items():
        for policy in POLICIES:
            outcome, seconds = replay_cell(folder, cell, policy, 300 if quick else 0)
            table.setdefault(cell.name, {})[policy] = beside(outcome, theirs[policy], seconds)
    return table


def num_missed(cell: Cell, row: dict[str, dict[str, float]]) -> int:
    """Return how many of our aims a cell misses: round robin's mean TTFT within 2% of Dynamo's (it is the same model);
    kv's mean at or below 1.02 of Dynamo's kv on the conversation and 1.0 on the synthetic trace, its p99 at or below
    1.05; kv's ITL p99 no worse than our own round robin's."""
    blind, kv = row["round_robin"], row["kv"]
    aims = (
        abs(blind["ttft_mean_ratio"] - 1.0) <= 0.02,
        kv["ttft_mean_ratio"] <= (1.02 if cell.trace == "conversation" else 1.0),
        kv["ttft_p99_ratio"] <= 1.05,
        kv["itl_p99_ms"] <= blind["itl_p99_ms"],
    )
    return aims.count(False)


def run(*, quick: bool = False) -> dict[str, Any]:
    """Return the cost of a decision, and the table of replays."""
    folder = os.environ.get("BUSWAY_TRACES")
    table = replay_table(Path(folder), quick=quick) if folder else {}
    return {
        "decision_cpu_ms": measure_decisions(4 if quick else 100),
        "replay": table,
        "aims_missed": {cell.name: num_missed(cell, table[cell.name]) for cell in FIGURES if table},
    }
