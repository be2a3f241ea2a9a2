"""What a step's results do to its sequences: KV becomes known, tokens are delivered, completions end.

A sequence after which no token can be drawn fails alone, and its KV becomes nobody's prefix hit.
"""

from collections.abc import Sequence as Seq

from schemas.errors import EngineError, Phase
from schemas.frames import Begun, TokenLogprobs, Tokens
from services.engines.paged.desk import ChunkComputed, PromptComputed
from services.engines.paged.ledger import Ledger
from services.engines.paged.planner import StepPlan
from services.engines.paged.runner import Draw, Sampled, Unsampled
from services.engines.paged.sequence import Sequence, SequenceState


class Completion:
    """Applies results to the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._block_size = ledger.limits.block_size

    def apply(self, plan: StepPlan, sampled: Seq[Draw | None], now: float) -> None:
        """Take the results of a step; sequences that ended since it was planned are passed over."""
        self._ledger.totals.num_steps += 1
        for piece, sequence, drawn in zip(plan.slices, plan.sequences, sampled, strict=True):
            if sequence.state is not SequenceState.DECODING and sequence.state is not SequenceState.PREFILLING:
                continue
            if isinstance(drawn, Unsampled):
                self._spoil(sequence, drawn.reason)
                continue
            self._computed(sequence, piece.start + len(piece.token_ids))
            if drawn is not None:
                self._ledger.totals.num_generated += 1
                self._drawn(sequence, drawn, now)

    def _spoil(self, sequence: Sequence, reason: str) -> None:
        """Fail a sequence whose KV can't be trusted."""
        self._ledger.blocks.forget(sequence.table.blocks)
        phase: Phase = "decode" if sequence.watch.first_token else "prefill"
        self._ledger.fail(sequence, EngineError(reason, phase=phase))

    def first_token(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """Begin a sequence whose KV has come: all of its prompt is computed and its first token known."""
        sequence.num_computed = len(sequence.ids)
        self._publish(sequence)
        self._deliver(sequence, token_id, logprobs, now)

    def _computed(self, sequence: Sequence, end: int) -> None:
        start, sequence.num_computed = sequence.num_computed, end
        if end // self._block_size > sequence.table.num_published:
            self._publish(sequence)
        if sequence.state is not SequenceState.PREFILLING:
            return
        ledger, tally = self._ledger, sequence.tally
        ledger.queue_tokens(sequence, len(sequence.ids) - end)
        ledger.totals.num_recomputed += max(0, min(end, tally.expected_below) - start)
        tally.num_computed_prompt += max(0, min(end, sequence.num_prompt) - start)
        if sequence.reports_chunks and end < len(sequence.ids):
            ledger.notices.append(
                ChunkComputed(
                    attempt_id=sequence.attempt_id, block_ids=tuple(sequence.table.blocks), num_computed_tokens=end
                )
            )

    def _publish(self, sequence: Sequence) -> None:
        table, blocks = sequence.table, self._ledger.blocks
        table.extend_hashes(sequence.ids, self._block_size)
        num_full = sequence.num_computed // self._block_size
        for index in range(table.num_published, num_full):
            blocks.publish(table.blocks[index], table.hashes[index], table.names[index + 1], table.names[index])
        table.num_published = num_full

    def _drawn(self, sequence: Sequence, drawn: Sampled, now: float) -> None:
        if sequence.purpose == "hold":
            self._hold(sequence, drawn, now)
        else:
            self._deliver(sequence, drawn.token_id, drawn.logprobs, now)

    def _deliver(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """Append a completion token, tell, and end the sequence if the token does."""
        if not sequence.watch.first_token:
            sequence.watch.first_token = now
            timings = sequence.watch.timings(sequence.tally, now)
            self._ledger.notices.append(Begun(sequence.request.attempt_id, timings, sequence.usage().cached_tokens))
        self._ledger.notices.append(
            Tokens(
                attempt_id=sequence.request.attempt_id,
                seq=sequence.num_completion,
                token_ids=(token_id,),
                logprobs=None if logprobs is None else (logprobs,),
            )
        )
        sequence.ids.append(token_id)
        reason = sequence.rules.reason(sequence.ids)
        if reason is None:
            sequence.state = SequenceState.DECODING
        else:
            self._ledger.finish(sequence, reason, now)

    def _hold(self, sequence: Sequence, drawn: Sampled, now: float) -> None:
        """Keep a computed prompt's blocks for a peer, unless its first token ends the request.

        With chunk reports (rendezvous) the peer is receiving the blocks already and ends the request itself.
        """
        ledger, watch = self._ledger, sequence.watch
        watch.first_token = now
        reason = None if sequence.reports_chunks else sequence.rules.reason([*sequence.ids, drawn.token_id])
        block_ids = tuple(sequence.table.blocks)
        if reason is None:
            ledger.leave(sequence)
            sequence.state = SequenceState.HELD
            ledger.num_held += 1
        else:
            ledger.end(sequence)
        ledger.notices.append(
            PromptComputed(
                attempt_id=sequence.attempt_id,
                block_ids=block_ids if reason is None else (),
                num_tokens=len(sequence.ids),
                first_token_id=drawn.token_id,
                first_logprobs=drawn.logprobs,
                finish_reason=reason,
                num_cached_tokens=sequence.tally.num_cached,
                queue_s=watch.queue_s(),
                prefill_s=watch.prefill_s(),
            )
        )
