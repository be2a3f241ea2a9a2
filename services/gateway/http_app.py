"""The HTTP routes. Handlers only carry bytes between aiohttp and the answering; errors are in OpenAI's form."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import time

import orjson
from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry, generate_latest

from schemas.errors import BuswayError, DeadlineError, ModelNotFoundError, RequestError, RequestTooLargeError
from services.gateway.answering import Answering
from services.gateway.exchange import caller_from_headers
from services.gateway.http_reply import HttpReply, Pacemaker
from services.gateway.models import ModelDirectory
from services.gateway.openai_errors import error_body, error_headers
from services.gateway.openai_request import Endpoint, check_body_size
from services.gateway.readiness import ModelPath

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_JSON = "application/json"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
BODY_TIMEOUT_S = 60.0
_COMPLETIONS: dict[str, Endpoint] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}


class Routes:
    """The handlers of one gateway."""

    def __init__(
        self,
        *,
        answering: Answering,
        models: ModelDirectory,
        registry: CollectorRegistry,
        pacemaker: Pacemaker,
        max_body_bytes: int,
    ) -> None:
        self._answering = answering
        self._models = models
        self._registry = registry
        self._pacemaker = pacemaker
        self._max_body_bytes = max_body_bytes
        self._started_at = int(time())

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[_in_openai_form])
        for path, endpoint in _COMPLETIONS.items():
            app.router.add_post(path, self._completion_handler(endpoint), expect_handler=self._expect)
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_get("/v1/models/{model:.+}", self.show_model)
        app.router.add_get("/live", self.live)
        app.router.add_get("/ready", self.ready)
        app.router.add_get("/metrics", self.metrics)
        return app

    def _completion_handler(self, endpoint: Endpoint) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            caller = caller_from_headers(request.headers)
            reply = HttpReply(request, caller)
            with self._pacemaker.watching(reply):
                await self._answering.answer(endpoint, lambda: self._read_body(request), reply, caller)
            return reply.response or web.Response(status=499)

        return handle

    async def list_models(self, _request: web.Request) -> web.Response:
        """List the models that can be asked now."""
        return _json({"object": "list", "data": [self._model(name) for name in self._models.listed()]})

    async def show_model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name not in self._models.listed():
            raise ModelNotFoundError(f"model {name!r} does not exist", param="model")
        return _json(self._model(name))

    async def live(self, _request: web.Request) -> web.Response:
        """Say that the process answers, whatever the fleet is like."""
        return _json({"status": "live"})

    async def ready(self, _request: web.Request) -> web.Response:
        """Say whether every model of the fleet can be asked, and what each has and lacks, as far as was heard.

        One whose workers are all draining is on its way out and keeps nobody waiting.
        """
        missing = {name: self._models.missing(name) for name in sorted(self._models.paths)}
        lacks_some = any(lack and not self._models.paths[name].is_leaving for name, lack in missing.items())
        is_bus_up, is_draining = self._models.is_bus_up, self._answering.is_draining
        is_ready = bool(self._models.listed()) and is_bus_up and not lacks_some and not is_draining
        paths = [_path_state(self._models.paths[name], lack) for name, lack in missing.items()]
        state = "draining" if is_draining else "ready" if is_ready else "not ready"
        document = {"status": state, "nats": "ok" if is_bus_up else "no answer", "models": paths}
        return _json(document, status=200 if is_ready else 503)

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": _PROMETHEUS})

    def _model(self, name: str) -> dict[str, object]:
        path = self._models.paths[name]
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "busway",
            "max_model_len": path.max_context_tokens,
        }

    async def _read_body(self, request: web.Request) -> bytes:
        """Return the body; raises RequestTooLargeError as soon as it is known to be over the limit.

        The limit counts unpacked bytes: aiohttp undoes a Content-Encoding piece by piece.
        """
        check_body_size(request.content_length or 0, self._max_body_bytes)
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in request.content.iter_any():
                    num_bytes += len(part)
                    check_body_size(num_bytes, self._max_body_bytes)
                    parts.append(part)
        except web.RequestPayloadError as error:
            raise RequestError("request body: it doesn't have the encoding or length that its headers say") from error
        except TimeoutError:
            raise DeadlineError(f"no complete request body within {BODY_TIMEOUT_S} s", phase="gateway") from None
        return b"".join(parts)

    async def _expect(self, request: web.Request) -> web.StreamResponse | None:
        """Refuse a body that is too large before it is sent, or ask for it."""
        try:
            check_body_size(request.content_length or 0, self._max_body_bytes)
        except RequestTooLargeError as error:
            return _error(error)
        if request.transport is not None and request.version == (1, 1):
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None


@web.middleware
async def _in_openai_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every error that isn't an answer yet OpenAI's form."""
    try:
        return await handler(request)
    except BuswayError as error:
        return _error(error)
    except web.HTTPException as error:
        return _plain_error(request, error)
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return _error(BuswayError("internal error", phase="gateway"))


def _plain_error(request: web.Request, error: web.HTTPException) -> web.Response:
    response = _error(RequestError(f"{request.method} {request.path}: {error.reason.lower()}"))
    response.set_status(error.status)
    if hdrs.ALLOW in error.headers:
        response.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
    return response


def _error(error: BuswayError) -> web.Response:
    return web.Response(
        status=error.http_status, body=error_body(error), content_type=_JSON, headers=error_headers(error)
    )


def _json(document: object, *, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(document), content_type=_JSON)


def _path_state(path: ModelPath, missing: str) -> dict[str, object]:
    return {
        "model": path.model,
        "is_complete": not missing,
        "missing": missing,
        "serves": "disaggregated" if path.is_disaggregated else "aggregated" if path.is_aggregated else "nothing",
        "prefill": path.num_prefill,
        "decode": path.num_decode,
        "both": path.num_both,
        "routers": path.num_routers,
        "starting": path.num_starting,
        "draining": path.num_draining,
        "strict": path.is_strict,
        "max_context_tokens": path.max_context_tokens,
        "digest": path.digest,
    }
