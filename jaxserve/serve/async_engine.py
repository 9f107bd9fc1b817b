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
from typing import Any, TypeVar

from jaxserve.config import SamplingParams
from jaxserve.errors import EngineDead, NotReady, QueueFull, RequestRefused, RequestTimeout
from jaxserve.sched.outputs import EngineStats, RequestUpdate
from jaxserve.sched.request import TokenMask
from jaxserve.serve.inbox import (
    Abort,
    Add,
    Call,
    Engine,
    EngineOptions,
    Message,
    PauseMode,
    Stop,
)
from jaxserve.serve.streams import Accepted, Item, RequestStream

T = TypeVar("T")

_IDLE_TICK_S = 0.5


class AsyncEngine:
    """Owns the engine and the thread that steps it.

    Coroutines talk to the thread through one inbox; the thread answers with one call into each
    event loop a step, whatever the number of requests.

    ``max_requests`` bounds the requests running and waiting together. ``on_step`` is told the
    engine's totals and the requests that ended with each step, ``on_death`` what ended the thread;
    both are called on the engine thread. ``stall_s``: a step that takes longer is no life sign.
    ``request_timeout_s`` is what a request may take from its arrival to its last token.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_requests: int,
        on_step: Callable[[EngineStats, list[RequestUpdate]], None] = lambda stats, ended: None,
        on_death: Callable[[BaseException], None] = lambda error: None,
        stall_s: float = 120.0,
        request_timeout_s: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._max_requests = max_requests
        self._on_step = on_step
        self._on_death = on_death
        self._stall_s = stall_s
        self._request_timeout_s = request_timeout_s
        self._clock = clock
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # The engine thread's alone: what is asked, oldest first; what waits for a resume; whether
        # it waits, whether steps wait too, and who waits for the last running request.
        self._asked: dict[str, Add] = {}
        self._held: dict[str, Add] = {}
        self._paused = self._frozen = False
        self._idle: concurrent.futures.Future[None] | None = None
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
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        mask: TokenMask | None = None,
        cache_salt: str = "",
        group: str | None = None,
    ) -> RequestStream:
        """Hands a request to the engine and returns its updates once the engine took it.

        ``request_id`` must be new; the options are the engine's. Raises what Engine.add_request
        raises, QueueFull, NotReady while stopping or asleep, RequestTimeout, EngineDead.
        """
        stream = RequestStream(request_id, self.abort)
        with self._gate:
            self._check_room()
            self._open += 1
            deadline = self._clock() + self._request_timeout_s
            options = EngineOptions(mask=mask, cache_salt=cache_salt, group=group)
            self._inbox.put(Add(stream, prompt_token_ids, params, options, deadline))
        try:
            await stream.accepted()
        except asyncio.CancelledError:
            stream.close()
            raise
        return stream

    def check_room(self) -> None:
        """Raises what ``add_request`` would raise of any request now: a full server reads none."""
        with self._gate:
            self._check_room()

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is. An unknown one is ignored."""
        self._inbox.put(Abort(request_id))

    async def call(self, function: Callable[[Any], T]) -> T:
        """What ``function(engine)`` returns, run on the engine thread between two steps.

        What it raises is raised here and costs the engine nothing. A caller that gives up before
        its turn leaves it unrun. Raises NotReady while stopping, EngineDead.
        """
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run(engine: Engine) -> T:
            try:
                return function(engine)
            finally:
                self._stats = engine.stats()  # who has the result finds the engine as it left it

        with self._gate:
            self._check_open()
            self._inbox.put(Call(run, result))
        return await asyncio.wrap_future(result)

    async def pause(self, mode: PauseMode) -> None:
        """Lets no request be taken or run until ``resume``; new ones wait.

        "abort" ends what runs, "wait" lets it finish, "keep" freezes it as it is. Returns when
        nothing runs any more.
        """
        idle = await self.call(lambda engine: self._pause(mode))
        await asyncio.wrap_future(idle)

    async def resume(self) -> None:
        """Goes on after ``pause``: what was frozen first, then what has waited."""
        await self.call(lambda engine: self._resume())

    async def shutdown(self, grace_s: float) -> None:
        """Takes no more requests, lets running ones finish for ``grace_s``, aborts the rest.

        Returns when the thread has ended. Called again, a shorter grace takes over.
        """
        with self._gate:
            self._draining = True
        self._inbox.put(Stop(self._clock() + grace_s))
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
    def paused(self) -> bool:
        """True from ``pause`` to ``resume``."""
        return self._paused

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

    def _check_open(self) -> None:
        if self._error is not None:
            raise _dead(self._error)
        if self._draining:
            raise NotReady("the server is stopping")

    def _check_room(self) -> None:
        self._check_open()
        self._check_awake()
        if self._open >= self._max_requests:
            raise QueueFull(
                f"{self._open} requests are running or waiting, of at most "
                f"{self._max_requests} (--max-num-seqs + --max-queued-requests)"
            )

    def _check_awake(self) -> None:
        # What would wait for a wake-up that may never come is better sent to another server.
        if self._stats.asleep:
            raise NotReady("the server sleeps and takes no requests: wake it with POST /wake_up")

    # What the engine thread does.

    def _run(self) -> None:
        try:
            while self._clock() < self._deadline:
                if self._deadline != float("inf") and not self._engine.has_unfinished_requests():
                    break
                if not self._steps:
                    self._tell_idle()
                self._drain_inbox(block=not self._steps)
                self._expire()
                if self._steps:
                    self._turn()
                self._last_tick = self._clock()
            unfinished = list(self._asked)
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

    @property
    def _steps(self) -> bool:
        """Whether the next turn is a step."""
        return not self._frozen and self._engine.has_unfinished_requests()

    def _turn(self) -> None:
        posts: list[tuple[RequestStream, Item]] = []
        ended: list[RequestUpdate] = []
        for update in self._engine.step():
            asked = self._asked.get(update.request_id)
            if asked is not None:  # None: nobody reads any more
                posts.append((asked.stream, update))
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
                if isinstance(message, Add):
                    self._asked[message.stream.request_id] = message
                    if self._paused:
                        self._held[message.stream.request_id] = message
                    else:
                        posts.append((message.stream, self._add(message)))
                elif isinstance(message, Abort):
                    self._drop(message.request_id)
                elif isinstance(message, Call):
                    message.run(self._engine)
                else:
                    self._deadline = min(self._deadline, message.deadline)
                    self._resume()  # what is frozen may finish in the grace
                message = self._inbox.get_nowait()
        self._post(posts)
        if changed:
            self._stats = self._engine.stats()

    def _add(self, message: Add) -> Item:
        request_id = message.stream.request_id
        try:
            self._check_awake()
            self._engine.add_request(
                request_id, message.prompt_token_ids, message.params, **message.options
            )
        except RequestRefused as refusal:
            self._forget(request_id)
            return refusal
        return Accepted()

    def _drop(self, request_id: str) -> None:
        """Ends a request wherever it is, without a word to its stream."""
        self._held.pop(request_id, None)
        self._engine.abort_request(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        if self._asked.pop(request_id, None) is not None:
            with self._gate:
                self._open -= 1

    def _expire(self) -> None:
        """Ends the requests that have taken too long. They share one limit: the oldest is first."""
        posts: list[tuple[RequestStream, Item]] = []
        now = self._clock()
        while self._asked and (asked := next(iter(self._asked.values()))).deadline <= now:
            self._drop(asked.stream.request_id)
            limit = f"{self._request_timeout_s:g} s (--request-timeout)"
            posts.append((asked.stream, RequestTimeout(f"the request took longer than {limit}")))
        if posts:
            self._stats = self._engine.stats()
            self._post(posts)

    def _pause(self, mode: PauseMode) -> concurrent.futures.Future[None]:
        self._paused, self._frozen = True, mode == "keep"
        if mode == "abort":
            for request_id in self._asked.keys() - self._held.keys():
                self._engine.abort_request(request_id)  # a step reports it to the stream
        self._tell_idle()  # whoever waited for an earlier pause
        self._idle = concurrent.futures.Future()
        return self._idle

    def _resume(self) -> None:
        self._tell_idle()
        self._paused = self._frozen = False
        held, self._held = self._held, {}
        self._post([(message.stream, self._add(message)) for message in held.values()])

    def _tell_idle(self) -> None:
        idle, self._idle = self._idle, None
        if idle is not None and idle.set_running_or_notify_cancel():
            idle.set_result(None)

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
                    self._drop(stream.request_id)

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
                if isinstance(message, Add):
                    posts.append((message.stream, reason))
                elif isinstance(message, Call) and message.result.set_running_or_notify_cancel():
                    message.result.set_exception(reason)
        posts += [(asked.stream, reason) for asked in self._asked.values()]
        self._asked.clear()
        self._tell_idle()
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
