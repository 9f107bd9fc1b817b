"""The host loop: schedule, dispatch the next iteration, then read back and commit the last one."""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxserve.config import EngineConfig, ModelConfig, SamplingParams
from jaxserve.errors import EngineDead, InvalidRequest
from jaxserve.plan.batch import PrefillBatch, Scores
from jaxserve.plan.buckets import DecodeBuckets, DecodeShape, PrefillBuckets
from jaxserve.plan.gates import check_switches
from jaxserve.runtime.stats import Totals
from jaxserve.sched.audit import audit_scheduler
from jaxserve.sched.masks import build_rules, pack_masks
from jaxserve.sched.outputs import EngineStats, FinishReason, RequestUpdate, TokenLogprobs
from jaxserve.sched.pack import pack_counts, pack_new_blocks, pack_permutation, pack_prefill
from jaxserve.sched.request import Request, TokenMask, seed_key
from jaxserve.sched.scheduler import Chunk, Schedule, Scheduler
from jaxserve.sched.scores import collect_prompt_logprobs, token_logprobs


class Pending(Protocol):
    """What a dispatched step drew; reading blocks until the device is done."""

    def read(self) -> np.ndarray:
        """int32 tokens, one a row or segment."""
        ...

    def read_scores(self) -> Scores:
        """Their scores, zeros where nobody asked."""
        ...

    def read_prompt_scores(self) -> Scores:
        """The scores of a prefill's targets, one a token of the batch."""
        ...


class ModelRunner(Protocol):
    """The device: calls return once dispatched, and the device keeps their order."""

    def permute_rows(self, sources_B: np.ndarray) -> None:
        """Row b takes the state of row sources_B[b]; -1 empties it."""
        ...

    def write_counts(self, row: int, counts_V: np.ndarray) -> None:
        """Replace the token counts of a row, before the prefill that seats a request there."""
        ...

    def decode(
        self, shape: DecodeShape, new_blocks_B: np.ndarray, mask_BW: np.ndarray | None
    ) -> Pending:
        """One token for each of the first ``shape.rows`` rows."""
        ...

    def prefill(self, batch: PrefillBatch) -> Pending:
        """One chunk of packed prompts; a token a segment."""
        ...


@dataclass(frozen=True, slots=True)
class _Flight:
    """A dispatched iteration that is not read back."""

    schedule: Schedule
    shape: DecodeShape | None
    decode: Pending | None
    prefill: Pending | None


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
        self._model = model
        self._config = config
        self._runner = runner
        self._decode_shape = decode_shape or decode_buckets.shape_for
        self._tile = decode_buckets.tile
        self._prefill_buckets = prefill_buckets
        self._clock = clock
        self._scheduler = Scheduler(config, num_blocks)
        self._eos = frozenset(model.eos_token_ids)
        self._totals = Totals()
        self._num_arrivals = 0
        self._live: set[str] = set()
        self._ruled: set[str] = set()  # those whose draws are limited, and those that want scores:
        self._scored: set[str] = set()  # while nobody does, an iteration looks at no row for it
        self._ended: list[RequestUpdate] = []  # outside a commit
        self._flight: _Flight | None = None
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
    ) -> None:
        """Queue a request. Raises InvalidRequest, which leaves the engine as it was.

        ``mask`` bans tokens as the answer grows. ``params.n`` is the caller's to act on.
        Only requests of equal ``cache_salt`` share cached blocks. Requests of one ``group``, the
        choices of one answer, share their prompt's blocks even where prefix caching is off.
        """
        self._check_alive()
        if request_id in self._live:
            raise InvalidRequest(f"request id {request_id} is in use", "request_id")
        prompt = [operator.index(token) for token in prompt_token_ids]
        self._check_prompt(prompt, alone=params.max_tokens == 0)
        room = self._config.max_model_len - len(prompt)
        eos = frozenset() if params.ignore_eos else self._eos
        ending = eos.union(params.stop_token_ids) if params.stop_token_ids else eos
        arrival = self._num_arrivals
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=params,
            max_output_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=ending,
            key=seed_key(params.seed, self._config.seed, arrival),
            arrival=arrival,
            arrived_at=self._clock(),
            cache_salt=cache_salt,
            group=group,
            rules=build_rules(params, ending, self._model.vocab_size, mask),
        )
        self._scheduler.add(request)
        self._live.add(request_id)
        if request.rules is not None:
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
        return bool(len(self._scheduler) or self._flight or self._ended)

    @property
    def weight_version(self) -> int:
        """Which weights compute what is scheduled next, counted from 0."""
        return self._scheduler.prefix_cache.weight_version

    def reset_prefix_cache(self) -> None:
        """Share nothing that is computed so far; requests that run go on with what they hold."""
        self._scheduler.reset_prefix_cache()

    def audit(self) -> None:
        """Raise AuditFailed unless pool, rows, requests and tokens in flight balance."""
        in_flight: Counter[str] = Counter()
        if self._flight is not None:
            drawing = self._flight.schedule.drawing
            in_flight.update(r.request_id for r in drawing if r.finish_reason is None)
        audit_scheduler(self._scheduler, self._live, in_flight)

    def stats(self) -> EngineStats:
        """Gauges and totals as they stand."""
        return self._totals.snapshot(self._scheduler)

    def _check_alive(self) -> None:
        if self._fault is not None:
            raise EngineDead(f"the engine stopped: {self._fault!r}") from self._fault

    def _check_prompt(self, prompt: list[int], *, alone: bool) -> None:
        """``alone``: nothing is drawn after it."""
        if not prompt:
            raise InvalidRequest("the prompt has 0 tokens, it needs at least 1", "prompt")
        longest = self._config.max_model_len - (not alone)
        if len(prompt) > longest:
            room = "fit" if alone else "leave room for an answer"
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens, at most {longest} {room}; "
                "shorten it or raise --max-model-len",
                "prompt",
                "context_length_exceeded",
            )
        vocab_size = self._model.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            raise InvalidRequest(
                f"prompt token {wrong} is outside the vocabulary, 0 to {vocab_size - 1}", "prompt"
            )

    def _dispatch(self, schedule: Schedule | None) -> _Flight | None:
        if schedule is None:
            return None
        decode = prefill = shape = None
        failed: list[tuple[Request, Exception]] = []
        if schedule.permutation is not None:
            self._runner.permute_rows(pack_permutation(schedule.permutation))
        if schedule.num_decoding:
            shape = self._decode_shape(len(schedule.decode), schedule.width)
            new_blocks_B = pack_new_blocks(schedule.new_blocks, schedule.decode, shape.rows)
            drawing = ((b, r) for b, r in enumerate(schedule.decode) if r is not None)
            mask_BW = self._masks(drawing, shape.rows, failed)
            decode = self._runner.decode(shape, new_blocks_B, mask_BW)
        if schedule.chunks:
            prefill = self._dispatch_prefill(schedule, failed)
        self._totals.count_iteration(schedule, shape, self._tile)
        now = self._clock() if failed else 0.0
        for request, error in failed:
            self._ended.append(self._finish(request, "error", (), now, error=_why(error)))
        return _Flight(schedule, shape, decode, prefill)

    def _dispatch_prefill(
        self, schedule: Schedule, failed: list[tuple[Request, Exception]]
    ) -> Pending:
        chunks, vocab_size = schedule.chunks, self._model.vocab_size
        for chunk in chunks:
            if chunk.row is not None and chunk.request.penalised:
                self._runner.write_counts(chunk.row, pack_counts(chunk.request, vocab_size))
        drawing = ((s, chunk.request) for s, chunk in enumerate(chunks) if chunk.samples)
        batch = pack_prefill(
            chunks,
            tokens=self._prefill_buckets.token_bucket(schedule.num_prefill_tokens),
            max_num_seqs=self._config.max_num_seqs,
            blocks_per_row=self._config.blocks_per_row,
            block_size=self._config.block_size,
            vocab_size=vocab_size,
            mask_SW=self._masks(drawing, self._config.max_num_seqs, failed),
        )
        return self._runner.prefill(batch)

    def _masks(
        self,
        drawing: Iterable[tuple[int, Request]],
        rows: int,
        failed: list[tuple[Request, Exception]],
    ) -> np.ndarray | None:
        if not self._ruled:
            return None
        mask_XW, failures = pack_masks(drawing, rows, self._model.vocab_size)
        failed += failures
        return mask_XW

    def _commit(self, flight: _Flight | None) -> list[RequestUpdate]:
        if flight is None:
            self._read_at = None
            return []
        drawn: list[tuple[Request, int]] = []
        scores: dict[Request, TokenLogprobs] = {}
        if flight.decode is not None:
            # The rows past the requests are padding.
            rows = flight.schedule.decode
            drawn += self._read_draws(flight.decode, rows, scores)
        if flight.prefill is not None:
            chunks = flight.schedule.chunks
            rows = [chunk.request if chunk.samples else None for chunk in chunks]
            drawn += self._read_draws(flight.prefill, rows, scores)
            self._read_prompts(flight.prefill, chunks)
        now = self._clock()
        if self._read_at is not None and flight.shape is not None and flight.prefill is None:
            self._totals.count_decode_step(flight.shape.rows, now - self._read_at)
        self._read_at = now
        # What ended meanwhile has its token dropped.
        return [
            self._commit_token(request, token, scores.get(request), now)
            for request, token in drawn
            if request.finish_reason is None
        ]

    def _read_draws(
        self, pending: Pending, rows: list[Request | None], scores: dict[Request, TokenLogprobs]
    ) -> list[tuple[Request, int]]:
        """The tokens drawn by ``rows``; adds to ``scores`` where they are wanted."""
        tokens = pending.read().tolist()
        drawn = [(r, t) for r, t in zip(rows, tokens, strict=False) if r is not None]
        if self._scored and any(r.params.logprobs is not None for r, _ in drawn):
            read = pending.read_scores()
            for i, request in enumerate(rows):
                if request is not None and request.params.logprobs is not None:
                    scores[request] = token_logprobs(read, i, tokens[i], request.params.logprobs)
        return drawn

    @staticmethod
    def _read_prompts(pending: Pending, chunks: list[Chunk]) -> None:
        """Keep the log probabilities of prompts that are wanted."""
        if not any(chunk.request.scores_prompt for chunk in chunks):
            return
        read = pending.read_prompt_scores()
        start = 0
        for chunk in chunks:
            if chunk.request.scores_prompt:
                collect_prompt_logprobs(chunk, read, start)
            start += chunk.end - chunk.start

    def _commit_token(
        self, request: Request, token_id: int, scores: TokenLogprobs | None, now: float
    ) -> RequestUpdate:
        if not request.max_output_tokens:  # the prompt alone was wanted
            request.num_in_flight -= 1
            return self._finish(request, "length", (), now)
        self._totals.generation_tokens += 1
        reason, error = request.commit(token_id, now), None
        if reason is None and request.rules is not None:
            try:
                reason = "stop" if request.rules.accept(token_id) else None
            except Exception as fault:  # a grammar raises anything; the other requests go on
                reason, error = "error", _why(fault)
        logprobs = None if scores is None else (scores,)
        if reason is not None:
            return self._finish(request, reason, (token_id,), now, logprobs=logprobs, error=error)
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
        )


def _why(error: Exception) -> str:
    return str(error) or repr(error)
