"""The models this gateway can serve: discovery on one side, cards (tokenizer, template) on the other.

A card is fetched and its tokenizer built as soon as a worker of its digest appears, off the event loop, so that the
first request finds it there.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic

import jinja2

from bus.cards import fetch_card
from bus.connection import Bus
from bus.discovery import Fleet
from schemas.errors import BusError, ModelNotFoundError, RequestError, UnavailableError
from schemas.model_card import ModelCard, SamplingDefaults
from schemas.worker import RuntimeConfig
from services.gateway.chat_template import ChatTemplate
from services.gateway.encoding import EncodingThreads
from services.gateway.readiness import ModelPath, model_paths
from services.gateway.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# How long a model whose workers have all gone is "unavailable", before it is "not found".
REMEMBER_S = 600.0
LOAD_TIMEOUT_S = 10.0
LOAD_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a model card becomes: how to write a prompt and read an answer. Shared by all models of a digest."""

    digest: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos_token_ids: frozenset[int]
    vocab_size: int
    sampling: SamplingDefaults


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as one request sees it."""

    name: str
    vocabulary: Vocabulary
    max_context_tokens: int
    decode_contexts: tuple[int, ...] = ()


class ModelDirectory:
    """`paths` has every model of which a live worker exists; replaced, never changed, on each change of the fleet."""

    def __init__(self, bus: Bus, fleet: Fleet, threads: EncodingThreads) -> None:
        self.paths: Mapping[str, ModelPath] = {}
        self._bus = bus
        self._fleet = fleet
        self._threads = threads
        self._vocabularies: dict[str, asyncio.Future[Vocabulary]] = {}
        self._last_seen: dict[str, float] = {}
        self._callbacks: list[Callable[[], None]] = []

    def start(self) -> None:
        """Follow the fleet from now on."""
        self._fleet.on_change(lambda _kind, _record: self.refresh())
        self.refresh()

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each change of `paths`."""
        self._callbacks.append(callback)

    def refresh(self) -> None:
        """Look at the fleet again; loads what is new and forgets what has gone."""
        workers: list[RuntimeConfig] = list(self._fleet.workers.values())
        routers = [router for router in self._fleet.routers.values() if router.state == "ready"]
        self.paths = model_paths(workers, len(routers), has_strict_router=any(r.is_strict for r in routers))
        now = monotonic()
        self._last_seen.update(dict.fromkeys(self.paths, now))
        digests = {path.digest for path in self.paths.values()}
        for digest in self._vocabularies.keys() - digests:
            self._vocabularies.pop(digest).cancel()
        for digest in digests - self._vocabularies.keys():
            self._vocabularies[digest] = asyncio.get_running_loop().create_future()
            self._bus.spawn(self._load(digest), f"load card {digest[:12]}")
        for callback in self._callbacks:
            callback()

    @property
    def is_bus_up(self) -> bool:
        """Whether requests can be sent at all: without NATS `paths` stay as they were."""
        return self._fleet.is_heard

    def missing(self, name: str) -> str:
        """Say what keeps a model of `paths` from being asked, "" when nothing does."""
        path = self.paths[name]
        future = self._vocabularies[path.digest]
        return path.missing or ("" if future.done() else "its tokenizer is not loaded yet")

    def listed(self) -> list[str]:
        """Return the names of the models that can be asked now."""
        return sorted(model for model in self.paths if not self.missing(model))

    async def get(self, name: str) -> ServedModel:
        """Return a model; raises ModelNotFoundError, or UnavailableError when its path is incomplete for now.

        Waits for a card that is on its way.
        """
        path = self.paths.get(name)
        if path is None:
            seen = self._last_seen.get(name)
            if seen is not None and monotonic() - seen < REMEMBER_S:
                raise UnavailableError(f"model {name!r}: no worker is live", param="model", retry_after_s=2.0)
            raise ModelNotFoundError(f"model {name!r} does not exist", param="model")
        if not path.is_complete:
            raise UnavailableError(f"model {name!r}: {path.missing}", param="model", retry_after_s=2.0)
        return ServedModel(name, await self._vocabulary(path), path.max_context_tokens, path.decode_contexts)

    async def _vocabulary(self, path: ModelPath) -> Vocabulary:
        future = self._vocabularies[path.digest]
        if not future.done():
            await asyncio.wait({future}, timeout=LOAD_TIMEOUT_S)
        if not future.done() or future.cancelled():
            raise UnavailableError(f"model {path.model!r}: its tokenizer is not loaded yet", retry_after_s=1.0)
        return future.result()

    async def _load(self, digest: str) -> None:
        """Fetch and build until it succeeds or the digest has gone; a card may come after its worker's record."""
        future = self._vocabularies[digest]
        is_logged = False
        while not future.done():
            try:
                card = await fetch_card(self._bus, digest)
                vocabulary = await self._threads.run(partial(build_vocabulary, card))
            except (BusError, RequestError, ValueError) as error:
                if not is_logged:
                    logger.warning("model card %s can't be used yet: %s", digest[:12], error)
                    is_logged = True
                await asyncio.wait({future}, timeout=LOAD_RETRY_S)
                continue
            if not future.done():
                future.set_result(vocabulary)
                for callback in self._callbacks:
                    callback()


def build_vocabulary(card: ModelCard) -> Vocabulary:
    """Build what a card describes; takes some 100 ms. Raises ValueError for an unreadable tokenizer.

    A template that doesn't compile leaves the model without chat.
    """
    template = None
    if card.chat_template:
        try:
            template = ChatTemplate(card.chat_template, bos_token=card.bos_token, eos_token=card.eos_token)
        except jinja2.TemplateSyntaxError as error:
            logger.warning("model %s: its chat template can't be compiled: %s", card.model, error)
    return Vocabulary(
        digest=card.digest,
        tokenizer=Tokenizer(card.tokenizer_json),
        template=template,
        eos_token_ids=frozenset(card.eos_token_ids),
        vocab_size=card.vocab_size,
        sampling=card.sampling,
    )
