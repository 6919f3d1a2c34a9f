"""The HTTP server: OpenAI's completions, chat completions and models, health and metrics. The only door to fastapi.

A body becomes an `Order` (api), the order requests of the engine (exchange), their deltas chunks (answer), and the
chunks events of a stream, or one body that is collected from them.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpp.server.answer import Chunk, Writer, collect
from jaxpp.server.api import Offer, Order, check_model, read_order
from jaxpp.server.exchange import Exchange, closing
from jaxpp.server.fields import ApiError, read_json
from jaxpp.server.metrics import Metrics
from jaxpp.server.spelling import Spelling

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

    Endpoint = Callable[[Request], Awaitable[Response]]

log = logging.getLogger("jaxpp.serve")

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics")
DISCARDED_BYTES = 64 * 2**20  # of a body that is too large: read, so that its client reads our answer
DISCARDING_S = 2.0
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


@dataclass(frozen=True)
class ServerSettings:
    """What clients may do.

    Args:
        api_key: what they must send as ``Authorization: Bearer``; empty: nothing.
        timeout_s: of an answer, its time in the queue included; None: no limit.
        max_body_bytes: of a request.
        body_timeout_s: until a body has come.
        max_choices: most answers to one request: prompts times n.
    """

    api_key: str = ""
    timeout_s: float | None = 600.0
    max_body_bytes: int = 4 * 2**20
    body_timeout_s: float = 30.0
    max_choices: int = 64


def make_app(engine: Any, settings: ServerSettings, model_name: str) -> FastAPI:
    """Return the application; ``app.state.service`` is its `Service`.

    Args:
        engine: as `jaxpp.serve.Engine`; it is not closed by the application.
        settings: limits and key.
        model_name: as clients call the one model.
    """
    from fastapi import FastAPI

    service = Service(engine, settings, model_name)
    # No pages of documentation: bodies are not pydantic's. No redirects: a client would lose its body.
    app = FastAPI(
        title="jaxpp", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False,
        exception_handlers={404: service.unknown_route, 405: service.wrong_method},
    )  # fmt: skip
    app.state.service = service
    app.add_middleware(_Outermost, metrics=service.metrics)
    app.add_route("/v1/chat/completions", service.endpoint(service.chat), methods=["POST"])
    app.add_route("/v1/completions", service.endpoint(service.complete), methods=["POST"])
    app.add_route("/v1/models", service.endpoint(service.list_models), methods=["GET"])
    app.add_route("/v1/models/{model:path}", service.endpoint(service.show_model), methods=["GET"])
    app.add_route("/metrics", service.endpoint(service.show_metrics), methods=["GET"])
    app.add_route("/health", service.health, methods=["GET"])
    return app


class Service:
    """What the routes do.

    Attributes:
        is_closing: new requests are refused; whoever closes the engine sets it first. A failed engine closes itself.
        metrics: of this server.
    """

    def __init__(self, engine: Any, settings: ServerSettings, model_name: str) -> None:
        self.is_closing = False
        self.metrics = Metrics(engine)
        self._engine, self._settings = engine, settings
        config, tokenizer = engine.config, engine.tokenizer
        self._offer = Offer(model_name, tokenizer, config.vocab_size, engine.max_context, settings.max_choices)
        self._spelling = Spelling(tokenizer)
        known = f"{model_name} {config!r} {tokenizer.fingerprint if tokenizer else ''}"
        self._fingerprint = f"fp_{hashlib.blake2b(known.encode(), digest_size=5).hexdigest()}"
        self._created = int(time.time())

    def endpoint(self, function: Endpoint) -> Endpoint:
        """Return a route's function behind the key, with errors as the API writes them."""

        async def answer(request: Request) -> Response:
            try:
                self._check_key(request)
                return await function(request)
            except Exception as error:
                return _refusal(_told(error, request))

        return answer

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, chat=True)

    async def complete(self, request: Request) -> Response:
        """Continue prompts."""
        return await self._answer(request, chat=False)

    async def list_models(self, request: Request) -> Response:
        """List the one model."""
        return _json(200, {"object": "list", "data": [self._model()]})

    async def show_model(self, request: Request) -> Response:
        """Describe a model."""
        check_model(request.path_params["model"], self._offer.model_name)
        return _json(200, self._model())

    async def health(self, request: Request) -> Response:
        """Say whether requests are taken: 200, or 503 while closing."""
        closed = self.is_closing or self._engine.is_closed
        return _json(503, {"status": "closing"}) if closed else _json(200, {"status": "ok"})

    async def show_metrics(self, request: Request) -> Response:
        """Show the metrics to Prometheus."""
        from fastapi.responses import Response

        page, kind = self.metrics.render()
        return Response(page, headers={"content-type": kind})

    async def unknown_route(self, request: Request, error: Exception) -> Response:
        """Tell which routes there are."""
        return _refusal(ApiError(404, f"no route {request.url.path}; there are {' '.join(ROUTES)}"))

    async def wrong_method(self, request: Request, error: Exception) -> Response:
        """Tell the right method."""
        headers = getattr(error, "headers", None) or {}
        message = f"{request.method} is not for {request.url.path}; {headers.get('Allow', 'another method')} is"
        return _refusal(ApiError(405, message, headers=headers))

    def _check_key(self, request: Request) -> None:
        if not self._settings.api_key:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(key.strip().encode("latin-1"), self._settings.api_key.encode())
        if scheme.lower() != "bearer" or not same:
            message = "wrong API key" if key else "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", kind="authentication_error",
                           headers={"www-authenticate": "Bearer"})  # fmt: skip

    async def _answer(self, request: Request, chat: bool) -> Response:
        if self.is_closing:
            raise closing()
        body = read_json(await _body(request, self._settings))
        # In a thread: a long prompt takes long to encode, and the others' tokens are to flow meanwhile.
        order, exchange = await asyncio.to_thread(self._start, chat, body)
        watch = asyncio.create_task(_watch(request, exchange))
        writer = Writer(order, self._offer.model_name, self._fingerprint, self._spelling)
        try:
            chunks = exchange.chunks(writer)
            first = await anext(chunks)  # what fails before it gets a code of its own, in a stream too
            if order.stream:
                return _streamed(_events(request, order, exchange, first, chunks, watch))
            return _json(200, collect([first, *[chunk async for chunk in chunks]]))
        except BaseException:
            exchange.cancel()
            raise
        finally:
            if not order.stream:
                watch.cancel()

    def _start(self, chat: bool, body: Mapping[str, Any]) -> tuple[Order, Exchange]:
        order = read_order(chat, body, self._offer)
        if self.is_closing:
            raise closing()
        return order, Exchange(self._engine, order, self._settings.timeout_s, self.metrics)

    def _model(self) -> dict[str, Any]:
        return {"id": self._offer.model_name, "object": "model", "created": self._created, "owned_by": "jaxpp",
                "max_model_len": self._offer.max_context}  # fmt: skip


async def _body(request: Request, settings: ServerSettings) -> bytes:
    """Read a body up to its limit.

    Raises:
        ApiError: 415: it is not said to be JSON (a page in a browser may send other kinds anywhere, unasked);
            413: it is too large; 408: it does not come.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f'content-type "{kind}"; application/json is needed')
    most, kept, size, pieces = settings.max_body_bytes, list[bytes](), 0, _pieces(request)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for piece in pieces:
                size += len(piece)
                kept.append(piece)
                if size > most:
                    break
    except TimeoutError:
        message = f"the body did not come within {settings.body_timeout_s:g} s"
        raise ApiError(408, message, headers={"connection": "close"}) from None
    if size > most:
        kept.clear()
        await _discard(pieces)
        raise ApiError(413, f"the body is larger than {most:,} bytes", code="body_too_large",
                       headers={"connection": "close"})  # fmt: skip
    return b"".join(kept)


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(499, "the client is gone", kind="client_gone")
        more = message.get("more_body", False)
        yield message.get("body", b"")


async def _discard(pieces: AsyncIterator[bytes]) -> None:
    size = 0
    try:
        async with asyncio.timeout(DISCARDING_S):
            async for piece in pieces:
                size += len(piece)
                if size > DISCARDED_BYTES:
                    return
    except TimeoutError:
        return


async def _watch(request: Request, exchange: Exchange) -> None:
    """Wait until the client hangs up, then free its slots, whether or not anybody is writing to it."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    exchange.leave()


async def _events(
    request: Request,
    order: Order,
    exchange: Exchange,
    first: Chunk,
    chunks: AsyncIterator[Chunk],
    watch: asyncio.Task[None],
) -> AsyncIterator[bytes]:
    """Yield the events of a stream; an error is the last one."""
    try:
        yield _event(_shown(first, order))
        async for chunk in chunks:
            if chunk["choices"] or order.include_usage:
                yield _event(_shown(chunk, order))
        yield b"data: [DONE]\n\n"
    except Exception as error:
        yield _event(_told(error, request).body())
    finally:
        exchange.cancel()
        watch.cancel()


def _shown(chunk: Chunk, order: Order) -> Chunk:
    return {"usage": None, **chunk} if order.include_usage else chunk


def _told(error: Exception, request: Request) -> ApiError:
    """Return what the client is told; what is no fault of its own is logged, and only named to it."""
    if isinstance(error, ApiError):
        return error
    name = request.scope["state"]["request_id"]
    log.error("request %s failed", name, exc_info=error)
    return ApiError(500, f"the server failed; its log tells why under request {name}", kind="server_error",
                    code="internal_error")  # fmt: skip


def _refusal(error: ApiError) -> Response:
    return _json(error.status, error.body(), error.headers)


def _text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _event(value: Any) -> bytes:
    return b"data: " + _text(value) + b"\n\n"


def _json(status: int, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    from fastapi.responses import Response

    return Response(_text(value), status, {"content-type": "application/json", **(headers or {})})


def _streamed(events: AsyncIterator[bytes]) -> Response:
    from fastapi.responses import StreamingResponse

    # Proxies such as nginx would else collect the events.
    headers = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events, headers=headers)


class _Outermost:
    """Names each request and counts each response."""

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        name = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = name

        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
                self._metrics.response(_route(scope["path"]), message["status"])
            await send(message)

        await self._app(scope, receive, named)


def _route(path: str) -> str:
    """Return a label: paths that clients make up would be labels without end."""
    return "/v1/models" if path.startswith("/v1/models/") else path if path in ROUTES else "other"
