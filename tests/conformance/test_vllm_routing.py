"""vLLM's prefix caches as the router sees them: policy kv sends a prompt where its KV is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgspec
import numpy as np

from bus.client import Client
from deploy.engine_python import engine_python
from schemas.explanation import ExplainRequest, Explanation
from schemas.frames import Finished, Prefilling
from schemas.ids import RequestId, WorkerId, new_request_id
from schemas.kv_events import KvSnapshot, KvSnapshotRequest
from schemas.request import Deadlines, Sampling, StopConditions
from services.config import RouterConfig, WorkerConfig
from services.prefix_hash import block_hashes
from services.router.service import run_router
from tests.conformance.cache_ear import CacheEar
from tests.conformance.engines import only
from tests.conformance.pair import MODEL, Desk, WorkerProcess
from tests.conformance.prompts import prompt

pytestmark = only("vllm")

ROUTER = "r"
BLOCK = 32
LENGTH = 5 * BLOCK + 7
NUM_BLOCKS = 64
SMALL_POOL = ("--num-gpu-blocks-override", str(NUM_BLOCKS))
HEAR_ONE = """
import sys, zmq
line = zmq.Context().socket(zmq.SUB)
line.subscribe(b"")
line.connect(sys.argv[1])
print(len(line.recv_multipart()), flush=True)
"""


@asynccontextmanager
async def routed(desk: Desk) -> AsyncIterator[Client]:
    """A router with policy kv in front of the desk's fleet, and a client."""
    stop, is_ready = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        config = RouterConfig(id=ROUTER, policy="kv")
        tasks.create_task(run_router(desk.bus, config, stop=stop, ready=lambda record: is_ready.set()))
        await is_ready.wait()
        client = Client(desk.bus)
        await client.start()
        try:
            yield client
        finally:
            stop.set()


async def ask(client: Client, ids: tuple[int, ...]) -> tuple[WorkerId, int, RequestId]:
    """Return who computed the prompt, how much of it was cached there, and the request's id."""
    request_id, where, cached = new_request_id(), WorkerId(""), -1
    stream = client.generate(
        model=MODEL,
        token_ids=ids,
        sampling=Sampling(seed=1, temperature=0.0),
        stop=StopConditions(max_tokens=3, ignore_eos=True),
        request_id=request_id,
        deadlines=Deadlines(),
    )
    async with aclosing(stream) as batches:
        async for batch in batches:
            for frame in batch:
                if isinstance(frame, Prefilling):
                    where = frame.worker
                if isinstance(frame, Finished):
                    cached = frame.usage.cached_tokens
    return where, cached, request_id


async def test_an_equal_prompt_goes_to_the_worker_that_has_its_kv(desk: Desk) -> None:
    """Two prompts, two prefill workers: each computes one of them, once, whoever is asked for it again. The second
    worker publishes its events in vLLM's own way, too."""
    folder = desk.pair.prefill.log.parent.parent / "p2"
    folder.mkdir()
    own_way = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{folder}/events"}
    flags = (*desk.pair.case.flags, *SMALL_POOL, "--kv-events-config", msgspec.json.encode(own_way).decode())
    case = msgspec.structs.replace(desk.pair.case, flags=flags)
    second = WorkerProcess(desk.pair.server, case, "prefill", desk.pair.prefill.model, folder, id="vllm-prefill-2")
    second.start()
    await asyncio.to_thread(second.wait_ready)
    try:
        subscriber = await _subscriber(own_way["endpoint"])
        async with routed(desk) as client:
            await _each_goes_home(desk, client, (desk.pair.prefill.id, second.id))
            await _what_is_told_is_what_is_cached(desk, client, second.id)
        told, _ = await asyncio.wait_for(subscriber.communicate(), 10)
        assert told.split() == [b"3"], "vLLM's own publisher must go on: topic, number, events"
    finally:
        assert await asyncio.to_thread(second.leave) == 0


async def _subscriber(endpoint: object) -> asyncio.subprocess.Process:
    """Run one who listens to vLLM's own events, with its environment's ZeroMQ."""
    python = engine_python(WorkerConfig(engine="vllm"))
    return await asyncio.create_subprocess_exec(
        str(python), "-c", HEAR_ONE, str(endpoint), stdout=asyncio.subprocess.PIPE
    )


async def _what_is_told_is_what_is_cached(desk: Desk, client: Client, worker: WorkerId) -> None:
    """More prompts than its pool holds, each asked for twice: blocks are found again, and given up."""
    snapshot = await desk.bus.ask(
        desk.bus.subjects.peer(worker, "kv_snapshot"), KvSnapshotRequest(), KvSnapshot, timeout_s=5.0
    )
    ear = await CacheEar.at(desk.bus, MODEL, worker, desk.has_news)
    ear.held |= set(np.frombuffer(snapshot.blocks, "<u8").tolist())
    for salt in range(100, 130):
        for _ in range(2):
            await ask(client, prompt(LENGTH, salt=salt))
    async with asyncio.timeout(10):
        while (load := await desk.load(worker)).kv_blocks_used or load.kv_blocks_cached != len(ear.held):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert NUM_BLOCKS // 2 < len(ear.held) < NUM_BLOCKS


async def _each_goes_home(desk: Desk, client: Client, workers: tuple[WorkerId, WorkerId]) -> None:
    ears = {worker: await CacheEar.at(desk.bus, MODEL, worker, desk.has_news) for worker in workers}
    prompts = prompt(LENGTH, salt=71), prompt(LENGTH, salt=72)
    homes = []
    for ids in prompts:
        home, cached, _ = await ask(client, ids)
        assert cached == 0
        wanted = set(block_hashes(ids, BLOCK).tolist())
        await desk.until(lambda wanted=wanted, home=home: wanted <= ears[home].held)  # type: ignore[misc]
        homes.append(home)
    assert set(homes) == set(workers)
    for ids, home in (*zip(prompts, homes, strict=True), *reversed(list(zip(prompts, homes, strict=True)))):
        where, cached, request_id = await ask(client, ids)
        assert (where, cached) == (home, LENGTH // BLOCK * BLOCK)
        subject = desk.bus.subjects.router(ROUTER, "explain")
        why = await desk.bus.ask(subject, ExplainRequest(id=request_id), Explanation, timeout_s=5.0)
        choice = next(one for one in why.choices if one.leg == "prefill")
        assert (choice.num_candidates, choice.best_overlap_tokens) == (2, LENGTH // BLOCK * BLOCK)
