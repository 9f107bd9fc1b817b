"""Routes for the operator alone: what they do is handed in, who may ask is decided here."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from jaxserve.errors import InvalidRequest
from jaxserve.serve.async_engine import AsyncEngine
from jaxserve.serve.http import Forbidden, read_body
from jaxserve.serve.inbox import PauseMode
from jaxserve.serve.logs import Log, no_log

_MAX_BODY_BYTES = 64 * 2**10


class NoArguments(BaseModel):
    """An action that takes none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PauseArguments(NoArguments):
    """What becomes of running requests: ended, waited for, or frozen until the resume."""

    mode: PauseMode = "abort"


@dataclass(frozen=True)
class AdminAction:
    """POST /NAME. ``run`` turns the ``arguments``, from query and JSON body, into the answer."""

    name: str
    summary: str
    run: Callable[[Any], Awaitable[Mapping[str, Any]]]
    arguments: type[BaseModel] = NoArguments

    async def answer(self, request: Request, *, guarded: bool) -> Mapping[str, Any]:
        """Raises Forbidden and InvalidRequest. ``guarded``: the request has shown an api key."""
        if not guarded:
            check_local(request)
        return await self.run(self._parse(request, await read_body(request, _MAX_BODY_BYTES)))

    def _parse(self, request: Request, body: bytes) -> BaseModel:
        try:
            fields = json.loads(body) if body else {}
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None
        except ValueError as error:
            raise InvalidRequest(f"the body is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise InvalidRequest("the body must be a JSON object")
        try:
            return self.arguments.model_validate(fields | dict(request.query_params))
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            name = ".".join(map(str, fault["loc"]))[:100]
            raise InvalidRequest(f"{name}: {fault['msg']}", name) from None


def check_local(request: Request) -> None:
    """Raises Forbidden unless a program of this machine asks.

    A web page open on this machine comes from the loopback address too; browsers say so.
    """
    try:
        address = ipaddress.ip_address(request.client.host if request.client else "")
    except ValueError:
        raise Forbidden("admin routes are for local clients, or for who has an api key") from None
    mapped = getattr(address, "ipv4_mapped", None)
    if not (mapped or address).is_loopback:
        raise Forbidden(
            f"admin routes without --api-key are for clients of this machine, not {address}"
        )
    if "origin" in request.headers:
        raise Forbidden("admin routes without --api-key are not for web pages")


class SleepArguments(NoArguments):
    """How deep, and whether requests that run are kept for later, or a reason not to sleep."""

    level: int = Field(1, ge=1, le=2)  # a query holds text, of which no Literal of int is made
    requests: Literal["keep", "refuse"] = "keep"


class UpdateArguments(NoArguments):
    """A checkpoint's path, the version to call it, and what becomes of running requests."""

    path: str
    version: int | None = None
    requests: Literal["keep", "recompute", "abort"] = "keep"


def allowed_path(path: str, directory: Path) -> Path:
    """``path``, relative to ``directory`` or absolute, inside it. Raises InvalidRequest.

    Links are followed first. What lies outside gets the answer of what is not there.
    """
    try:
        found = (directory / path).resolve(strict=True)
        inside = found.is_relative_to(directory.resolve(strict=True))
    except (OSError, RuntimeError, ValueError):  # not there, a loop of links, a null byte
        inside = False
    if not inside:
        raise InvalidRequest(
            f"path: {path[:200]!r} is no checkpoint under --update-weights-dir", "path"
        )
    return found


def _file_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    return sum(file.stat().st_size for file in files)


def engine_actions(
    engine: AsyncEngine,
    *,
    start_profile: Callable[[], str],
    stop_profile: Callable[[], str],
    read_weights: Callable[[Path], Any],
    weights_directory: Path | None = None,
    log: Log = no_log,
) -> tuple[AdminAction, ...]:
    """What every engine can be told. The profile callables return the directory written to.

    ``read_weights`` makes of a checkpoint what the engine's ``update_params`` takes, beside the
    running engine; only checkpoints under ``weights_directory`` are read. ``log`` gets a line when
    an update begins and one when it is done.
    """

    async def reset_prefix_cache(arguments: NoArguments) -> Mapping[str, Any]:
        await engine.call(lambda inner: inner.reset_prefix_cache())
        return {"status": "reset"}

    async def pause(arguments: PauseArguments) -> Mapping[str, Any]:
        await engine.pause(arguments.mode)
        return {"status": "paused"}

    async def resume(arguments: NoArguments) -> Mapping[str, Any]:
        await engine.resume()
        return {"status": "resumed"}

    async def start(arguments: NoArguments) -> Mapping[str, Any]:
        return {"status": "profiling", "directory": await asyncio.to_thread(start_profile)}

    async def stop(arguments: NoArguments) -> Mapping[str, Any]:
        return {"status": "stopped", "directory": await asyncio.to_thread(stop_profile)}

    async def sleep(arguments: SleepArguments) -> Mapping[str, Any]:
        await engine.call(
            lambda inner: inner.sleep(level=arguments.level, requests=arguments.requests)
        )
        return {"status": "asleep", "level": arguments.level}

    async def wake_up(arguments: NoArguments) -> Mapping[str, Any]:
        await engine.call(lambda inner: inner.wake())
        return {"status": "awake"}

    async def update_weights(arguments: UpdateArguments) -> Mapping[str, Any]:
        if weights_directory is None:
            raise InvalidRequest(
                "this server reads no weights: start it with --update-weights-dir", "path"
            )
        path = allowed_path(arguments.path, weights_directory)
        start = time.monotonic()
        size = await asyncio.to_thread(_file_bytes, path)
        log("update_weights", {"path": str(path), "bytes": size})
        weights = await asyncio.to_thread(read_weights, path)
        version = await engine.call(
            lambda inner: inner.update_params(
                weights, version=arguments.version, requests=arguments.requests
            )
        )
        seconds = time.monotonic() - start
        log("weights_updated", {"weight_version": version, "seconds": seconds})
        return {"status": "updated", "weight_version": version}

    return (
        AdminAction("sleep", "Give the device's memory back.", sleep, SleepArguments),
        AdminAction("wake_up", "Go on after /sleep.", wake_up),
        AdminAction(
            "update_weights", "Load other weights of this model.", update_weights, UpdateArguments
        ),
        AdminAction("reset_prefix_cache", "Forget every cached prefix.", reset_prefix_cache),
        AdminAction("pause", "Run nothing until /resume.", pause, PauseArguments),
        AdminAction("resume", "Go on after /pause.", resume),
        AdminAction("start_profile", "Record a profile of this process.", start),
        AdminAction("stop_profile", "End the profile and write it.", stop),
    )
