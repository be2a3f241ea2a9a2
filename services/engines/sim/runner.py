"""The sim engine's model: a verified fake. No weights, but real KV in a real pool, and text that depends on it.

A token is a pure function of the state read at the last position, and, at a completion's second token and at every
32nd position, of all rows of the sequence: KV of the wrong request, in the wrong order or partly missing shows as
other words, and a request continued elsewhere goes on exactly. The noise at temperature > 0 is a function of
(seed, position) alone.
"""

import json
import time
from importlib.metadata import version

import numpy as np
from msgspec import structs

from schemas.frames import TokenLogprobs
from schemas.model_card import ModelCard
from services.engines.paged.runner import AllocateHost, Draw, RunnerSpec, Sampled, SampleSpec, Slice
from services.engines.pause import PausePoints
from services.engines.sim.args import parse_args
from services.engines.sim.arithmetic import MASK, mix, next_state, next_states
from services.engines.sim.card import builtin_card, builtin_word_ids
from services.engines.sim.pool import SimPool
from services.kv.layout import KvLayout, KvRegion

_READ_ALL_EVERY = 32


class SimRunner:
    """A ModelRunner. With a card its vocabulary is used, without one the built-in model's.

    `transfer_gb_per_s` (0: unlimited) and `pauses` are for those who make the transfer and the handoffs.
    Raises RequestError for engine_args it doesn't know.
    """

    def __init__(self, engine_args: dict[str, str], card: ModelCard | None = None) -> None:
        self._args = parse_args(engine_args)
        self.pauses = PausePoints(self._args.pause_dir)
        self._card = card or builtin_card()
        self._word_ids: list[int] = []
        self._eos_id = self._card.eos_token_ids[0] if self._card.eos_token_ids else None
        self._pool: SimPool

    @property
    def transfer_gb_per_s(self) -> float:
        return self._args.transfer_gb_per_s

    def load(self, allocate: AllocateHost) -> RunnerSpec:
        """Allocate the pool and take as long as load_ms says."""
        args, card = self._args, self._card
        time.sleep(args.load_ms / 1000)
        layout = KvLayout(
            num_layers=1,
            num_kv_heads=1,
            block_size=args.block_size,
            head_dim=args.kv_bytes_per_token // 16,
            dtype="uint64",
            itemsize_bytes=8,
        )
        self._pool = SimPool(allocate(args.num_blocks * layout.block_bytes), args.num_blocks, layout)
        self._word_ids = _word_ids(card)
        max_context_tokens = min(args.max_context_tokens, card.max_context_tokens or args.max_context_tokens)
        return RunnerSpec(
            backend="sim",
            engine_version=version("busway"),
            card=structs.replace(card, max_context_tokens=max_context_tokens),
            layout=layout,
            num_blocks=args.num_blocks,
            max_num_seqs=args.max_num_seqs,
            max_batched_tokens=args.max_batched_tokens,
            max_context_tokens=max_context_tokens,
            is_deterministic=True,
        )

    def region(self) -> KvRegion:
        """Return the pool's memory."""
        return self._pool.region()

    def execute(self, slices: list[Slice]) -> list[Draw | None]:
        """Run one step in no less than its set latency."""
        started = time.perf_counter()
        if self.pauses.is_armed:
            self._pause(slices)
        sampled: list[Draw | None] = [self._compute(piece) for piece in slices]
        latency_s = self._latency_s(slices)
        if latency_s:
            time.sleep(max(0.0, started + latency_s - time.perf_counter()))
        return sampled

    def close(self) -> None:
        """Nothing is the runner's own: the pool's memory lives on."""

    def _latency_s(self, slices: list[Slice]) -> float:
        args = self._args
        if not (args.prefill_ms_per_token or args.decode_ms_per_step):
            return 0.0
        num_decodes = sum(map(_is_decode, slices))
        num_prefill_tokens = sum(len(piece.token_ids) for piece in slices) - num_decodes
        decode_ms = args.decode_ms_per_step if num_decodes else 0.0
        return (num_prefill_tokens * args.prefill_ms_per_token + decode_ms) / 1000

    def _pause(self, slices: list[Slice]) -> None:
        for piece in slices:
            if not _is_decode(piece):
                self.pauses.block("before_prefill", piece.attempt_id)
            elif piece.sample is not None and piece.sample.position == piece.sample.num_prompt_tokens + 1:
                self.pauses.block("after_first_token", piece.attempt_id)

    def _compute(self, piece: Slice) -> Sampled | None:
        pool, block_size, start = self._pool, self._args.block_size, piece.start
        state, previous_id = 0, None
        if start:
            block_id = piece.block_table[(start - 1) // block_size]
            state, previous_id = pool.read(block_id * block_size + (start - 1) % block_size)
        if len(piece.token_ids) == 1:
            token_id = piece.token_ids[0]
            state = next_state(state, previous_id, token_id)
            block_id = piece.block_table[start // block_size]
            pool.write(block_id * block_size + start % block_size, state, token_id)
        else:
            state = self._compute_chunk(piece, state, previous_id)
        return None if piece.sample is None else self._sample(piece, piece.sample, state)

    def _compute_chunk(self, piece: Slice, state: int, previous_id: int | None) -> int:
        token_ids = np.array(piece.token_ids, dtype=np.uint64)
        states = next_states(state, previous_id, token_ids)
        positions = np.arange(piece.start, piece.start + len(token_ids))
        blocks, offsets = np.divmod(positions, self._args.block_size)
        first, last = int(blocks[0]), int(blocks[-1])
        table = np.array(piece.block_table[first : last + 1], dtype=np.int64)
        self._pool.write_many(table[blocks - first] * self._args.block_size + offsets, states, token_ids)
        return int(states[-1])

    def _sample(self, piece: Slice, spec: SampleSpec, state: int) -> Sampled:
        position = spec.position
        if position % _READ_ALL_EVERY == 0 or position == spec.num_prompt_tokens + 1:
            state ^= self._pool.read_all(piece.block_table, position)
        draw = mix(state)
        sampling = spec.sampling
        if sampling.temperature > 0 and sampling.top_k != 1:
            draw = mix(draw ^ mix((sampling.seed & MASK) ^ mix(position)))
        token_id = self._choose(draw, spec.banned)
        if spec.num_logprobs is None:
            return Sampled(token_id=token_id)
        return Sampled(token_id=token_id, logprobs=self._logprobs(draw, token_id, spec.num_logprobs))

    def _choose(self, draw: int, banned: tuple[int, ...]) -> int:
        eos_one_in, eos_id = self._args.eos_one_in, self._eos_id
        if eos_one_in and eos_id is not None and eos_id not in banned and mix(draw) % eos_one_in == 0:
            return eos_id
        words = self._word_ids
        index = draw % len(words)
        if banned:
            index = next(
                (i % len(words) for i in range(index, index + len(words)) if words[i % len(words)] not in banned), index
            )
        return words[index]

    def _logprobs(self, draw: int, token_id: int, num_logprobs: int) -> TokenLogprobs:
        """Return plausible, reproducible numbers: the chosen token is the likeliest, others follow at intervals."""
        words = self._word_ids
        best = -((draw >> 40) / 2**24)
        others = (words[(draw + offset) % len(words)] for offset in range(1, len(words)))
        ranked = [token_id, *(word for word, _ in zip(others, range(num_logprobs), strict=False) if word != token_id)]
        top = tuple((word, best - 0.75 * rank) for rank, word in enumerate(ranked[:num_logprobs]))
        return TokenLogprobs(logprob=best, top=top)


def _is_decode(piece: Slice) -> bool:
    return len(piece.token_ids) == 1 and piece.start > 0 and piece.sample is not None


def _word_ids(card: ModelCard) -> list[int]:
    """Return the ids to generate: the built-in words, or all of another card's vocabulary that isn't special."""
    if card.digest == builtin_card().digest:
        return builtin_word_ids()
    tokenizer = json.loads(card.tokenizer_json)
    special = {token["id"] for token in tokenizer.get("added_tokens", ()) if token["special"]} | {*card.eos_token_ids}
    return [token_id for token_id in range(card.vocab_size) if token_id not in special]
