"""From logits to tokens. Every row is drawn by its own spec alone: nothing depends on who else is in the batch.

In this order, which is vLLM's: logprobs of the raw logits; repetition, frequency and presence penalties; banned ids;
then greedy, or temperature, min_p, top_k, top_p and positional noise.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from schemas.frames import TokenLogprobs
from schemas.request import Sampling
from services.engines.paged.runner import Draw, Sampled, SampleSpec, Unsampled
from services.engines.torch.noise import gumbel, noise_key

NUM_CANDIDATES = 256
MANY_CANDIDATES = 4096


NOT_FINITE = Unsampled(reason="the model's logits for this request are not finite: no token can be drawn")


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[Draw]:
    """Return one token a row of float32 `logits` [len(specs), vocab_size], which are changed.

    A row without a finite maximum (broken weights or KV, everything banned) has none, and changes nothing for others.
    """
    raw = _RawLogprobs(logits, specs)
    _penalize(logits, specs)
    best, token_ids = logits.max(dim=-1)
    broken = _not_finite(best)
    if broken:
        logits[torch.tensor(sorted(broken), device=logits.device)] = 0.0
    drawn = [i for i, spec in enumerate(specs) if spec.sampling.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        token_ids[rows] = _draw(logits[rows], [specs[i] for i in drawn])
    ids = token_ids.tolist()
    return [
        NOT_FINITE if i in broken else Sampled(token_id=token_id, logprobs=raw.of(i, token_id))
        for i, token_id in enumerate(ids)
    ]


def _not_finite(best: torch.Tensor) -> set[int]:
    is_finite = torch.isfinite(best)
    return set() if is_finite.all() else set((~is_finite).nonzero()[:, 0].tolist())


class _RawLogprobs:
    """Natural-log probabilities of the model's own distribution, before penalties, temperature and filters (as
    OpenAI's, and vLLM's logprobs_mode=raw_logprobs), for the rows that want them."""

    def __init__(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
        self._counts = {i: spec.num_logprobs for i, spec in enumerate(specs) if spec.num_logprobs is not None}
        if self._counts:
            rows = torch.tensor(list(self._counts), device=logits.device)
            self._logprobs = dict(zip(self._counts, torch.log_softmax(logits[rows], dim=-1), strict=True))

    def of(self, row: int, token_id: int) -> TokenLogprobs | None:
        """Return the logprobs at this row, whose chosen token is `token_id`; None when not asked for."""
        if row not in self._counts:
            return None
        values, ids = self._logprobs[row].topk(min(self._counts[row], self._logprobs[row].numel()))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return TokenLogprobs(logprob=float(self._logprobs[row][token_id]), top=top)


def _penalize(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
    for row, spec in zip(logits, specs, strict=True):
        sampling = spec.sampling
        if sampling.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(spec.history)), device=row.device)
            values = row[seen]
            row[seen] = torch.where(
                values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
            )
        if sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0:
            _penalize_completion(row, spec, sampling)
        banned = [token_id for token_id in spec.banned if token_id < len(row)]  # a user's stop ids may be any number
        if banned:
            row[torch.tensor(banned, device=row.device)] = float("-inf")


def _penalize_completion(row: torch.Tensor, spec: SampleSpec, sampling: Sampling) -> None:
    completion = torch.tensor(spec.history[spec.num_prompt_tokens :], dtype=torch.int64, device=row.device)
    ids, counts = completion.unique(return_counts=True)
    row[ids] -= counts * sampling.frequency_penalty + sampling.presence_penalty


class _Knobs(NamedTuple):
    """The rows' settings as columns [n, 1], `key` [n, 2]; top_k is vocab_size and log_min_p -inf where off."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    key: torch.Tensor

    def rows(self, wanted: torch.Tensor) -> "_Knobs":
        """Return the settings of these rows (a bool mask or indices)."""
        return _Knobs(*(column[wanted] for column in self))


def _draw(logits: torch.Tensor, specs: list[SampleSpec]) -> torch.Tensor:
    """Return int64 token ids [n]."""
    vocab_size = logits.shape[-1]
    knobs = _knobs(specs, vocab_size, logits.device)
    is_open = ((knobs.top_k >= vocab_size) & (knobs.top_p >= 1.0) & knobs.log_min_p.isneginf()).squeeze(1)
    token_ids = torch.empty(len(specs), dtype=torch.int64, device=logits.device)
    if is_open.any():
        token_ids[is_open] = _draw_open(logits[is_open], knobs.rows(is_open))
    if not is_open.all():
        token_ids[~is_open] = _draw_filtered(logits[~is_open], knobs.rows(~is_open))
    return token_ids


def _knobs(specs: list[SampleSpec], vocab_size: int, device: torch.device) -> _Knobs:
    settings = [spec.sampling for spec in specs]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    return _Knobs(
        temperature=column([s.temperature for s in settings], torch.float64),
        top_k=column([min(s.top_k, vocab_size) or vocab_size for s in settings], torch.int64),
        top_p=column([s.top_p for s in settings], torch.float64),
        log_min_p=column([s.min_p for s in settings], torch.float64).log(),
        key=torch.tensor(
            [noise_key(spec.sampling.seed, spec.position) for spec in specs], dtype=torch.int32, device=device
        ),
    )


def _draw_open(logits: torch.Tensor, knobs: _Knobs) -> torch.Tensor:
    ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)[None, :]
    drawn = []
    for rows in torch.arange(len(logits), device=logits.device).split(_rows_per_pass(logits)):
        scores = (logits[rows] / knobs.temperature[rows].float()).add_(gumbel(knobs.key[rows], ids))
        drawn.append(scores.argmax(dim=-1))
    return torch.cat(drawn)


def _rows_per_pass(logits: torch.Tensor) -> int:
    """Return how many rows to take at once: on CPU one, whose scratch stays in the core's cache."""
    return 1 if logits.device.type == "cpu" else len(logits)


def _draw_filtered(logits: torch.Tensor, knobs: _Knobs) -> torch.Tensor:
    """Draw from the best few where these hold the whole kept set, else from more, at last from all."""
    vocab_size = logits.shape[-1]
    log_total = _log_totals(logits, knobs)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    rows = torch.arange(len(logits), device=logits.device)
    for width in (NUM_CANDIDATES, MANY_CANDIDATES, vocab_size):
        values, ids = logits[rows].topk(min(width, vocab_size))
        drawn, is_complete = _draw_sorted(values, ids, knobs.rows(rows), log_total[rows])
        token_ids[rows] = drawn
        rows = rows[~is_complete]
        if not len(rows):
            break
    return token_ids


def _log_totals(logits: torch.Tensor, knobs: _Knobs) -> torch.Tensor:
    """Return [n, 1]: the log of what top_p is a share of. Without top_k and min_p that is the row's total; with
    them (inf: unknown) the total of the set they leave."""
    totals = torch.full_like(knobs.temperature, float("inf"))
    is_whole = (knobs.top_p < 1.0) & (knobs.top_k >= logits.shape[-1]) & knobs.log_min_p.isneginf()
    for rows in is_whole[:, 0].nonzero()[:, 0].split(_rows_per_pass(logits)):
        scaled = logits[rows] / knobs.temperature[rows].float()
        totals[rows] = torch.logsumexp(scaled, dim=-1, keepdim=True).double()
    return totals


def _draw_sorted(
    values: torch.Tensor, ids: torch.Tensor, knobs: _Knobs, log_total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids drawn among each row's sorted candidates, and whether these held all that the filters keep.

    They do if top_k or min_p ends the set among them, or if top_p, a share of exp(log_total), is reached.
    """
    scaled = values.double() / knobs.temperature
    rank = torch.arange(values.shape[-1], device=values.device)[None, :]
    passes_min_p = scaled >= scaled[:, :1] + knobs.log_min_p
    kept = passes_min_p & (rank < knobs.top_k)
    is_bounded = (knobs.top_k <= values.shape[-1]) | ~passes_min_p[:, -1:]
    bounded_total = torch.logsumexp(scaled.masked_fill(~kept, float("-inf")), dim=-1, keepdim=True)
    probs = (scaled - torch.where(is_bounded, bounded_total, log_total)).exp() * kept
    cumulative = probs.cumsum(dim=-1)
    is_top_p = knobs.top_p < 1.0
    is_reached = is_top_p & (cumulative[:, -1:] >= knobs.top_p)
    kept &= ~is_top_p | (cumulative - probs < knobs.top_p)
    noisy = (scaled + gumbel(knobs.key, ids)).masked_fill(~kept, float("-inf"))
    drawn = ids.gather(1, noisy.argmax(dim=-1, keepdim=True)).squeeze(1)
    return drawn, (is_bounded | is_reached).squeeze(1)
