"""What the engine tests share: requests, host memory, and an oracle of the sim model that knows no blocks."""

import mmap
from collections.abc import Sequence

from schemas.ids import new_attempt_id, new_request_id
from schemas.request import GenerateRequest, Sampling, StopConditions, StreamAddress
from services.engines.sim.arithmetic import MASK, mix, next_state
from services.engines.sim.card import builtin_word_ids

WORD_IDS = builtin_word_ids()
EOS_ID = 2


def allocate(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes))


def a_request(
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    seed: int = 7,
    temperature: float = 0.0,
    stop: StopConditions | None = None,
    **fields: object,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=new_request_id(),
        attempt_id=new_attempt_id(),
        model="sim",
        token_ids=tuple(prompt),
        sampling=Sampling(seed=seed, temperature=temperature),
        stop=stop or StopConditions(max_tokens=max_tokens),
        stream=StreamAddress(subject="inbox"),
        **fields,
    )


class Oracle:
    """The sim model written down once more, token by token, over a plain list of ids."""

    def __init__(self, *, eos_one_in: int = 0, read_all_every: int = 32) -> None:
        self._eos_one_in = eos_one_in
        self._read_all_every = read_all_every

    def rows(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return (state, token id) of each position."""
        rows: list[tuple[int, int]] = []
        state, previous = 0, None
        for token_id in ids:
            state = next_state(state, previous, token_id)
            previous = token_id
            rows.append((state, token_id))
        return rows

    def next_id(self, request: GenerateRequest, ids: Sequence[int]) -> int:
        """Return the token after `ids`."""
        rows, position, num_prompt = self.rows(ids), len(ids), len(request.token_ids)
        state = rows[-1][0]
        if position % self._read_all_every == 0 or position == num_prompt + 1:
            weights = [mix(p) | 1 for p in range(position)]
            state ^= sum(w * (key + 3 * value) for w, (key, value) in zip(weights, rows, strict=True)) & MASK
        draw = mix(state)
        if request.sampling.temperature > 0:
            draw = mix(draw ^ mix((request.sampling.seed & MASK) ^ mix(position)))
        stop = request.stop
        banned = {EOS_ID, 0, *stop.stop_token_ids} if position < num_prompt + stop.min_tokens else set()
        if self._eos_one_in and EOS_ID not in banned and mix(draw) % self._eos_one_in == 0:
            return EOS_ID
        index = draw % len(WORD_IDS)
        while WORD_IDS[index] in banned:
            index = (index + 1) % len(WORD_IDS)
        return WORD_IDS[index]

    def completion(self, request: GenerateRequest) -> list[int]:
        """Return the whole completion, resumed ids not included."""
        ids, stop = [*request.token_ids, *request.resume], request.stop
        ending = set(stop.stop_token_ids) if stop.ignore_eos else {EOS_ID, 0, *stop.stop_token_ids}
        completion: list[int] = []
        while len(ids) - len(request.token_ids) < stop.max_tokens:
            token_id = self.next_id(request, ids)
            ids.append(token_id)
            completion.append(token_id)
            if token_id in ending:
                break
        return completion
