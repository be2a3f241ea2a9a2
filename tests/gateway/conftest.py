"""A whole gateway on a real nats-server, with a scripted peer in place of router and workers."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import pytest_asyncio
from tokenizers import Tokenizer

from bus.cards import publish_card
from bus.connection import Bus
from bus.discovery import register
from bus.server import NatsServer
from bus.subjects import slug
from schemas.ids import Epoch, WorkerId
from schemas.model_card import ModelCard
from schemas.worker import RuntimeConfig, ServiceRecord
from services.config import GatewayConfig
from services.gateway.service import run_gateway
from tests.conftest import wait_until
from tests.gateway.peer import DECODE, PREFILL, ROUTER, Peer, open_peer, say
from tests.gateway.vocabularies import CHATML, IM_END, byte_level_json

MODEL = "org/tiny-1.0"
MAX_CONTEXT = 512


def runtime_config(worker_id: str, role: str, **changes: Any) -> RuntimeConfig:
    config = RuntimeConfig(
        worker_id=WorkerId(worker_id),
        epoch=Epoch(1),
        model=MODEL,
        model_digest="digest-1",
        role="prefill",
        backend="test",
        state="ready",
        handoff="after_prefill",
        compat="compat-1",
        block_size=16,
        total_kv_blocks=1000,
        max_num_seqs=8,
        max_batched_tokens=512,
        max_context_tokens=MAX_CONTEXT,
    )
    return msgspec.structs.replace(config, role=role, **changes)


def card() -> ModelCard:
    return ModelCard(
        model=MODEL,
        digest="digest-1",
        tokenizer_json=byte_level_json(),
        chat_template=CHATML,
        eos_token="<|im_end|>",
        eos_token_ids=(IM_END,),
        max_context_tokens=MAX_CONTEXT,
        vocab_size=Tokenizer.from_str(byte_level_json()).get_vocab_size(),
    )


@dataclass
class Rig:
    """A running gateway and what is around it."""

    url: str
    nats_url: str
    namespace: str
    peer: Peer
    fleet_bus: Bus
    gateway_bus: Bus
    http: aiohttp.ClientSession
    tokenizer: Tokenizer
    stop: asyncio.Event

    def says(self, text: str, **options: Any) -> list[int]:
        """Make the peer answer with this text and <|im_end|>; returns the ids."""
        ids = self.tokenizer.encode(text).ids
        self.peer.script = say(ids, end_id=IM_END, **options)
        return ids

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        """Return status and decoded JSON of a POST; `body` is bytes or becomes JSON."""
        payload = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(self.url + path, **payload, **options) as response:
            return response.status, await response.json()

    async def chat(self, **fields: Any) -> tuple[int, Any]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.post("/v1/chat/completions", body)

    def is_listening(self) -> bool:
        """Whether the gateway's port takes connections."""
        host, port = self.url.removeprefix("http://").split(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    async def get(self, path: str) -> tuple[int, str]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.text()

    async def metric(self, name: str, **labels: str) -> float | None:
        """Return one sample of /metrics, None where it isn't there."""
        _, text = await self.get("/metrics")
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.split("{")[0] == name and wanted <= set(head.partition("{")[2].rstrip("}").split(",")):
                return float(value)
        return None


@asynccontextmanager
async def open_rig(
    server: NatsServer,
    namespace: str,
    *,
    config: GatewayConfig | None = None,
    workers: tuple[RuntimeConfig, ...] | None = None,
) -> AsyncIterator[Rig]:
    """Run a gateway, a registered fleet and the peer that plays it."""
    config = config or GatewayConfig(port=0, drain_s=2.0)
    if workers is None:
        workers = (runtime_config(PREFILL, "prefill"), runtime_config(DECODE, "decode"))
    router = ServiceRecord(service="router", id=ROUTER, epoch=Epoch(1), state="ready")
    async with AsyncExitStack() as stack:
        fleet_bus, gateway_bus = [
            await stack.enter_async_context(
                Bus.connect(server.internal_url, name=name, client_id=f"{namespace}-{name}", namespace=namespace)
            )
            for name in ("fleet", "gateway")
        ]
        peer = await open_peer(server.internal_url, namespace, slug(MODEL), say([5]))
        stack.push_async_callback(peer.nats.close)
        await publish_card(fleet_bus, card())
        for record in (router, *workers):
            await stack.enter_async_context(register(fleet_bus, record, lambda: (0, False)))
        stop = asyncio.Event()
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        tasks.create_task(run_gateway(gateway_bus, config, stop=stop, ready=url.set_result))
        stack.callback(stop.set)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        tokenizer = Tokenizer.from_str(byte_level_json())
        rig = Rig(await url, server.client_url, namespace, peer, fleet_bus, gateway_bus, http, tokenizer, stop)
        yield rig


async def wait_for(look: Callable[[], Awaitable[Any]], is_right: Callable[[Any], bool], timeout_s: float = 5.0) -> Any:
    """Return what `look` finds once it is right; fails after `timeout_s` with what was found last."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not is_right(found := await look()):
        assert asyncio.get_running_loop().time() < deadline, found
        await asyncio.sleep(0.01)
    return found


async def wait_served(rig: Rig) -> None:
    """Return once the model can be asked."""
    await wait_for(lambda: rig.get("/ready"), lambda answer: answer[0] == 200)


@asynccontextmanager
async def in_task_of_its_own(make: Callable[[], Any]) -> AsyncIterator[Any]:
    """Hold a context manager in one task from entry to exit: pytest runs a fixture's two halves in different tasks,
    which task groups don't take."""
    entered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    done = asyncio.Event()

    async def hold() -> None:
        try:
            async with make() as value:
                entered.set_result(value)
                await done.wait()
        except BaseException as error:
            if entered.done():
                raise
            entered.set_exception(error)

    holder = asyncio.get_running_loop().create_task(hold())
    yield await entered
    done.set()
    await holder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """One gateway for all tests of a module."""
    async with in_task_of_its_own(lambda: open_rig(nats_server, "busway")) as rig:
        await wait_served(rig)
        yield rig


@pytest_asyncio.fixture(loop_scope="module")
async def rig(shared_rig: Rig) -> AsyncIterator[Rig]:
    """The shared gateway with a peer that has forgotten the test before, and nothing left of this one at its end."""
    shared_rig.peer.attempts.clear()
    shared_rig.peer.refusal = None
    shared_rig.says("Hello, world")
    yield shared_rig
    await wait_until(lambda: not shared_rig.peer.tasks, explain=lambda: "the gateway left attempts running")
    for endpoint in ("chat", "completions"):
        assert not await shared_rig.metric("busway_gateway_requests_in_flight", endpoint=endpoint)
