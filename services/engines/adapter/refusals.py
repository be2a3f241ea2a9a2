"""What an external engine can't do with a request, refused by name instead of dropped in silence. Pure."""

from schemas.errors import RequestError
from schemas.request import GenerateRequest


def refuse_inexact_resume(request: GenerateRequest, engine: str) -> None:
    """Raise RequestError for a resumed request whose continuation this engine would draw differently.

    The delivered ids become part of the prompt. That is exact for greedy requests, and fair for those drawn with a
    seed of ours; a user's own seed promises the very same tokens, and penalties count generated tokens only.
    """
    if not request.resume:
        return
    sampling = request.sampling
    if sampling.is_user_seeded and sampling.temperature > 0:
        raise RequestError(f"{engine} can't resume a completion with a user's seed exactly", param="seed")
    for name in ("frequency_penalty", "presence_penalty"):
        if getattr(sampling, name):
            raise RequestError(f"{engine} can't resume a completion with a {name}", param=name)


def refuse_priority(request: GenerateRequest, engine: str, *, has_priorities: bool, how: str) -> None:
    """Raise RequestError for a priority that the engine would ignore; `how` says what switches priorities on."""
    if request.priority and not has_priorities:
        raise RequestError(f"this {engine} worker serves first come, first served: {how}", param="priority")
