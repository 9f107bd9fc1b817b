"""Who runs in the next iteration: admission, token budget, blocks and preemption."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineError, InvalidRequest
from jaxserve.sched.blocks import BlockPool
from jaxserve.sched.outputs import FinishReason
from jaxserve.sched.prefix import PrefixCache
from jaxserve.sched.request import Request, RequestState
from jaxserve.sched.rows import RowTable


class Chunk(NamedTuple):
    """Tokens ``start`` to ``end`` - 1 of a request, computed by one prefill segment.

    ``block_ids`` are the request's blocks up to ``end``. ``samples``: the chunk ends what is known
    of the request, so the token drawn counts. ``row``: the decode row the request moves into, None
    when it does not.
    """

    request: Request
    start: int
    end: int
    block_ids: tuple[int, ...]
    samples: bool
    row: int | None


@dataclass(frozen=True, slots=True)
class Schedule:
    """One iteration of the device, in its order: permutation, decode, prefill.

    ``decode[b]`` is the request in row b, None where it sits out; ``num_decoding`` do not.
    ``new_blocks`` lists (row, block) where this token opens a block. ``width`` counts the tokens of
    the longest row that decodes, the new one included.
    """

    permutation: list[int] | None
    decode: list[Request | None]
    num_decoding: int
    new_blocks: list[tuple[int, int]]
    width: int
    chunks: list[Chunk]

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the chunks."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens this iteration computes."""
        return self.num_decoding + self.num_prefill_tokens

    @property
    def drawing(self) -> list[Request]:
        """Requests that draw a token which counts."""
        decoding = [request for request in self.decode if request is not None]
        return decoding + [chunk.request for chunk in self.chunks if chunk.samples]


class Scheduler:
    """Continuous batching, first come first served.

    ``running`` holds requests with blocks, oldest first, and everything that waits is younger: a
    preemption takes the youngest and puts it back at the head of the queue, and nothing overtakes
    the head. So the oldest request always gets on, and every request becomes the oldest.
    """

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        caching = config.enable_prefix_caching
        self.pool = BlockPool(num_blocks, config.block_size, keep_unused=caching)
        self.prefix_cache = PrefixCache(
            self.pool, enabled=caching, prompts_only=config.deterministic
        )
        self._replays = config.deterministic
        self.rows = RowTable(config.max_num_seqs)
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: OrderedDict[str, Request] = OrderedDict()
        self.draining: dict[str, Request] = {}
        self.num_preemptions = 0
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._watermark_blocks = int(config.watermark * self.pool.num_usable)

    def __len__(self) -> int:
        """Requests that are not finished."""
        return len(self.waiting) + len(self.running) + len(self.draining)

    def find(self, request_id: str) -> Request | None:
        """The unfinished request of that id."""
        for place in (self.running, self.waiting, self.draining):
            if request_id in place:
                return place[request_id]
        return None

    def add(self, request: Request) -> None:
        """Queue a request; raises InvalidRequest when the whole pool could not hold it."""
        prompt = len(request.prompt_token_ids)
        # The last token is never fed, so it needs no place.
        needed = self.pool.blocks_for(prompt + max(request.max_output_tokens - 1, 0))
        usable = self.pool.num_usable
        if needed > usable:
            raise InvalidRequest(
                f"a prompt of {prompt} tokens with {request.max_output_tokens} to generate needs "
                f"{needed} KV blocks of {self.pool.block_size} tokens, the pool has {usable}; "
                "lower max_tokens, shorten the prompt or raise --num-gpu-blocks-override"
            )
        self.waiting[request.request_id] = request

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request wherever it stands and give back what it holds.

        Steps that read its blocks are already dispatched, so whoever gets them writes later.
        """
        request.finish(reason)
        self._release(request)
        for place in (self.running, self.waiting, self.draining):
            if place.pop(request.request_id, None) is not None:
                return

    def reset_prefix_cache(self, weight_version: int | None = None) -> None:
        """Share nothing that is computed so far; see PrefixCache.reset."""
        unfinished = (*self.running.values(), *self.waiting.values(), *self.draining.values())
        self.prefix_cache.reset(unfinished, weight_version)

    def schedule(self, now: float) -> Schedule | None:
        """Decide the next iteration and advance the books past it; None when nothing can run.

        Tokens of the iteration in flight need not be known. ``now``: seconds of the engine's clock.
        """
        budget = self._max_num_batched_tokens - self.rows.num_active
        num_preemptions = self.num_preemptions
        num_decoding = 0
        prefilling: list[tuple[Request, int]] = []
        for request in tuple(self.running.values()):
            if request.state is RequestState.DECODING:
                if request.rules is not None and request.waits_for_token:
                    continue
                num_decoding += 1
                if request.num_computed == len(request.block_ids) * self.pool.block_size:
                    self.prefix_cache.register(request, request.num_computed)
                    num_decoding -= not self._grow(request, request.num_computed + 1)
            elif request.state is RequestState.PREFILLING:
                # Only the youngest can be here: a prompt is cut when the budget ends at it.
                count = min(request.num_tokens - request.num_computed, budget)
                if self._grow(request, request.num_computed + count):
                    self.prefix_cache.register(request, request.num_computed + count)
                    prefilling.append((request, count))
                    budget -= count
            else:  # preempted by an older one, and so is everything younger
                break
        if self.num_preemptions == num_preemptions:
            self._admit(budget, prefilling, now)
        if not num_decoding and not prefilling:
            return None
        return self._advance(prefilling, num_decoding)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Give ``request`` blocks for ``num_tokens`` tokens, preempting from the youngest on.

        False when the request itself had to go.
        """
        missing = self.pool.blocks_for(num_tokens) - len(request.block_ids)
        while missing > self.pool.num_free:
            if self._preempt_youngest() is request:
                return False
        request.block_ids += self.pool.allocate(missing)
        return True

    def preempt_all(self) -> None:
        """Put everything that runs back in the queue, to be computed again.

        Tokens in flight must have been read back.
        """
        while self.running:
            self._preempt(self.running.popitem()[1])

    def _preempt_youngest(self) -> Request:
        if len(self.running) == 1:
            (request,) = self.running.values()
            raise EngineError(
                f"request {request.request_id} runs alone and finds no block: it holds "
                f"{len(request.block_ids)}, {self.pool.num_free} of {self.pool.num_usable} are free"
            )
        return self._preempt(self.running.popitem()[1])

    def _preempt(self, request: Request) -> Request:
        request.move_to(RequestState.PREEMPTED)
        self._release(request)
        request.num_computed = 0
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)
        self.num_preemptions += 1
        return request

    def _release(self, request: Request) -> None:
        self.prefix_cache.release(request)
        if request.row is not None:
            self.rows.vacate(request)

    def _admit(self, budget: int, prefilling: list[tuple[Request, int]], now: float) -> None:
        """Admit from the queue's head while row, budget and pool allow; extends ``prefilling``.

        Everything known of a request must fit what is free, so that a long prompt is not begun
        only to be preempted. Budget left over means that every prompt begun ends in this
        iteration, so nobody else has a claim on those free blocks.
        """
        while self.waiting and budget and len(self.running) < self._max_num_seqs:
            request = next(iter(self.waiting.values()))
            if self._replays and request.output_token_ids:
                request.begin_replay()
            shared = self.prefix_cache.match(request)
            # Shared blocks that nobody uses stop being free as well.
            needed = self.pool.blocks_for(request.num_tokens) - len(shared)
            free_after = self.pool.num_free - self.pool.num_unused(shared) - needed
            if self.running and free_after < self._watermark_blocks:
                return
            del self.waiting[request.request_id]
            self.running[request.request_id] = request
            request.move_to(RequestState.PREFILLING)
            self.prefix_cache.take(request, shared)
            if request.first_scheduled_at is None:
                request.first_scheduled_at = now
            count = min(request.num_tokens - request.num_computed, budget)
            end = request.num_computed + count
            request.block_ids += self.pool.allocate(self.pool.blocks_for(end) - len(shared))
            # The next in the queue may share what this very iteration computes.
            self.prefix_cache.register(request, end)
            prefilling.append((request, count))
            budget -= count

    def _advance(self, prefilling: list[tuple[Request, int]], num_decoding: int) -> Schedule:
        """Write the iteration down and move every request's books past it.

        ``num_decoding`` rows draw a token; where those are not all, the others sit out.
        """
        permutation = self.rows.compact()
        decode: list[Request | None] = [*self.rows.active()]
        if num_decoding < len(decode):
            decode = [r if r is not None and not r.waits_for_token else None for r in decode]
        new_blocks: list[tuple[int, int]] = []
        width = 0
        ended: list[Request] = []
        for row, request in enumerate(decode):
            if request is None:
                continue
            if request.num_computed % self.pool.block_size == 0:
                new_blocks.append((row, request.block_ids[-1]))
            request.num_computed += 1
            request.num_in_flight += 1
            if request.num_computed > width:
                width = request.num_computed
            if not request.num_output_left:
                ended.append(request)
        chunks = [self._advance_chunk(request, count, ended) for request, count in prefilling]
        for request in ended:
            request.move_to(RequestState.DRAINING)
            self._release(request)
            del self.running[request.request_id]
            self.draining[request.request_id] = request
        return Schedule(permutation, decode, num_decoding, new_blocks, width, chunks)

    def _advance_chunk(self, request: Request, count: int, ended: list[Request]) -> Chunk:
        start = request.num_computed
        end = request.num_computed = start + count
        samples = end == request.num_tokens
        row = None
        if samples:
            request.num_in_flight += 1
            if request.num_output_left:
                request.move_to(RequestState.DECODING)
            else:
                ended.append(request)
            # Counts are kept by row, so a draw that needs them takes one even if it is the last.
            if request.num_output_left or request.penalised:
                row = self.rows.append(request)
        return Chunk(request, start, end, tuple(request.block_ids), samples, row)
