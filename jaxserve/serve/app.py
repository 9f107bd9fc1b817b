"""The HTTP routes: the OpenAI API, and what operators and probes ask."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from jaxserve.config import SamplingParams
from jaxserve.errors import EngineError, InvalidRequest, RequestRefused, UnknownModel
from jaxserve.serve import http
from jaxserve.serve.calls import Call
from jaxserve.serve.generation import EngineClient
from jaxserve.serve.metrics import CONTENT_TYPE, Metrics
from jaxserve.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_request,
)
from jaxserve.serve.responses import Answer, ChatAnswer, CompletionAnswer, error_body
from jaxserve.serve.text import Text

_BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


@dataclass(frozen=True, kw_only=True)
class AppParts:
    """What the routes stand on. ``served_names[0]`` is the name given where none was asked.

    ``boot_info`` is added to /health. ``max_body_bytes`` bounds a request's body.
    """

    engine: EngineClient
    text: Text
    metrics: Metrics
    served_names: tuple[str, ...]
    max_model_len: int
    version: str
    boot_info: Callable[[], Mapping[str, Any]] = dict
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 2**20
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
    app.get("/v1/models")(routes.models)
    app.get("/v1/models/{model:path}")(routes.model)  # a hub id holds a slash
    app.get("/health")(routes.health)
    app.get("/ready")(routes.ready)
    app.get("/metrics", response_class=Response)(routes.metrics)
    app.get("/version")(routes.version)
    for path, endpoint in (
        ("/v1/completions", routes.completions),
        ("/v1/chat/completions", routes.chat_completions),
        ("/tokenize", routes.tokenize),
        ("/detokenize", routes.detokenize),
    ):
        app.post(path, openapi_extra=_body_schema(_BODIES[path]))(endpoint)
    app.openapi = functools.partial(_openapi, app)
    app.add_exception_handler(RequestRefused, _on_refusal)
    app.add_exception_handler(EngineError, _on_refusal)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_fault)
    guarded = http.ApiKeys(app, parts.api_keys) if parts.api_keys else app
    return http.EchoRequestId(guarded)


class _Routes:
    """The endpoints; all they know is in ``parts``."""

    def __init__(self, parts: AppParts) -> None:
        self._parts = parts
        self._created = int(parts.wall_clock())

    async def completions(self, request: Request) -> Response:
        """Continue one or more prompts."""
        arrived = self._parts.metrics.clock()
        call = await self._parse(request, CompletionRequest)
        params = call.sampling_params()
        prompts = call.prompts
        if len(prompts) > self._parts.engine.max_requests:
            raise InvalidRequest(
                f"prompt holds {len(prompts)} prompts, at most {self._parts.engine.max_requests} "
                "can wait here (--max-num-seqs + --max-queued-requests)",
                "prompt",
            )

        def encode() -> list[list[int]]:
            return [self._parts.text.encode(p) if isinstance(p, str) else p for p in prompts]

        answer = CompletionAnswer(*self._envelope("cmpl", call.model), call.include_usage)
        token_ids = await asyncio.to_thread(encode)
        return await self._answer(request, call, answer, token_ids, params, arrived)

    async def chat_completions(self, request: Request) -> Response:
        """Continue a conversation."""
        arrived = self._parts.metrics.clock()
        call = await self._parse(request, ChatRequest)
        params = call.sampling_params()
        token_ids = await asyncio.to_thread(self._encode_chat, call)
        answer = ChatAnswer(*self._envelope("chatcmpl", call.model), call.include_usage)
        try:
            return await self._answer(request, call, answer, [token_ids], params, arrived)
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
        if call.messages is not None:
            token_ids = await asyncio.to_thread(self._encode_chat, call)
        else:
            token_ids = await asyncio.to_thread(
                self._parts.text.encode,
                call.prompt or "",
                add_special_tokens=call.add_special_tokens,
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

        return JSONResponse({"prompt": await asyncio.to_thread(decode)})

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
            "seconds_since_tick": round(engine.seconds_since_tick, 3),
        }
        return JSONResponse({**self._parts.boot_info(), **status}, 200 if engine.alive else 503)

    async def ready(self) -> Response:
        """200 while requests are taken, 503 otherwise."""
        if self._parts.engine.accepting:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "stopping" if self._parts.engine.alive else "dead"}, 503)

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
            "max_model_len": self._parts.max_model_len,
        }

    def _encode_chat(self, call: ChatRequest | TokenizeRequest) -> list[int]:
        return self._parts.text.encode_chat(
            [message.for_template() for message in call.messages or ()],
            add_generation_prompt=call.add_generation_prompt,
        )

    def _envelope(self, kind: str, model: str | None) -> tuple[str, int, str]:
        """Id, time of creation and model name of an answer."""
        created = int(self._parts.wall_clock())
        return f"{kind}-{uuid.uuid4().hex}", created, model or self._parts.served_names[0]

    async def _answer(
        self,
        request: Request,
        asked: CompletionRequest | ChatRequest,
        answer: Answer,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        arrived: float,
    ) -> Response:
        """Runs a call: what the engine refuses is raised before a stream starts."""
        parts = self._parts
        call = Call(
            engine=parts.engine,
            text=parts.text,
            metrics=parts.metrics,
            answer=answer,
            prompts=prompts,
            params=params,
            arrived=arrived,
        )
        try:
            await call.start()
            if not asked.stream:
                return JSONResponse(await http.until_disconnect(request.receive, call.whole()))
        except BaseException:
            call.close()
            raise
        return http.EventStream(call.events(asked.include_usage), call.close)


def _body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI entry of a body that the route reads itself."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the records that the bodies refer to."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    records: dict[str, Any] = {}
    for kind in _BODIES.values():
        records |= kind.model_json_schema(ref_template="#/components/schemas/{model}").get(
            "$defs", {}
        )
    document.setdefault("components", {}).setdefault("schemas", {}).update(records)
    return document


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
    return Response(status_code=499)


async def _on_fault(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body("internal error", "server_error", None, None), 500)
