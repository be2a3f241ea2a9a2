"""What the legs of one engine share: the LLM, how to submit to it, and where events and counts go."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from schemas.errors import EngineError, RequestError
from schemas.request import GenerateRequest
from services.engines.adapter.site import AdapterSite
from services.engines.prompt import prompt_ids
from services.engines.tasks import Spawn
from services.engines.trtllm.api import Llm, RequestOutput, TrtllmApi, parameters_of
from services.engines.trtllm.held import HeldKv
from services.engines.trtllm.ids import DisaggIds
from services.engines.trtllm.load import LoadBook
from services.engines.trtllm.own_metrics import OwnMetrics
from services.engines.trtllm.params import WireParams
from services.engines.trtllm.sampling import Abilities, sampling_kwargs

if TYPE_CHECKING:
    from services.engines.trtllm.leg import Leg

MAX_USED_HANDOFFS = 16384
DEFAULT_PRIORITY = 0.5


class Submitter:
    """Hands requests to the LLM. An engine that is shutting down is told to `on_death`, once."""

    def __init__(
        self, api: TrtllmApi, llm: Llm, eos_token_ids: tuple[int, ...], on_death: Callable[[Exception], None]
    ) -> None:
        self.api = api
        self._llm = llm
        self._eos_token_ids = eos_token_ids
        self._on_death = on_death
        self._abilities = Abilities.of(api)
        self._parameters = parameters_of(llm.generate_async)

    def sampling(self, request: GenerateRequest, **changes: Any) -> Any:
        """Return a SamplingParams of this request's own: context_only changes the object it is given [L0].

        Raises RequestError naming what can't be done.
        """
        kwargs = sampling_kwargs(request, self._eos_token_ids, self._abilities)
        try:
            return self.api.sampling_params(**{**kwargs, **changes})
        except (TypeError, ValueError) as error:
            raise RequestError(f"TensorRT-LLM refuses the sampling parameters: {error}", param="sampling") from error

    def submit(self, request: GenerateRequest, sampling: Any, *, streaming: bool, params: Any = None) -> RequestOutput:
        """Start a request; resumed ids belong to its prompt. Raises RequestError for what the engine refuses at once,
        EngineError when it is shutting down."""
        kwargs = {
            "sampling_params": sampling,
            "streaming": streaming,
            "disaggregated_params": params,
            **self._options(request),
        }
        try:
            return self._llm.generate_async(prompt_ids(request), **kwargs)
        except (self.api.request_error, TypeError, ValueError) as error:
            raise RequestError(f"TensorRT-LLM refuses the request: {error}") from error
        except Exception as error:
            self._on_death(error)
            raise EngineError(f"TensorRT-LLM takes no more requests: {error}") from error

    def _options(self, request: GenerateRequest) -> dict[str, Any]:
        """Return the optional arguments, refused by name where the installed release doesn't have them."""
        options: dict[str, Any] = {}
        if request.cache_salt:
            options["cache_salt"] = request.cache_salt
        if request.priority:
            # Any int onto (0, 1), higher is sooner on both sides; theirs defaults to 0.5 [L].
            options["priority"] = DEFAULT_PRIORITY * (1 + request.priority / (1 + abs(request.priority)))
        if missing := sorted(options.keys() - self._parameters):
            raise RequestError(f"TensorRT-LLM {self.api.version} has no {missing[0]}", param=missing[0])
        if request.traceparent and "trace_headers" in self._parameters:
            options["trace_headers"] = {"traceparent": request.traceparent}
        return options


class UsedHandoffs:
    """The newest handoffs that were taken here: each leads to its KV once."""

    def __init__(self) -> None:
        self._used: OrderedDict[bytes, None] = OrderedDict()

    def take(self, wire: WireParams) -> None:
        """Use a handoff; raises RequestError the second time."""
        key = hashlib.sha256(
            f"{wire.ctx_request_id}/{wire.disagg_request_id}/{wire.ctx_info_endpoint}/".encode()
            + (wire.opaque_state or b"")
        ).digest()
        if key in self._used:
            raise RequestError("this handoff was used already: its KV is gone", param="params")
        self._used[key] = None
        if len(self._used) > MAX_USED_HANDOFFS:
            self._used.popitem(last=False)


class Site(AdapterSite["Leg"], kw_only=True):
    """`draining` are the legs that only the engine isn't done with yet. `follow` begins a task whose error is the
    engine's end: whoever iterates over a request hears first that the executor is gone."""

    follow: Spawn
    engine: Submitter
    book: LoadBook
    held: HeldKv
    ids: DisaggIds
    recomputes: bool
    metrics: OwnMetrics | None
    used: UsedHandoffs = msgspec.field(default_factory=UsedHandoffs)
    draining: set["Leg"] = msgspec.field(default_factory=set)


def now_s() -> float:
    """Return the loop's monotonic time."""
    return asyncio.get_running_loop().time()
