"""The host loop: schedule, dispatch the next iteration, then read back and commit the last one."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from jaxserve.config import EngineConfig, ModelConfig, SamplingParams
from jaxserve.errors import EngineDead, InvalidRequest, NotReady, RequestRefused
from jaxserve.plan.buckets import DecodeBuckets, DecodeShape, PrefillBuckets
from jaxserve.plan.gates import check_switches
from jaxserve.runtime.admission import Admission
from jaxserve.runtime.dispatch import Dispatcher
from jaxserve.runtime.flight import Flight, ModelRunner
from jaxserve.runtime.residency import OnSleep, OnUpdate, Residency
from jaxserve.runtime.stats import Totals
from jaxserve.sched.audit import audit_scheduler
from jaxserve.sched.outputs import EngineStats, FinishReason, RequestUpdate, TokenLogprobs
from jaxserve.sched.request import Request, TokenMask
from jaxserve.sched.scheduler import Schedule, Scheduler


class Engine:
    """Requests in, tokens out. One thread calls it.

    A step dispatches iteration i + 1 before it reads the tokens of iteration i, so a request that
    stops at i has one more token in flight, which is dropped.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        runner: ModelRunner,
        *,
        num_blocks: int,
        decode_buckets: DecodeBuckets,
        prefill_buckets: PrefillBuckets,
        decode_shape: Callable[[int, int], DecodeShape] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``decode_shape(rows, width)`` chooses a decode's shape; by default the bucket's.

        Raises ConfigError for two of the three switches in ``config``.
        """
        check_switches(
            bucket_decode=config.bucket_decode,
            persist_inputs=config.persist_inputs,
            capture_decode=config.capture_decode,
        )
        self._tile = decode_buckets.tile
        self._clock = clock
        self._scheduler = Scheduler(config, num_blocks)
        self._residency = Residency(runner, self._scheduler, hold=self._hold, fatal=self._fatal)
        self._admission = Admission(model, config)
        self._dispatcher = Dispatcher(
            runner,
            config,
            model.vocab_size,
            decode_shape=decode_shape or decode_buckets.shape_for,
            prefill_buckets=prefill_buckets,
        )
        self._totals = Totals()
        self._num_arrivals = 0
        self._live: set[str] = set()
        self._ruled: set[str] = set()  # those whose draws are limited, and those that want scores:
        self._scored: set[str] = set()  # while nobody does, an iteration looks at no row for it
        self._ended: list[RequestUpdate] = []  # outside a commit
        self._flight: Flight | None = None
        self._read_at: float | None = None  # when the iteration before was read; None: idle
        self._fault: BaseException | None = None

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        mask: TokenMask | None = None,
        cache_salt: str = "",
        group: str | None = None,
        continuation: Sequence[int] = (),
    ) -> None:
        """Queue a request. Raises InvalidRequest, which leaves the engine as it was.

        ``mask`` bans tokens as the answer grows. ``params.n`` is the caller's to act on.
        Only requests of equal ``cache_salt`` share cached blocks. Requests of one ``group``, the
        choices of one answer, share their prompt's blocks even where prefix caching is off. The
        first draws give the tokens of ``continuation`` whatever the model says; their log
        probabilities are the model's.
        """
        self._check_alive()
        if self._residency.asleep == "refuse":
            raise NotReady("the engine sleeps and takes no requests")
        if request_id in self._live:
            raise InvalidRequest(f"request id {request_id} is in use", "request_id")
        request = self._admission.admit(
            request_id,
            prompt_token_ids,
            params,
            mask=mask,
            cache_salt=cache_salt,
            group=group,
            continuation=continuation,
            arrival=self._num_arrivals,
            now=self._clock(),
        )
        self._scheduler.add(request)
        self._live.add(request_id)
        if request.rules is not None or request.forced:
            self._ruled.add(request_id)
        if params.logprobs is not None:
            self._scored.add(request_id)
        self._num_arrivals += 1

    def abort_request(self, request_id: str) -> None:
        """End a request now; the next step reports it. Ids that are not running are ignored."""
        self._check_alive()
        request = self._scheduler.find(request_id)
        if request is not None:
            self._ended.append(self._finish(request, "abort", (), self._clock()))

    def step(self) -> list[RequestUpdate]:
        """Dispatch the next iteration, commit the one before, and return what changed.

        Raises EngineDead when the runner fails, then and from then on.
        """
        self._check_alive()
        if self._residency.asleep is not None:
            updates, self._ended = self._ended, []
            return updates
        try:
            dispatched = self._dispatch(self._scheduler.schedule(self._clock()))
            updates = self._commit(self._flight)
        except BaseException as fault:
            # Also when interrupted: tokens of a half committed iteration are lost.
            self._fault = fault
            if not isinstance(fault, Exception):
                raise
            raise EngineDead(f"a step failed: {fault!r}") from fault
        self._flight = dispatched
        updates, self._ended = self._ended + updates, []
        return updates

    def has_unfinished_requests(self) -> bool:
        """True while a step has something to run, to read back or to report."""
        awake = self._residency.asleep is None
        return bool(self._ended or (awake and (self._scheduler or self._flight)))

    @property
    def weight_version(self) -> int:
        """Which weights compute what is scheduled next, counted from 0."""
        return self._residency.weight_version

    def reset_prefix_cache(self) -> None:
        """Share nothing that is computed so far; requests that run go on with what they hold."""
        self._scheduler.reset_prefix_cache()

    def update_params(
        self, tree: Any, *, version: int | None = None, requests: OnUpdate = "keep"
    ) -> int:
        """Compute all that is dispatched from now on with other weights; returns their version.

        ``tree``: see ``fitting_weights`` of runtime/weights.py. ``version`` must be above that in
        use (None: one more). ``requests`` that run "keep" what they have computed, are "recompute"d
        from their first token, or "abort". No cached block of older weights is shared from now on.
        Raises InvalidWeights, which leaves the engine as it was, and NotReady while it sleeps.
        """
        self._check_alive()
        return self._residency.update_params(tree, version, requests)

    def sleep(self, *, level: Literal[1, 2] = 1, requests: OnSleep = "keep") -> None:
        """Give the device's memory back: the pool, and at ``level`` 2 the weights too.

        ``requests`` that run are "keep"t, to be computed again after ``wake``, with those that come
        meanwhile; or "refuse"d: an engine that has any does not sleep, and takes none while it
        does. Raises NotReady then.
        """
        self._check_alive()
        unfinished = self.has_unfinished_requests()
        self._residency.sleep(level, requests, unfinished=unfinished)

    def wake(self) -> None:
        """Take the memory again and go on. Raises NotReady unless it sleeps."""
        self._check_alive()
        self._residency.wake()

    def _hold(self, requests: OnUpdate) -> None:
        """Leave the running requests as they are, or take them off the device."""
        if requests == "keep":
            return
        self._ended += self._commit(self._flight)
        self._flight = None
        if requests == "abort":
            for request_id in tuple(self._live):
                self.abort_request(request_id)
        else:
            self._scheduler.preempt_all()

    @contextlib.contextmanager
    def _fatal(self, what: str) -> Iterator[None]:
        """Nothing is whole after a failure inside, refusals excepted."""
        try:
            yield
        except RequestRefused:
            raise
        except BaseException as fault:
            self._fault = fault
            raise EngineDead(f"{what} failed: {fault!r}") from fault

    def audit(self) -> None:
        """Raise AuditFailed unless pool, rows, requests and tokens in flight balance."""
        in_flight: Counter[str] = Counter()
        if self._flight is not None:
            drawing = self._flight.schedule.drawing
            in_flight.update(r.request_id for r in drawing if r.finish_reason is None)
        audit_scheduler(self._scheduler, self._live, in_flight)

    def stats(self) -> EngineStats:
        """Gauges and totals as they stand."""
        stats = self._totals.snapshot(self._scheduler)
        return stats if self._residency.asleep is None else replace(stats, asleep=True)

    def _check_alive(self) -> None:
        if self._fault is not None:
            raise EngineDead(f"the engine stopped: {self._fault!r}") from self._fault

    def _dispatch(self, schedule: Schedule | None) -> Flight | None:
        if schedule is None:
            return None
        flight, failed = self._dispatcher.dispatch(
            schedule, ruled=bool(self._ruled), weight_version=self.weight_version
        )
        self._totals.count_iteration(schedule, flight.shape, self._tile)
        now = self._clock() if failed else 0.0
        for request, error in failed:
            self._ended.append(self._finish(request, "error", (), now, error=_why(error)))
        return flight

    def _commit(self, flight: Flight | None) -> list[RequestUpdate]:
        if flight is None:
            self._read_at = None
            return []
        scores: dict[Request, TokenLogprobs] = {}
        drawn = flight.read_draws(scores if self._scored else None)
        flight.read_prompts()
        now = self._clock()
        if self._read_at is not None and flight.shape is not None and flight.prefill is None:
            self._totals.count_decode_step(flight.shape.rows, now - self._read_at)
        self._read_at = now
        updates = []
        for request, token in drawn:
            if request.finish_reason is not None:  # it ended meanwhile
                continue
            if request.num_silent > len(request.output_token_ids):  # it was told before
                request.commit(token, now)
                continue
            score = scores.get(request) if scores else None
            updates.append(self._commit_token(request, token, score, now, flight.weight_version))
        return updates

    def _commit_token(
        self,
        request: Request,
        token_id: int,
        scores: TokenLogprobs | None,
        now: float,
        weight_version: int,
    ) -> RequestUpdate:
        if not request.max_output_tokens:  # the prompt alone was wanted
            request.num_in_flight -= 1
            return self._finish(request, "length", (), now, weight_version=weight_version)
        self._totals.generation_tokens += 1
        reason, error = request.commit(token_id, now), None
        if reason is None and request.rules is not None:
            try:
                reason = "stop" if request.rules.accept(token_id) else None
            except Exception as fault:  # a grammar raises anything; the other requests go on
                reason, error = "error", _why(fault)
        logprobs = None if scores is None else (scores,)
        if reason is not None:
            return self._finish(
                request,
                reason,
                (token_id,),
                now,
                logprobs=logprobs,
                error=error,
                weight_version=weight_version,
            )
        return RequestUpdate(
            request.request_id,
            (token_id,),
            None,
            None,
            len(request.prompt_token_ids),
            len(request.output_token_ids),
            None,
            logprobs,
            request.take_prompt_logprobs() if request.prompt_logprobs else None,
            request.num_cached_tokens,
            None,
            weight_version,
        )

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        new_token_ids: tuple[int, ...],
        now: float,
        *,
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        error: str | None = None,
        weight_version: int | None = None,
    ) -> RequestUpdate:
        self._scheduler.finish(request, reason)
        self._live.remove(request.request_id)
        self._ruled.discard(request.request_id)
        self._scored.discard(request.request_id)
        stopped = reason == "stop" and new_token_ids[-1] in request.stop_token_ids
        return RequestUpdate(
            request_id=request.request_id,
            new_token_ids=new_token_ids,
            finish_reason=reason,
            stop_token_id=new_token_ids[-1] if stopped else None,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=len(request.output_token_ids),
            timings=request.timings(now),
            logprobs=logprobs,
            prompt_logprobs=request.take_prompt_logprobs(),
            num_cached_tokens=request.num_cached_tokens,
            error=error,
            weight_version=self.weight_version if weight_version is None else weight_version,
        )


def _why(error: Exception) -> str:
    return str(error) or repr(error)
