"""What becomes of a prompt that should stay on decode when its worker has no place; limits on what bare clients set."""

import msgspec
import pytest

from bus.server import NatsServer
from schemas.errors import RequestError
from schemas.explanation import ExplainRequest, Explanation
from schemas.frames import Finished
from schemas.hop import DecodeRequest
from schemas.message import decode, encode
from schemas.router_report import RouterReport, RoutingTotals
from schemas.worker import LoadReport, PrefillCost
from tests.conftest import wait_until
from tests.router.scripted import MODEL
from tests.router.test_router_on_the_bus import Stage, stage

SETTINGS: dict[str, object] = {"kv_local_prefill": True}


@pytest.fixture(scope="module")
def server(nats_server: NatsServer) -> NatsServer:
    return nats_server


async def tell_costs(scene: Stage) -> None:
    """Report for the prefill worker that it is fast and has made many passes."""
    config = scene["p1"].config
    report = LoadReport(
        worker_id=config.worker_id,
        epoch=config.epoch,
        running=0,
        waiting=0,
        kv_blocks_used=0,
        kv_blocks_cached=0,
        kv_blocks_total=100,
        prefill_cost=PrefillCost(num_passes=99, base_s=0.001, token_s=1e-6),
    )
    await scene.bus.publish(scene.bus.subjects.load(MODEL, config.worker_id), encode(report))


async def totals_of(scene: Stage, num_prompts: int) -> RoutingTotals:
    """Return what the router reports once it has counted so many prompts."""
    heard: list[RoutingTotals] = []

    def hear(subject: str, payload: bytes) -> None:
        heard.extend(one for one in decode(payload, RouterReport).totals if one.num_prompts >= num_prompts)

    listening = await scene.bus.listen(scene.bus.subjects.all_router_reports, hear)
    await wait_until(lambda: bool(heard))
    await listening.stop()
    return heard[-1]


async def test_a_prompt_whose_decode_worker_is_busy_goes_to_prefill_and_to_another(server: NatsServer) -> None:
    async with stage(server, "p1", "d1", "d2", policy="kv", settings=SETTINGS) as scene:
        await tell_costs(scene)
        scene["d1"].reply = scene["d2"].reply = "busy"
        request = scene.owner.request()
        await scene.owner.ask(request)
        leg = await scene["p1"].prefill_leg()
        asked, other = (scene["d1"], scene["d2"]) if scene["d1"].legs else (scene["d2"], scene["d1"])
        (stayed,) = asked.legs
        assert isinstance(stayed, DecodeRequest)
        assert stayed.params is None
        assert other.legs == []
        other.reply = "accept"
        ticket = await scene["p1"].done(leg)
        decode_leg = await other.decode_leg()
        assert decode_leg.params == ticket
        await other.generate(decode_leg)
        assert isinstance(await scene.owner.terminal(request.attempt_id), Finished)
        explanation = await scene.bus.ask(
            scene.bus.subjects.router(scene.router, "explain"), ExplainRequest(id=request.attempt_id), Explanation
        )
        stays, goes, decodes = explanation.choices
        assert stays.local is not None
        assert (stays.local.is_taken, stays.worker) == (True, asked.id)
        assert (goes.leg, goes.worker, goes.local) == ("prefill", scene["p1"].id, None)
        assert (decodes.leg, decodes.worker) == ("decode", other.id)
        totals = await totals_of(scene, 1)
        assert (totals.num_prompts, totals.num_prompt_tokens, totals.bypasses) == (1, 3, {})
        assert (totals.num_estimates, sum(totals.error_counts)) == (1, 1)
        assert totals.actual_s > 0


async def test_a_prompt_that_stays_reaches_decode_alone(server: NatsServer) -> None:
    async with stage(server, "p1", "d1", policy="kv", settings=SETTINGS) as scene:
        await tell_costs(scene)
        request = scene.owner.request()
        await scene.owner.ask(request)
        leg = await scene["d1"].decode_leg()
        assert (leg.params, leg.prefill_worker, leg.request) == (None, None, request)
        await scene.owner.abort(scene.router, request.attempt_id)
        await scene["d1"].wait_for(lambda me: me.aborts)
        assert scene["p1"].legs == []
        totals = await totals_of(scene, 1)
        assert totals.bypasses == {"short prompt": 1}
        assert totals.num_estimates == 0


async def test_overload_is_counted_by_its_reason(server: NatsServer) -> None:
    async with stage(server, "p1", "d1", policy="least_loaded") as scene:
        scene["p1"].reply = "busy"
        request = scene.owner.request()
        await scene.owner.ask(request)
        await scene.owner.terminal(request.attempt_id)
        assert (await totals_of(scene, 0)).refusals == {"busy": 1}
        explanation = await scene.bus.ask(
            scene.bus.subjects.router(scene.router, "explain"), ExplainRequest(id=request.attempt_id), Explanation
        )
        assert explanation.refusal is not None
        assert explanation.refusal.reason == "busy"


@pytest.mark.parametrize("priority", [101, -101])
async def test_a_priority_beyond_the_routers_limit_is_refused_naming_both(server: NatsServer, priority: int) -> None:
    async with stage(server, "p1", "d1") as scene:
        request = msgspec.structs.replace(scene.owner.request(), priority=priority)
        with pytest.raises(RequestError) as caught:
            await scene.owner.ask(request)
        assert caught.value.param == "priority"
        assert caught.value.message == f"priority: {priority} isn't within -100 and 100"
        await scene.owner.ask(msgspec.structs.replace(request, priority=100))
        assert (await scene["p1"].prefill_leg()).request.priority == 100
