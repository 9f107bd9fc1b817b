"""The bridge between asyncio and the one thread that owns the engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxserve.config import SamplingParams
from jaxserve.errors import EngineDead, NotReady, QueueFull, RequestRefused
from jaxserve.sched.outputs import EngineStats, RequestUpdate
from jaxserve.serve.streams import Accepted, Item, RequestStream

_IDLE_TICK_S = 0.5


class Engine(Protocol):
    """What the engine thread calls; nothing else ever touches the engine."""

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None: ...
    def abort_request(self, request_id: str) -> None: ...
    def step(self) -> list[RequestUpdate]: ...
    def has_unfinished_requests(self) -> bool: ...
    def audit(self) -> None: ...
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class _Add:
    stream: RequestStream
    prompt_token_ids: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Stop:
    """Finish what runs until ``deadline`` (of the bridge's clock), abort the rest, and end."""

    deadline: float


class AsyncEngine:
    """Owns the engine and the thread that steps it.

    Coroutines talk to the thread through one inbox; the thread answers with one call into each
    event loop a step, whatever the number of requests.

    ``max_requests`` bounds the requests running and waiting together. ``on_step`` is told the
    engine's totals and the requests that ended with each step, ``on_death`` what ended the thread;
    both are called on the engine thread. ``stall_s``: a step that takes longer is no life sign.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_requests: int,
        on_step: Callable[[EngineStats, list[RequestUpdate]], None] = lambda stats, ended: None,
        on_death: Callable[[BaseException], None] = lambda error: None,
        stall_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._max_requests = max_requests
        self._on_step = on_step
        self._on_death = on_death
        self._stall_s = stall_s
        self._clock = clock
        self._inbox: queue.SimpleQueue[_Add | _Abort | _Stop] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}  # the engine thread's alone
        self._gate = threading.Lock()  # guards the three below
        self._open = 0
        self._draining = False
        self._error: BaseException | None = None
        self._stats = engine.stats()
        self._last_tick = clock()
        self._deadline = float("inf")
        self._finished: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # What coroutines call.

    async def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> RequestStream:
        """Hands a request to the engine and returns its updates once the engine took it.

        ``request_id`` must be new. Raises what Engine.add_request raises, QueueFull, NotReady
        while stopping, EngineDead.
        """
        stream = RequestStream(request_id, self.abort)
        with self._gate:
            if self._error is not None:
                raise _dead(self._error)
            if self._draining:
                raise NotReady("the server is stopping")
            if self._open >= self._max_requests:
                raise QueueFull(
                    f"{self._open} requests are running or waiting, of at most "
                    f"{self._max_requests} (--max-num-seqs + --max-queued-requests)"
                )
            self._open += 1
            self._inbox.put(_Add(stream, prompt_token_ids, params))
        try:
            await stream.accepted()
        except asyncio.CancelledError:
            stream.close()
            raise
        return stream

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is. An unknown one is ignored."""
        self._inbox.put(_Abort(request_id))

    async def shutdown(self, grace_s: float) -> None:
        """Takes no more requests, lets running ones finish for ``grace_s``, aborts the rest.

        Returns when the thread has ended. Called again, a shorter grace takes over.
        """
        with self._gate:
            self._draining = True
        self._inbox.put(_Stop(self._clock() + grace_s))
        # Shielded: who gives up waiting must not cancel what others wait for.
        await asyncio.shield(asyncio.wrap_future(self._finished))
        self._thread.join()

    @property
    def max_requests(self) -> int:
        """The most requests that may run and wait together."""
        return self._max_requests

    @property
    def num_open(self) -> int:
        """Requests running and waiting together."""
        return self._open

    @property
    def alive(self) -> bool:
        """True while the thread runs and its last turn is not longer than ``stall_s`` ago.

        A thread that has told its streams why it ends is dead, whether or not it is gone yet.
        """
        running = self._error is None and self._thread.is_alive()
        return running and self.seconds_since_tick < self._stall_s

    @property
    def accepting(self) -> bool:
        """True when a new request would be looked at."""
        return self.alive and not self._draining

    @property
    def seconds_since_tick(self) -> float:
        """Age of the engine thread's last turn."""
        return self._clock() - self._last_tick

    @property
    def error(self) -> BaseException | None:
        """What ended the thread, if not ``shutdown``."""
        return self._error

    def stats(self) -> EngineStats:
        """The engine's totals after its last turn."""
        return self._stats

    # What the engine thread does.

    def _run(self) -> None:
        try:
            while self._clock() < self._deadline:
                busy = self._engine.has_unfinished_requests()
                if not busy and self._deadline != float("inf"):
                    break
                self._drain_inbox(block=not busy)
                if self._engine.has_unfinished_requests():
                    self._turn()
                self._last_tick = self._clock()
            unfinished = list(self._streams)
            self._end(None)
            for request_id in unfinished:
                self._engine.abort_request(request_id)
            while self._engine.has_unfinished_requests():
                self._turn()
        except BaseException as error:  # whatever it was, nobody else will say so
            self._end(error)
            self._on_death(error)
        finally:
            self._finished.set_result(None)

    def _turn(self) -> None:
        posts: list[tuple[RequestStream, Item]] = []
        ended: list[RequestUpdate] = []
        for update in self._engine.step():
            stream = self._streams.get(update.request_id)
            if stream is not None:  # None: nobody reads any more
                posts.append((stream, update))
            if update.finish_reason is not None:
                ended.append(update)
                self._forget(update.request_id)
        # Before the answers go out: who has one finds it counted.
        self._stats = self._engine.stats()
        self._on_step(self._stats, ended)
        self._post(posts)
        if not self._engine.has_unfinished_requests():
            self._engine.audit()

    def _drain_inbox(self, *, block: bool) -> None:
        posts: list[tuple[RequestStream, Item]] = []
        changed = False
        with contextlib.suppress(queue.Empty):
            message = self._inbox.get(timeout=_IDLE_TICK_S) if block else self._inbox.get_nowait()
            while True:
                changed = True
                if isinstance(message, _Add):
                    posts.append((message.stream, self._add(message)))
                elif isinstance(message, _Abort):
                    self._engine.abort_request(message.request_id)
                    self._forget(message.request_id)
                else:
                    self._deadline = min(self._deadline, message.deadline)
                message = self._inbox.get_nowait()
        self._post(posts)
        if changed:
            self._stats = self._engine.stats()

    def _add(self, message: _Add) -> Item:
        request_id = message.stream.request_id
        self._streams[request_id] = message.stream
        try:
            self._engine.add_request(request_id, message.prompt_token_ids, message.params)
        except RequestRefused as refusal:
            self._forget(request_id)
            return refusal
        return Accepted()

    def _forget(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            with self._gate:
                self._open -= 1

    def _post(self, posts: list[tuple[RequestStream, Item]]) -> None:
        """Hands items over with one call per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, Item]]]
        by_loop = defaultdict(list)
        for stream, item in posts:
            by_loop[stream.loop].append((stream, item))
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:  # the loop is closed: nobody is left to read
                for stream, _ in items:
                    self._engine.abort_request(stream.request_id)
                    self._forget(stream.request_id)

    def _end(self, error: BaseException | None) -> None:
        """Tells every stream, also those still in the inbox, why no more will come."""
        with self._gate:
            self._draining = True
            self._error = error
        reason = NotReady("the server is stopping") if error is None else _dead(error)
        posts: list[tuple[RequestStream, Item]] = []
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._inbox.get_nowait()
                if isinstance(message, _Add):
                    posts.append((message.stream, reason))
        posts += [(stream, reason) for stream in self._streams.values()]
        self._streams.clear()
        self._post(posts)


def _deliver(items: list[tuple[RequestStream, Item]]) -> None:
    for stream, item in items:
        stream.put(item)


def _dead(cause: BaseException) -> EngineDead:
    if isinstance(cause, EngineDead):
        return cause
    error = EngineDead(f"the engine ended: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
