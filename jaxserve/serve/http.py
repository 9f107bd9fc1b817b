"""HTTP below the routes: bodies, disconnects, server-sent events, keys and request ids."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import EngineError, RequestRefused
from jaxserve.serve.responses import error_body

T = TypeVar("T")

_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})
_MAX_REQUEST_ID_CHARS = 256


class BodyTooLarge(RequestRefused):
    """413."""

    status = 413


def refusal_response(error: RequestRefused | EngineError) -> JSONResponse:
    """The error as OpenAI writes it; an engine's fault is a 500 that keeps its details to us."""
    if isinstance(error, EngineError):
        return JSONResponse(refusal_body(error), 500)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return JSONResponse(refusal_body(error), error.status, headers)


def refusal_body(error: RequestRefused | EngineError) -> dict[str, Any]:
    """The ``error`` object of an exception."""
    if isinstance(error, RequestRefused):
        return error_body(error.message, error.type, error.param, error.code)
    return error_body("the engine failed; see the server's log", "server_error", None, None)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body of at most ``limit`` bytes. Raises BodyTooLarge, also before it has come."""
    announced = request.headers.get("content-length", "")
    too_large = BodyTooLarge(f"the body is larger than {limit} bytes")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise too_large
    return bytes(body)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; cancels it and raises ClientDisconnect if the client leaves first.

    Call it when the body has been read: whatever the client sends then is its end.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Sends server-sent events as they come and closes their source when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def pump() -> None:
            async with contextlib.aclosing(self._events) as events:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            with contextlib.suppress(ClientDisconnect):
                await until_disconnect(receive, pump())
        finally:
            self._close()  # a generator that was never started closes nothing by itself


class ApiKeys:
    """Lets requests with a known bearer key through; probes and metrics need none."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._knows(scope):
            await self._app(scope, receive, send)
            return
        body = error_body(
            "a known api key is needed: Authorization: Bearer KEY",
            "invalid_request_error",
            None,
            "invalid_api_key",
        )
        response = JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # All keys are compared whatever the result: the time taken tells nothing.
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(found)


class EchoRequestId:
    """Gives an answer the X-Request-Id its request came with."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = Headers(scope=scope).get("x-request-id") if scope["type"] == "http" else None
        if request_id is None or len(request_id) > _MAX_REQUEST_ID_CHARS:
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
