"""The HTTP routes: the OpenAI API, and what operators and probes ask."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from jaxserve.errors import EngineError, InvalidRequest, RequestRefused, UnknownModel
from jaxserve.serve import http, openapi
from jaxserve.serve.admin import AdminAction
from jaxserve.serve.calls import Call
from jaxserve.serve.generation import EngineClient
from jaxserve.serve.generator import Generator
from jaxserve.serve.logs import Log, no_log
from jaxserve.serve.metrics import CONTENT_TYPE, Metrics
from jaxserve.serve.page import page_response
from jaxserve.serve.prompts import PromptReader
from jaxserve.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    TokenizeRequest,
)
from jaxserve.serve.records import parse_request
from jaxserve.serve.request_log import RequestLog, record_of
from jaxserve.serve.responses import Envelope, error_body
from jaxserve.serve.structured import Grammars
from jaxserve.serve.text import Text

T = TypeVar("T")

_TOKENIZING_THREADS = 2

_BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


@dataclass(frozen=True, kw_only=True)
class AppParts:
    """What the routes stand on. ``served_names[0]`` is the name given where none was asked.

    ``root`` is the checkpoint that the names stand for, as the operator named it.
    ``boot_info`` is added to /health. ``max_body_bytes`` bounds a request's body. Web pages of
    ``allowed_origins`` may call ("*": of all). ``admin`` actions become routes of their own.
    ``log`` gets a line a request, with ``log_probes`` also of probes.
    ``trust_request_chat_template`` runs the templates that requests bring,
    ``enable_prompt_tokens_details`` tells how many prompt tokens were cached.
    """

    engine: EngineClient
    text: Text
    grammars: Grammars
    metrics: Metrics
    served_names: tuple[str, ...]
    root: str
    max_model_len: int
    version: str
    boot_info: Callable[[], Mapping[str, Any]] = dict
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 2**20
    trust_request_chat_template: bool = False
    enable_prompt_tokens_details: bool = False
    allowed_origins: tuple[str, ...] = ()
    admin: tuple[AdminAction, ...] = ()
    log: Log = no_log
    log_probes: bool = False
    wall_clock: Callable[[], float] = time.time


def create_app(parts: AppParts) -> ASGIApp:
    """The ASGI application over a running engine."""
    app = FastAPI(
        title="jaxserve",
        version=parts.version,
        docs_url=None,  # these pages would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    routes = _Routes(parts)
    _add_routes(app, routes)
    for action in parts.admin:
        app.post(
            f"/{action.name}",
            summary=action.summary,
            operation_id=action.name,
            responses=openapi.answers({"type": "object"}) | openapi.errors(400, 401, 403, 413, 503),
            openapi_extra=openapi.body(action.arguments, required=False),
        )(routes.admin(action))
    app.openapi = functools.cache(
        functools.partial(openapi.document, app, _BODIES, bool(parts.api_keys))
    )
    app.add_exception_handler(RequestRefused, _on_refusal)
    app.add_exception_handler(EngineError, _on_refusal)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_fault)
    guarded: ASGIApp = http.ApiKeys(app, parts.api_keys) if parts.api_keys else app
    if parts.allowed_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=parts.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return RequestLog(
        http.UnreadBodies(guarded, drain_bytes=4 * parts.max_body_bytes),
        parts.log,
        log_probes=parts.log_probes,
    )


def _add_routes(app: FastAPI, routes: _Routes) -> None:
    errors = openapi.errors
    status = {"description": "Its state.", "content": {"application/json": {"schema": {}}}}
    app.get("/", response_class=HTMLResponse)(routes.page)
    app.get("/health", responses={200: status, 503: status})(routes.health)
    app.get(
        "/ping",
        response_class=Response,
        responses={200: {"description": "It is alive."}, 503: {"description": "It is not."}},
    )(routes.ping)
    app.get("/ready", responses={200: status, 503: status})(routes.ready)
    sleeping = openapi.record(is_sleeping={"type": "boolean"})
    app.get("/is_sleeping", responses=openapi.answers(sleeping))(routes.is_sleeping)
    text = {"text/plain": {"schema": {"type": "string"}}}
    app.get("/metrics", response_class=Response, responses={200: {"content": text}})(routes.metrics)
    app.get("/version", responses=openapi.answers(openapi.record(version=openapi.STRING)))(
        routes.version
    )
    cards = openapi.record(object={"const": "list"}, data={"type": "array", "items": openapi.MODEL})
    app.get("/v1/models", responses=openapi.answers(cards) | errors(401))(routes.models)
    app.get(  # a hub id holds a slash
        "/v1/models/{model:path}", responses=openapi.answers(openapi.MODEL) | errors(401, 404)
    )(routes.model)
    tokens = openapi.record(
        count=openapi.INTEGER,
        max_model_len=openapi.INTEGER,
        tokens={"type": "array", "items": openapi.INTEGER},
    )
    generation = (400, 401, 404, 413, 429, 500, 503, 504)
    for path, endpoint, schema, refused in (
        ("/v1/completions", routes.completions, openapi.COMPLETION, generation),
        ("/v1/chat/completions", routes.chat_completions, openapi.CHAT_COMPLETION, generation),
        ("/tokenize", routes.tokenize, tokens, (400, 401, 404, 413)),
        (
            "/detokenize",
            routes.detokenize,
            openapi.record(prompt=openapi.STRING),
            (400, 401, 404, 413),
        ),
    ):
        answer = openapi.answers(schema, streams=refused is generation)
        app.post(
            path, responses=answer | errors(*refused), openapi_extra=openapi.body(_BODIES[path])
        )(endpoint)


class _Routes:
    """The endpoints; all they know is in ``parts``."""

    def __init__(self, parts: AppParts) -> None:
        self._parts = parts
        self._generator = Generator(
            engine=parts.engine,
            text=parts.text,
            prompts=PromptReader(
                parts.text,
                max_model_len=parts.max_model_len,
                trust_templates=parts.trust_request_chat_template,
            ),
            grammars=parts.grammars,
            shows_cached_tokens=parts.enable_prompt_tokens_details,
        )
        # Of its own: who only tokenizes must not take the threads that prompts are read on.
        self._tokenizing = ThreadPoolExecutor(_TOKENIZING_THREADS, "tokenize")
        self._created = int(parts.wall_clock())

    async def completions(self, request: Request) -> Response:
        """Continue one or more prompts."""
        arrived = self._parts.metrics.clock()
        asked = await self._parse(request, CompletionRequest)
        envelope = self._envelope("cmpl", request, asked)
        metrics = self._parts.metrics.call(record_of(request.scope))
        call = await self._generator.completion(asked, envelope, metrics, arrived)
        return await self._answer(request, asked.stream, call)

    async def chat_completions(self, request: Request) -> Response:
        """Continue a conversation."""
        arrived = self._parts.metrics.clock()
        asked = await self._parse(request, ChatRequest)
        envelope = self._envelope("chatcmpl", request, asked)
        metrics = self._parts.metrics.call(record_of(request.scope))
        call = await self._generator.chat(asked, envelope, metrics, arrived)
        try:
            return await self._answer(request, asked.stream, call)
        except InvalidRequest as refusal:
            if refusal.param != "prompt":
                raise
            # The engine knows prompts only; this client's came from its messages.
            raise InvalidRequest(refusal.message, "messages", refusal.code) from refusal

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or a conversation."""
        call = await self._parse(request, TokenizeRequest)
        if (call.prompt is None) == (call.messages is None):
            raise InvalidRequest("send either prompt or messages", "prompt")
        token_ids = await self._beside(
            request, functools.partial(self._generator.prompts.tokens, call)
        )
        return JSONResponse(
            {
                "count": len(token_ids),
                "max_model_len": self._parts.max_model_len,
                "tokens": token_ids,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        call = await self._parse(request, DetokenizeRequest)

        def decode() -> str:
            text = self._parts.text
            for token_id in call.tokens:
                if not text.has_token(token_id):
                    raise InvalidRequest(f"tokens: {token_id} is not in the vocabulary", "tokens")
            return text.decode(call.tokens)

        return JSONResponse({"prompt": await self._beside(request, decode)})

    async def _beside(self, request: Request, work: Callable[[], T]) -> T:
        """The result of ``work``, done beside the event loop unless the client leaves before."""

        async def done() -> T:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)

        return await http.until_disconnect(request.receive, done())

    async def page(self) -> Response:
        """A page to chat with the model and to watch the engine."""
        return page_response()

    def admin(self, action: AdminAction) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint of an admin action."""

        async def endpoint(request: Request) -> Response:
            guarded = bool(self._parts.api_keys)
            return JSONResponse(await action.answer(request, guarded=guarded))

        return endpoint

    async def models(self) -> Response:
        """The names this server answers to."""
        cards = [self._card(name) for name in self._parts.served_names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, model: str) -> Response:
        """One of the names this server answers to."""
        self._check_served(model)
        return JSONResponse(self._card(model))

    async def health(self) -> Response:
        """200 while the engine's loop turns, with what the boot decided; 503 otherwise."""
        engine = self._parts.engine
        status = {
            "status": "alive" if engine.alive else "dead",
            "paused": engine.paused,
            "seconds_since_tick": round(engine.seconds_since_tick, 3),
        }
        return JSONResponse({**self._parts.boot_info(), **status}, 200 if engine.alive else 503)

    async def ping(self) -> Response:
        """/health without a body."""
        return Response(status_code=200 if self._parts.engine.alive else 503)

    async def is_sleeping(self) -> Response:
        """Whether the device's memory was given back, by /sleep."""
        return JSONResponse({"is_sleeping": self._parts.engine.stats().asleep})

    async def ready(self) -> Response:
        """200 while requests are taken, 503 otherwise."""
        engine = self._parts.engine
        asleep = engine.stats().asleep
        if engine.accepting and not engine.paused and not asleep:
            return JSONResponse({"status": "ready"})
        status = "dead" if not engine.alive else "stopping"
        if engine.accepting:
            status = "asleep" if asleep else "paused"
        return JSONResponse({"status": status}, 503)

    async def metrics(self) -> Response:
        """Prometheus text."""
        return Response(self._parts.metrics.render(), media_type=CONTENT_TYPE)

    async def version(self) -> Response:
        """The version of this server."""
        return JSONResponse({"version": self._parts.version})

    async def _parse(self, request: Request, kind: type[Any]) -> Any:
        body = await http.read_body(request, self._parts.max_body_bytes)
        call = parse_request(kind, body)
        if call.model is not None:
            self._check_served(call.model)
        record_of(request.scope).model = call.model or self._parts.served_names[0]
        return call

    def _check_served(self, model: str) -> None:
        if model not in self._parts.served_names:
            raise UnknownModel(
                f"the model {model[:200]!r} is not served here; served: "
                f"{', '.join(self._parts.served_names)}",
                "model",
                "model_not_found",
            )

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxserve",
            "root": self._parts.root,
            "parent": None,
            "max_model_len": self._parts.max_model_len,
        }

    def _envelope(self, kind: str, request: Request, asked: Generation) -> Envelope:
        request_id = asked.request_id or record_of(request.scope).request_id
        model = asked.model or self._parts.served_names[0]
        return Envelope(f"{kind}-{request_id}", int(self._parts.wall_clock()), model)

    async def _answer(self, request: Request, stream: bool, call: Call) -> Response:
        """Runs a call: what the engine refuses is raised before a stream starts."""
        record_of(request.scope).stream = stream
        try:
            # A paused engine takes the call when it goes on; the client may be gone by then.
            await http.until_disconnect(request.receive, call.start())
            if not stream:
                return JSONResponse(await http.until_disconnect(request.receive, call.whole()))
        except BaseException:
            call.close()
            raise
        return http.EventStream(call.events(), call.close)


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused | EngineError)
    return http.refusal_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Wrong paths and methods."""
    assert isinstance(error, HTTPException)
    body = error_body(
        f"{request.method} {request.url.path}: {error.detail}", "invalid_request_error", None, None
    )
    return JSONResponse(body, error.status_code, error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """Nobody reads it; the status is what access logs conventionally show."""
    record_of(request.scope).client_gone = True
    return Response(status_code=499)


async def _on_fault(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body("internal error", "server_error", None, None), 500)
