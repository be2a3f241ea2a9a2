"""The sim engine's arguments: strings from `--engine-arg name=value`, unknown ones refused."""

import msgspec

from schemas.errors import RequestError


class SimArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes, and latencies whose default is none.

    A step takes prefill_ms_per_token for each prompt token in it, and decode_ms_per_step if it decodes at all.
    `kv_bytes_per_token`: multiple of 16. `eos_one_in`: about one token in so many is EOS (0: never).
    """

    block_size: int = 16
    num_blocks: int = 4096
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    max_context_tokens: int = 32768
    kv_bytes_per_token: int = 16
    prefill_ms_per_token: float = 0.0
    decode_ms_per_step: float = 0.0
    transfer_gb_per_s: float = 0.0
    load_ms: float = 0.0
    eos_one_in: int = 0
    pause_dir: str = ""

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_num_seqs", "max_batched_tokens", "kv_bytes_per_token"):
            self._demand(getattr(self, name) >= 1, name, "must be at least 1")
        for name in ("prefill_ms_per_token", "decode_ms_per_step", "transfer_gb_per_s", "load_ms", "eos_one_in"):
            self._demand(getattr(self, name) >= 0, name, "must not be negative")
        self._demand(self.max_context_tokens >= 2, "max_context_tokens", "must be at least 2")
        self._demand(self.kv_bytes_per_token % 16 == 0, "kv_bytes_per_token", "must be a multiple of 16")

    def _demand(self, is_met: bool, name: str, rule: str) -> None:
        if not is_met:
            raise ValueError(f"{name} {rule}, not {getattr(self, name)}")


def parse_args(engine_args: dict[str, str]) -> SimArgs:
    """Return the arguments; raises RequestError naming an unknown or malformed one."""
    known = {field.name for field in msgspec.structs.fields(SimArgs)}
    unknown = sorted(engine_args.keys() - known)
    if unknown:
        raise RequestError(
            f"the sim engine has no argument {unknown[0]!r}; it has {', '.join(sorted(known))}", param=unknown[0]
        )
    try:
        return msgspec.convert(engine_args, SimArgs, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(f"sim engine argument: {error}", param="engine_args") from error
