"""One message of each kind with every field set: what must not change on the wire without a new tag."""

import msgspec

from schemas.errors import ErrorRecord
from schemas.explanation import Bid, Choice, ExplainRequest, Explanation, LocalPrefill, Refusal
from schemas.frames import (
    Accepted,
    Begun,
    Decoding,
    Failed,
    Finished,
    Prefilling,
    Timings,
    TokenLogprobs,
    Tokens,
    Usage,
)
from schemas.handoff import (
    BootstrapEndpoint,
    BootstrapInfo,
    KvTicket,
    TrtllmDisaggregatedParams,
    VllmKvTransferParams,
)
from schemas.hop import (
    Abort,
    AcceptedHop,
    Busy,
    ChangeRole,
    DecodeRequest,
    Dispatch,
    Drain,
    Ok,
    PrefillDone,
    PrefillEnded,
    PrefillFailed,
    PrefillRequest,
    Resend,
)
from schemas.ids import AttemptId, Epoch, RequestId, WorkerId
from schemas.kv_events import KvCleared, KvEvents, KvRemoved, KvSnapshot, KvSnapshotRequest, KvStored
from schemas.model_card import ModelCard, SamplingDefaults
from schemas.peer import (
    AgentMetadata,
    ConfirmRequest,
    Landed,
    LeaseRequest,
    MeetRequest,
    MetadataRequest,
    Stranded,
    Verdict,
    WriteRequest,
)
from schemas.request import Deadlines, GenerateRequest, Sampling, StopConditions, StreamAddress
from schemas.router_report import RouterReport, RoutingTotals
from schemas.trace import AttemptTrace, CompletionTrace, PhaseSeconds, Trace, TraceRequest
from schemas.worker import Heartbeat, LoadReport, PrefillCost, RuntimeConfig, ServiceRecord

ATTEMPT = AttemptId("attempt-0123456789abcd")
PREFILL = WorkerId("p1")
DECODE = WorkerId("d1")
EPOCH = Epoch(1_700_000_000_000_000_000)

ERROR = ErrorRecord(code="engine_failed", message="out of memory", phase="prefill", param="n", retry_after_s=1.5)
LOGPROBS = TokenLogprobs(-0.5, ((7, -0.5), (8, -1.25)))
TIMINGS = Timings(
    route_s=0.05,
    prefill_queue_s=0.1,
    prefill_s=0.2,
    decode_queue_s=0.3,
    transfer_s=0.4,
    first_token_s=0.01,
    decode_s=0.5,
    overlap_s=0.02,
    kv_bytes=4096,
)
PHASES = PhaseSeconds(
    gateway_s=0.001,
    retry_s=0.25,
    queue_s=0.5,
    route_s=0.05,
    prefill_queue_s=0.1,
    prefill_s=0.2,
    decode_queue_s=0.3,
    transfer_s=0.4,
    first_token_s=0.01,
    unreported_s=0.0,
    decode_s=0.5,
)
USAGE = Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4, num_computed_prompt_tokens=1)
REQUEST = GenerateRequest(
    request_id=RequestId("request-1"),
    attempt_id=ATTEMPT,
    model="org/model-1.5",
    token_ids=(1, 2, 3),
    sampling=Sampling(
        seed=-7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        is_user_seeded=True,
    ),
    stop=StopConditions(max_tokens=16, min_tokens=2, stop_token_ids=(5, 6), ignore_eos=True),
    stream=StreamAddress(subject="_INBOX.busway.gw1.tok.s", owner="gw1"),
    deadlines=Deadlines(queue=1.5, prefill=2.5, transfer=3.5, first_token=4.5, total=5.5, inter_token_s=0.5),
    num_logprobs=2,
    cache_salt="tenant",
    priority=-1,
    resume=(9, 10),
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)
DISPATCH = Dispatch(router="r1", epoch=EPOCH, number=3)
BOOTSTRAP = BootstrapInfo(
    prefill_worker=PREFILL, epoch=EPOCH, room=2**63 - 1, endpoint=BootstrapEndpoint(host="10.0.0.1", port=8998)
)
TICKET = KvTicket(
    attempt_id=ATTEMPT,
    prefill_worker=PREFILL,
    epoch=EPOCH,
    block_ids=(4, 2, 9),
    num_tokens=40,
    layout="0011223344556677",
    lease_s=10.0,
    first_token_id=42,
    first_logprobs=LOGPROBS,
    num_cached_tokens=16,
)
AGENT = AgentMetadata(
    name="p1-1", epoch=EPOCH, transport="nixl", layout="0011", host_id="h1", num_blocks=64, blob=b"\x00\xff"
)

MESSAGES: tuple[msgspec.Struct, ...] = (
    ERROR,
    REQUEST,
    BOOTSTRAP,
    TICKET,
    VllmKvTransferParams(kv_transfer_params=msgspec.Raw(b'{"remote_block_ids":[1,2]}')),
    TrtllmDisaggregatedParams(disaggregated_params=msgspec.Raw(b'{"opaque_state":"AP8="}')),
    DISPATCH,
    PrefillRequest(
        request=REQUEST,
        dispatch=DISPATCH,
        result_subject="_INBOX.busway.r1.res",
        bootstrap=BOOTSTRAP,
        decode_worker=DECODE,
    ),
    DecodeRequest(request=REQUEST, dispatch=DISPATCH, params=TICKET, prefill_worker=PREFILL, prefill_timings=TIMINGS),
    PrefillDone(attempt_id=ATTEMPT, params=TICKET, timings=TIMINGS),
    PrefillEnded(
        attempt_id=ATTEMPT, token_id=2, reason="stop", num_cached_tokens=16, logprobs=LOGPROBS, timings=TIMINGS
    ),
    PrefillFailed(attempt_id=ATTEMPT, error=ERROR),
    AcceptedHop(by="p1", epoch=EPOCH, bootstrap=BOOTSTRAP),
    Busy(by="p1", reason="draining", retry_after_s=2.5),
    Abort(attempt_id=ATTEMPT, reason="its owner has closed it", error=ERROR, phase="gateway"),
    Resend(attempt_id=ATTEMPT, from_seq=3),
    Drain(grace_s=30.0),
    ChangeRole(role="decode", grace_s=30.0),
    Ok(),
    ModelCard(
        model="m",
        digest="d",
        tokenizer_json='{"version": "1.0"}',
        chat_template="{{ messages }}",
        bos_token="<s>",
        eos_token="</s>",
        eos_token_ids=(2, 3),
        max_context_tokens=2048,
        vocab_size=49152,
        sampling=SamplingDefaults(temperature=0.2, top_k=40),
    ),
    MetadataRequest(worker=DECODE, epoch=EPOCH, agent=AGENT),
    AGENT,
    WriteRequest(
        ticket=TICKET, decode_worker=DECODE, decode_epoch=EPOCH, block_ids=(7, 8, 9), deadline=1_700_000_000.5
    ),
    LeaseRequest(attempt_id=ATTEMPT, epoch=EPOCH, lease_s=10.0),
    ConfirmRequest(attempt_id=ATTEMPT, epoch=EPOCH),
    Verdict(is_good=False, error=ERROR, num_bytes=4096, seconds=0.25),
    MeetRequest(
        attempt_id=ATTEMPT,
        room=1,
        epoch=EPOCH,
        decode_worker=DECODE,
        decode_epoch=EPOCH,
        num_tokens=40,
        prompt_digest="feed",
        block_ids=(7, 8, 9),
        skip_blocks=1,
        deadline=1_700_000_000.5,
    ),
    Landed(
        attempt_id=ATTEMPT,
        room=1,
        first_token_id=42,
        first_logprobs=LOGPROBS,
        num_cached_tokens=16,
        num_bytes=4096,
        transfer_s=0.25,
        last_transfer_s=0.125,
        decode_wait_s=0.0625,
        prefill_queue_s=0.5,
        prefill_s=0.75,
    ),
    Stranded(attempt_id=ATTEMPT, error=ERROR),
    RuntimeConfig(
        worker_id=PREFILL,
        epoch=EPOCH,
        model="m",
        model_digest="d",
        role="prefill",
        backend="sim",
        state="ready",
        handoff="rendezvous",
        compat="c",
        block_size=16,
        total_kv_blocks=100,
        max_num_seqs=8,
        max_batched_tokens=512,
        max_context_tokens=2048,
        kv_layout="0011",
        kv_dtype="float32",
        tp_size=2,
        pp_size=3,
        dp_size=4,
        engine_version="1.0",
        bootstrap=BootstrapEndpoint(host="10.0.0.1", port=8998),
        is_strict=True,
        has_kv_events=True,
        labels={"zone": "a"},
        host="h1",
        pid=1,
    ),
    ServiceRecord(
        service="gateway", id="gw1", epoch=EPOCH, state="draining", host="h1", pid=2, url="http://127.0.0.1:8000"
    ),
    Heartbeat(id="p1", epoch=EPOCH, progress=12, is_busy=True, is_leaving=True),
    LoadReport(
        worker_id=PREFILL,
        epoch=EPOCH,
        running=1,
        waiting=2,
        kv_blocks_used=3,
        kv_blocks_cached=4,
        kv_blocks_total=5,
        kv_blocks_quarantined=6,
        queued_prefill_tokens=7,
        pass_tokens=6,
        pass_age_s=0.25,
        prefill_cost=PrefillCost(num_passes=9, base_s=0.5, token_s=0.25, token2_s=0.125),
        transfer_cost=PrefillCost(num_passes=3, base_s=0.5),
        last_kv_event=15,
        dispatched={"r1": 8},
        kv_transfer_bytes={"nixl": 9},
        num_remote_prefills=10,
        num_recomputed_tokens=11,
        num_prompt_tokens=12,
        num_cached_tokens=13,
        num_generated_tokens=14,
    ),
    Accepted(ATTEMPT, "r1"),
    Prefilling(ATTEMPT, PREFILL),
    Decoding(ATTEMPT, DECODE, True),
    Tokens(ATTEMPT, 0, (5, 6)),
    Tokens(ATTEMPT, 2, (7,), (LOGPROBS,)),
    Finished(ATTEMPT, 3, "length", USAGE, TIMINGS),
    Failed(ATTEMPT, 3, ERROR),
    KvEvents(
        worker_id=PREFILL,
        epoch=EPOCH,
        first_id=3,
        changes=(KvStored(parent=2**64 - 1, blocks=b"01234567"), KvRemoved(blocks=b"01234567"), KvCleared()),
    ),
    KvSnapshotRequest(part=1, num_parts=2),
    KvSnapshot(worker_id=PREFILL, epoch=EPOCH, last_id=5, blocks=b"01234567", num_parts=2),
    ExplainRequest(id="request-1"),
    Explanation(
        router="r1",
        policy="kv",
        request_id=RequestId("request-1"),
        attempt_id=ATTEMPT,
        num_prompt_tokens=40,
        choices=(
            Choice(
                leg="prefill",
                worker=PREFILL,
                why="best estimate",
                num_candidates=2,
                bids=(
                    Bid(
                        worker=PREFILL,
                        score=0.5,
                        cached_tokens=32,
                        uncached_tokens=8,
                        queued_tokens=100,
                        held_tokens=7,
                        pass_rest_s=0.125,
                        prefill_s=0.25,
                        transfer_s=0.125,
                    ),
                ),
                best_overlap_tokens=32,
                local=LocalPrefill(
                    is_taken=False,
                    reason="streams are running",
                    worker=DECODE,
                    local_s=0.5,
                    remote_s=0.25,
                    streams_lose_s=1.5,
                    num_streams=3,
                    cached_tokens=16,
                    uncached_tokens=24,
                ),
            ),
        ),
        refusal=Refusal(reason="max_ttft", message="too late", estimate_s=2.5, limit_s=2.0, retry_after_s=0.5),
    ),
    RouterReport(
        router="r1",
        epoch=EPOCH,
        totals=(
            RoutingTotals(
                model="m",
                num_prompts=2,
                num_prompt_tokens=80,
                num_cached_tokens=32,
                num_missed_tokens=16,
                bypasses={"short prompt": 1},
                refusals={"busy": 1},
                num_estimates=1,
                estimated_s=0.5,
                actual_s=0.25,
                error_sum_s=0.25,
                error_counts=(0, 1),
            ),
        ),
    ),
    Begun(ATTEMPT, TIMINGS),
    TraceRequest(id="chatcmpl-request-1"),
    Trace(
        gateway="gw1",
        request_id=RequestId("request-1"),
        label="mine",
        trace_id="0af7651916cd43dd8448eb211c80319c",
        parent_id="b7ad6b7169203331",
        endpoint="chat",
        model="org/model-1.5",
        outcome="worker_lost",
        error="gone",
        is_stream=True,
        arrived_at=1_700_000_000.5,
        total_s=2.5,
        num_prompt_tokens=40,
        completions=(
            CompletionTrace(
                index=0,
                phases=PHASES,
                total_s=2.25,
                ttft_s=1.75,
                num_tokens=3,
                kv_bytes=4096,
                overlap_s=0.02,
                attempts=(
                    AttemptTrace(
                        attempt_id=ATTEMPT,
                        sent_s=0.001,
                        reached="streaming",
                        phases=PHASES,
                        total_s=2.0,
                        router="r1",
                        prefill_worker=PREFILL,
                        decode_worker=DECODE,
                        ended_by="worker_lost",
                    ),
                ),
            ),
        ),
    ),
)
