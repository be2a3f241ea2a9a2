"""From a worker's settings to its engine. torch and NIXL are imported only when they are asked for."""

import msgspec

from schemas.errors import RequestError
from services.config import WorkerConfig
from services.engines.paged.engine import PagedEngine
from services.engines.paged.handoff import HandoffOptions
from services.engines.paged.runner import ModelRunner
from services.engines.pause import PausePoints
from services.engines.protocol import Engine
from services.kv.transfer import KvTransfer

_HANDOFF_ARGS = {"kv_fetch": "fetch", "kv_transfer_s": "transfer_s", "kv_rendezvous_s": "rendezvous_s"}


def make_engine(config: WorkerConfig, *, is_one_host: bool = False) -> Engine:
    """Return the engine that `config` describes, not yet loaded.

    `is_one_host`: all peers are on this machine, so NIXL's sockets needn't leave the loopback device.
    Of `engine_args`, kv_fetch (auto, read or write), kv_transfer_s and kv_rendezvous_s belong to the handoff; the
    rest go to the runner. Raises RequestError naming an argument that isn't known or can't be, ModuleNotFoundError
    saying what to install.
    """
    if config.engine == "trtllm":
        from services.engines.trtllm.make import make_trtllm_engine

        return make_trtllm_engine(config)
    if is_one_host and config.transfer == "nixl":
        _keep_ucx_to_loopback()
    if config.engine == "vllm":
        from services.engines.vllm.factory import make_vllm

        return make_vllm(config, is_one_host=is_one_host)
    if config.engine == "sglang":
        from services.engines.sglang.factory import make_sglang

        return make_sglang(config, is_one_host=is_one_host)
    if config.engine_words:
        words = " ".join(config.engine_words)
        message = f"the {config.engine} engine takes --engine-arg KEY=VALUE, not {words!r}"
        raise RequestError(message, param="engine_words")
    ours = {key: value for key, value in config.engine_args.items() if key in _HANDOFF_ARGS}
    theirs = {key: value for key, value in config.engine_args.items() if key not in _HANDOFF_ARGS}
    options = _options(config, ours)
    if config.engine == "sim":
        runner, transfer, pauses = _sim(config, theirs)
    else:
        runner, transfer, pauses = _torch(config, theirs)
    return PagedEngine(runner, transfer, handoff=config.handoff, options=options, pauses=pauses)


def _options(config: WorkerConfig, engine_args: dict[str, str]) -> HandoffOptions:
    fields: dict[str, object] = {_HANDOFF_ARGS[key]: value for key, value in engine_args.items()}
    if config.lease_s <= 0:
        raise RequestError(f"lease_s must be above 0, not {config.lease_s:g}", param="lease_s")
    if config.transfer == "nixl" and _ucx_may_use_tcp():
        fields.setdefault("fetch", "write")
    fields |= {"kv_load_failure": config.kv_load_failure, "lease_s": config.lease_s}
    try:
        return msgspec.convert(fields, HandoffOptions, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(f"engine argument refused: {error}", param="engine_args") from error


def _keep_ucx_to_loopback() -> None:
    from services.kv.nixl import keep_to_loopback

    keep_to_loopback()


def _ucx_may_use_tcp() -> bool:
    from services.kv.nixl import may_be_tcp

    return may_be_tcp()


def _sim(config: WorkerConfig, engine_args: dict[str, str]) -> tuple[ModelRunner, KvTransfer, PausePoints]:
    from services.engines.model_files import load_card
    from services.engines.sim.runner import SimRunner

    card = load_card(config.model_path, config.model) if config.model_path else None
    runner = SimRunner(engine_args, card)
    return runner, _transfer(config, gb_per_s=runner.transfer_gb_per_s or None), runner.pauses


def _torch(config: WorkerConfig, engine_args: dict[str, str]) -> tuple[ModelRunner, KvTransfer, PausePoints]:
    try:
        from services.engines.torch.runner import TorchRunner
    except ModuleNotFoundError as error:
        message = f"the engine torch needs {error.name}: pip install 'busway[torch]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    runner = TorchRunner(config.model_path, config.model, engine_args)
    return runner, _transfer(config, gb_per_s=None), PausePoints()


def _transfer(config: WorkerConfig, *, gb_per_s: float | None) -> KvTransfer:
    if config.transfer == "shm":
        from services.kv.shm import ShmTransfer

        return ShmTransfer(gb_per_s=gb_per_s)
    if gb_per_s is not None:
        raise RequestError("transfer_gb_per_s goes with the transfer shm, not nixl", param="transfer_gb_per_s")
    from services.kv.nixl import NixlTransfer

    return NixlTransfer()
