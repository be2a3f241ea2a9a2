"""What busway changes in SGLang's own processes, by SGLang's own hooks (sglang/srt/plugins/hook_registry.py@0.5.23).

SGLang loads this module through busway's entry point in the group `sglang.srt.plugins`, in each of its processes. It
does nothing unless a busway worker started them (MARK in the environment). Imports SGLang and torch only then.

- End of a completion: SGLang has no EOS of its own here, every id that ends one comes with the request; min_new_tokens
  works without SGLang's tokenizer and bans exactly those.
- Sampling: seeds count (SGLang uses them in its deterministic mode only), repetition penalties see the prompt.
- Counts: how large a block's KV is, and how many bytes a request's transfer moved, leave the scheduler.
- Prefill's bootstrap thread: what a peer sends can't end it. A thread that dies all the same takes the engine with it,
  instead of leaving it deaf behind a green health check.
"""

import logging
import os
import signal
import threading
from typing import Any

MARK = "BUSWAY_SGLANG"
BLOCK_BYTES, TRANSFER_MIB = "busway_block_bytes", "busway_transfer_mib"

MODEL_CONFIG = "sglang.srt.configs.model_config.ModelConfig"
SAMPLING = "sglang.srt.sampling"
REQUEST_TIMES = "sglang.srt.observability.req_time_stats.SchedulerReqTimeStats"
NIXL_MANAGER = "sglang.srt.disaggregation.nixl.conn.NixlKVManager"

_log = logging.getLogger(__name__)


def register() -> None:
    """Register all hooks; the entry point."""
    if MARK not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, (kind, hook) in HOOKS.items():
        HookRegistry.register(target, hook, HookType(kind))
    threading.excepthook = end_engine


def missing() -> list[str]:
    """Return the targets that this SGLang doesn't have, once its plugins are loaded: it only logs those."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return sorted(HOOKS.keys() - HookRegistry._patched)


def no_eos(original: Any, config: Any) -> set[int]:
    """The model's own EOS is the model card's business."""
    return set()


def needs_no_tokenizer(original: Any, tokenizer: Any, stops: Any, stop_regexes: Any, min_new_tokens: int = 0) -> None:
    """min_new_tokens wants the tokenizer for its EOS, which is none of SGLang's here."""
    original(tokenizer, stops, stop_regexes, 0)


class NoTokenizer:
    """What the ban on stop ids asks a request's tokenizer for."""

    additional_stop_token_ids = None
    eos_token_id = None


def ban_stop_ids(original: Any, penalizer: Any) -> None:
    """Prepare the ban for requests without a tokenizer."""
    bare = [request for request in penalizer.orchestrator.reqs() if request.tokenizer is None]
    for request in bare:
        request.tokenizer = NoTokenizer
    try:
        original(penalizer)
    finally:
        for request in bare:
            request.tokenizer = None


def see_the_prompt(result: Any, penalizer: Any) -> None:
    """Let repetition penalties begin with the prompt's ids, as everywhere else, not with the completion's."""
    import torch

    scales = penalizer.cumulated_repetition_penalties
    for row, request in enumerate(penalizer.orchestrator.reqs()):
        penalty = request.sampling_params.repetition_penalty
        if penalty != 1.0:
            scales[row, torch.tensor(sorted(set(request.origin_input_ids)), device=scales.device)] = penalty


def draw_by_seeds(result: Any, cls: Any, batch: Any, vocab_size: int) -> Any:
    """Give the sampler each request's seed: its noise is then a function of (seed, position) alone."""
    from sglang.srt.runtime_context import get_exec

    if result.sampling_seed is None and get_exec().kernel.sampling_backend == "pytorch":
        import torch

        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        result.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
    return result


def filter_min_p_first(
    original: Any,
    probs: Any,
    top_ks: Any,
    top_ps: Any,
    min_ps: Any,
    need_min_p_sampling: bool,
    sampling_seed: Any,
    positions: Any,
    **more: Any,
) -> Any:
    """Draw by seeds with min_p, too: SGLang's scheduler dies of an assertion there. Dropping the tail that min_p drops
    before top_k and top_p leaves what they keep as it is, and noise for log weights needs no normalized ones."""
    if need_min_p_sampling and sampling_seed is not None:
        floor = probs.max(dim=-1, keepdim=True).values * min_ps.view(-1, 1)
        probs, need_min_p_sampling = probs.masked_fill(probs < floor, 0.0), False
    return original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **more)


def tell_block_bytes(result: dict[str, Any], scheduler: Any) -> None:
    """Add the KV bytes of a block to what a scheduler says when it is ready."""
    match scheduler.disaggregation_mode.value:
        case "prefill":
            result[BLOCK_BYTES] = scheduler.disagg_prefill_bootstrap_queue.kv_manager.kv_item_lens_sum
        case "decode":
            result[BLOCK_BYTES] = scheduler.disagg_decode_prealloc_queue.kv_manager.kv_item_lens_sum


def carry_transfer(result: dict[str, Any], times: Any) -> None:
    """Let the size of a request's transfer go along when its statistics leave the scheduler."""
    if result:
        result["transfer_total_mb"] = times.transfer_total_mb


def tell_transfer(result: dict[str, Any], times: Any) -> None:
    """Add the size of a request's transfer to what is told with its output."""
    result[TRANSFER_MIB] = times.transfer_total_mb


def take_only_sound_messages(original: Any, manager: Any, message: list[bytes]) -> bool:
    """Say of a message to prefill's bootstrap thread that nothing is left to do with it, when it would end the thread.

    SGLang asks this first of every message; after False it reads it without any guard.
    """
    from sglang.srt.disaggregation.nixl import conn

    try:
        if original(manager, message):
            return True
        if not message or message[0] in (b"WATERMARK", b"STAGING_RSP"):
            return not message
        if message[0] != conn.GUARD:
            raise ValueError(f"tag {message[0][:32]!r}")
        room = message[1].decode("ascii")
        message[4].decode("ascii")
        if room == "None":
            conn.KVArgsRegisterInfo.from_zmq(message[1:])
        elif 0 < int(room) < 2**63:
            conn.TransferInfo.from_zmq(message[1:])
        else:
            raise ValueError(f"room {room}")
    except Exception as error:
        _log.warning("a message to the bootstrap thread was dropped: %s: %s", type(error).__name__, error)
        return True
    return False


def survive_bad_peers(original: Any, manager: Any, peer: Any) -> None:
    """Register a decode peer; one that can't be is forgotten again instead of ending the bootstrap thread."""
    try:
        original(manager, peer)
    except Exception as error:
        manager.decode_kv_args_table.pop(peer.agent_name, None)
        _log.warning("a decode peer was refused: %s: %s", type(error).__name__, error)


def end_engine(died: threading.ExceptHookArgs) -> None:
    """Do for a dead thread what SGLang does for a dead scheduler: tell the parent, and go."""
    name = died.thread.name if died.thread is not None else "?"
    _log.critical("thread %s died: the engine ends", name, exc_info=died.exc_value)
    os.kill(os.getppid() if _is_child() else os.getpid(), signal.SIGQUIT)


def _is_child() -> bool:
    import multiprocessing

    return multiprocessing.parent_process() is not None


HOOKS: dict[str, tuple[str, Any]] = {
    f"{MODEL_CONFIG}._get_hf_eos_token_id": ("around", no_eos),
    f"{SAMPLING}.sampling_params.raise_if_tokenizer_required": ("around", needs_no_tokenizer),
    f"{SAMPLING}.penaltylib.min_new_tokens.BatchedMinNewTokensPenalizer._prepare": ("around", ban_stop_ids),
    f"{SAMPLING}.penaltylib.repetition_penalty.BatchedRepetitionPenalizer._prepare": ("after", see_the_prompt),
    f"{SAMPLING}.sampling_batch_info.SamplingBatchInfo.from_schedule_batch": ("after", draw_by_seeds),
    "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch": ("around", filter_min_p_first),
    "sglang.srt.managers.scheduler.Scheduler.get_init_info": ("after", tell_block_bytes),
    f"{REQUEST_TIMES}.__getstate__": ("after", carry_transfer),
    f"{REQUEST_TIMES}.convert_to_output_meta_info": ("after", tell_transfer),
    f"{NIXL_MANAGER}._handle_abort_notification": ("around", take_only_sound_messages),
    f"{NIXL_MANAGER}._add_remote_peer": ("around", survive_bad_peers),
}
