"""One server process: the port first, then the engine behind it, then a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.errors import BootError, NotReady
from jaxserve.serve.http import refusal_response
from jaxserve.serve.logs import Log, no_log
from jaxserve.serve.page import page_response
from jaxserve.serve.request_log import RequestLog

_FLUSH_S = 5.0  # for answers to reach their clients after the engine has ended
# An idle connection; the client closes first, or its next request may meet a closed door. httpx and
# the openai client do after 5 s, aiohttp after 15.
_KEEP_ALIVE_S = 75
_ABORT_S = 10.0  # for the step in flight to end when requests are aborted


class Stoppable(Protocol):
    """What the launcher needs of AsyncEngine."""

    @property
    def num_open(self) -> int: ...
    async def shutdown(self, grace_s: float) -> None: ...


@dataclass(frozen=True)
class Serving:
    """A booted server."""

    app: ASGIApp
    engine: Stoppable


OnPhase = Callable[[str], None]
OnProgress = Callable[[str, int, int], None]
OnDeath = Callable[[BaseException], None]

# Builds the engine and the app, slowly, in a thread of its own. Told where to report its phases and
# ``(what, done, total)``, and whom to tell when the engine ends by itself.
BuildApp = Callable[[OnPhase, OnProgress, OnDeath], Serving]


class Front:
    """The app behind the port: says that it is starting until the real one takes over.

    /ready tells the phase of the boot, its seconds so far, and how much of what is done
    (executables, or bytes of weights).
    """

    def __init__(self, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        self.phase = "starting"
        self.progress: dict[str, Any] | None = None
        self.app: ASGIApp | None = None
        self._clock = clock
        self._started_at = clock()
        self._early = RequestLog(self._starting, log)

    def report(self, what: str, done: int, total: int) -> None:
        """How far the boot is. May be called from several threads, one at a time."""
        self.progress = {"what": what, "done": done, "total": total}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.app or self._early)(scope, receive, send)

    async def _starting(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = {
            "status": "starting",
            "phase": self.phase,
            "progress": self.progress,
            "seconds": round(self._clock() - self._started_at, 1),
        }
        if scope["path"] == "/health":
            response = JSONResponse(status)
        elif scope["path"] == "/ready":
            response = JSONResponse(status, 503)
        elif scope["path"] == "/":
            response = page_response()
        else:
            response = refusal_response(NotReady(f"the server is starting: {self.phase}"))
        await response(scope, receive, send)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the order of a stop is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises BootError naming the flag when it cannot."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise BootError(f"--host {host}: {error.strerror}; try --host 127.0.0.1") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise BootError(
                f"--host {host}: {error.strerror}; give an address of this machine, "
                "e.g. --host 127.0.0.1, or 0.0.0.0 for all of them"
            ) from error
        raise BootError(
            f"cannot listen on {host} port {port}: {error.strerror}; "
            f"another --port may be free, and --port 0 takes any"
        ) from error
    return listener


async def run_server(
    listener: socket.socket,
    build: BuildApp,
    *,
    grace_s: float,
    log_level: str,
    on_ready: Callable[[], None],
    on_phase: OnPhase,
    log: Log = no_log,
) -> int:
    """Serves until SIGTERM, SIGINT or the engine's end; returns the process's exit code.

    The first signal refuses new requests and gives running ones ``grace_s``, the second aborts
    them. ``on_phase`` is told each step of the boot, and of a stop as soon as it is asked for.
    ``log`` gets a line a request. Raises what ``build`` raises. The build thread and a wedged
    engine thread may still run when it returns: they are daemons, and cannot be interrupted.
    """
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[None] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, None)
    front = Front(log)
    server = _Server(
        uvicorn.Config(
            front,
            lifespan="off",
            ws="none",
            # At info, uvicorn reports its own life around our lines.
            log_level="warning" if log_level == "info" else log_level,
            access_log=log_level == "debug",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(_FLUSH_S),
        )
    )

    def phase(text: str) -> None:
        front.phase = text
        on_phase(text)

    died: asyncio.Future[BaseException] = loop.create_future()
    built = _build_in_thread(loop, build, phase, front.report, _setter(loop, died))
    signalled = asyncio.create_task(signals.get())
    http = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.wait({built, signalled, http}, return_when=asyncio.FIRST_COMPLETED)
        if http.done():
            return 1  # the finally clause raises what ended it
        if not built.done():
            on_phase("stopping")
            return 0
        serving = built.result()
        front.app = serving.app
        on_ready()
        await asyncio.wait({died, signalled, http}, return_when=asyncio.FIRST_COMPLETED)
        if died.done() or http.done():
            return 1
        on_phase(_stop_line(serving.engine.num_open, grace_s))
        return await _drain(serving.engine, signals, grace_s)
    finally:
        server.should_exit = True
        signalled.cancel()
        await http


def _build_in_thread(
    loop: asyncio.AbstractEventLoop,
    build: BuildApp,
    phase: OnPhase,
    progress: OnProgress,
    on_death: OnDeath,
) -> asyncio.Future[Serving]:
    built: asyncio.Future[Serving] = loop.create_future()

    def work() -> None:
        try:
            result = build(phase, progress, on_death)
        except BaseException as error:
            _post(loop, lambda error=error: built.cancelled() or built.set_exception(error))
        else:
            _post(loop, lambda: built.cancelled() or built.set_result(result))

    threading.Thread(target=work, name="build", daemon=True).start()
    return built


def _setter(loop: asyncio.AbstractEventLoop, future: asyncio.Future[BaseException]) -> OnDeath:
    return lambda error: _post(loop, lambda: future.done() or future.set_result(error))


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
        loop.call_soon_threadsafe(call)


def _stop_line(num_open: int, grace_s: float) -> str:
    if num_open == 0:
        return "stopping"
    requests = "1 request" if num_open == 1 else f"{num_open} requests"
    return (
        f"stopping: {requests} running or waiting, up to {grace_s:g} s to finish; "
        "a second signal aborts"
    )


async def _drain(engine: Stoppable, signals: asyncio.Queue[None], grace_s: float) -> int:
    """Ends the engine; 1 when a step in flight would not end."""
    ending = asyncio.create_task(engine.shutdown(grace_s))
    again = asyncio.create_task(signals.get())
    await asyncio.wait({ending, again}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    hurry = asyncio.create_task(engine.shutdown(0.0))
    _, late = await asyncio.wait({ending, hurry}, timeout=_ABORT_S)
    for task in late:
        task.cancel()
    return 1 if late else 0
