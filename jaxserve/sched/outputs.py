"""What the engine tells the rooms above it: one record a request and step, one of its totals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jaxserve.plan.buckets import DecodeShape

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Where a finished request's time went, in seconds of the engine's clock.

    ``queue_s``: added to first scheduled. ``prefill_s``: first scheduled to first token.
    ``decode_s``: first token to last token. A phase that was never reached is 0.
    """

    queue_s: float
    prefill_s: float
    decode_s: float


class TokenLogprobs(NamedTuple):
    """A token's log probability, natural, its rank (1: likeliest), and the likeliest tokens.

    ``top`` is (token id, log probability), likeliest first, as many as the request asked for; it
    may hold the token itself.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class RequestUpdate(NamedTuple):
    """What one step did for one request; a tuple, because every row makes one every step.

    ``new_token_ids`` includes the token that ended the request; ``stop_token_id`` is that token
    when it was an eos or a stop id. Counts are totals so far, the new tokens included.
    ``timings`` is set exactly when ``finish_reason`` is, and ``error`` says why that is "error".

    ``logprobs`` has one entry a new token where the request asked. ``prompt_logprobs`` has one a
    prompt token, None for the first, and comes once: with the first token, or with the end.
    ``num_cached_tokens`` counts the prompt tokens that were not computed anew. ``weight_version``
    is that of the weights which drew the new tokens.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_token_id: int | None
    num_prompt_tokens: int
    num_output_tokens: int
    timings: RequestTimings | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    weight_version: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's gauges and totals since it was built. Totals only grow.

    ``asleep``: it holds no device memory and runs nothing until it is woken.
    ``num_blocks`` counts the blocks requests can own (the null block is not one).
    ``num_waiting`` includes preempted requests. ``prompt_tokens`` counts prompt tokens of
    requests whose prompt was computed or found (a recomputed prompt counts once),
    ``generation_tokens`` tokens given to requests. ``prefix_cache_queries`` counts prompt tokens
    looked up in the prefix cache and ``prefix_cache_hits`` those found, both when a request is
    first scheduled: what it finds again after a preemption is no hit. ``weight_version`` is that of
    the weights in use. ``scheduled_tokens`` counts every token a step computed, recomputed
    ones included. ``shape_replays`` maps a decode shape to the steps run at it and
    ``decode_replays`` its rows; ``padded_rows`` sums the rows of those steps that held no request,
    and ``padded_cells`` the (row, key) pairs read for nobody, as if each row were the longest.
    ``decode_step_seconds`` maps a decode row bucket to a count of steps that did nothing else and
    their seconds, each from the reading of the step before it: the loop is busy, so that is the
    longer of what the device and what the host took.
    """

    asleep: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    weight_version: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    scheduled_tokens: int = 0
    padded_rows: int = 0
    padded_cells: int = 0
    decode_replays: Mapping[int, int] = field(default_factory=dict)
    shape_replays: Mapping[DecodeShape, int] = field(default_factory=dict)
    decode_step_seconds: Mapping[int, tuple[int, float]] = field(default_factory=dict)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks in use, in [0, 1]."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True)
class ExecutableStats:
    """The compiled list: how many are planned and how many of those ran at least once.

    ``compile_seconds`` sums tracing, lowering and compiling over all executables of this process,
    threads side by side. ``compiles_after_ready`` counts shapes compiled after the boot.
    """

    planned: int = 0
    ready: int = 0
    compile_seconds: float = 0.0
    compiles_after_ready: int = 0
