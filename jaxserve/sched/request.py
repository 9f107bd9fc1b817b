"""One request from arrival to its last token: its state machine, its tokens and what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import numpy as np

from jaxserve.config import SamplingParams
from jaxserve.errors import IllegalTransition
from jaxserve.sched.masks import TokenRules
from jaxserve.sched.outputs import FinishReason, RequestTimings, TokenLogprobs


class TokenMask(Protocol):
    """Which tokens may follow what a request has generated so far; a grammar, for one.

    The engine's thread calls it. What it raises ends its own request with "error" and no other.
    """

    def fill(self, words_W: np.ndarray) -> None:
        """Write the mask: bit t % 32 of uint32 word t // 32 is 1 where token t may come next."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by a token that was drawn."""
        ...

    @property
    def done(self) -> bool:
        """True when nothing more may follow: the request ends with "stop"."""
        ...


class RequestState(Enum):
    """Where a request stands.

    ``DECODING`` owns a decode row. ``DRAINING`` has had every token it may have dispatched: it
    holds neither row nor blocks and waits for the last one to be read back. ``PREEMPTED`` waits
    at the head of the queue to compute its prompt and its output again.
    """

    WAITING = auto()
    PREFILLING = auto()
    DECODING = auto()
    DRAINING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH = auto()
    FINISHED_ABORTED = auto()
    FINISHED_ERROR = auto()


_ABORTED_OR_FAILED = frozenset({RequestState.FINISHED_ABORTED, RequestState.FINISHED_ERROR})

# A preempted request may still stop: the token in flight when it lost its blocks counts.
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.PREFILLING, RequestState.FINISHED_ABORTED}),
    RequestState.PREFILLING: frozenset(
        {
            RequestState.DECODING,
            RequestState.DRAINING,
            RequestState.PREEMPTED,
            RequestState.FINISHED_ABORTED,
        }
    ),
    RequestState.DECODING: _ABORTED_OR_FAILED
    | {RequestState.DRAINING, RequestState.PREEMPTED, RequestState.FINISHED_STOPPED},
    RequestState.DRAINING: _ABORTED_OR_FAILED
    | {RequestState.FINISHED_STOPPED, RequestState.FINISHED_LENGTH},
    RequestState.PREEMPTED: _ABORTED_OR_FAILED
    | {RequestState.PREFILLING, RequestState.FINISHED_STOPPED},
    RequestState.FINISHED_STOPPED: frozenset(),
    RequestState.FINISHED_LENGTH: frozenset(),
    RequestState.FINISHED_ABORTED: frozenset(),
    RequestState.FINISHED_ERROR: frozenset(),
}

_FINISHED: dict[FinishReason, RequestState] = {
    "stop": RequestState.FINISHED_STOPPED,
    "length": RequestState.FINISHED_LENGTH,
    "abort": RequestState.FINISHED_ABORTED,
    "error": RequestState.FINISHED_ERROR,
}


def seed_key(seed: int | None, engine_seed: int, arrival: int) -> tuple[int, int]:
    """A threefry key, two uint32: the halves of ``seed``, high first.

    Without a seed the key is drawn from the engine's seed and the request's arrival number, so a
    run can be repeated.
    """
    if seed is None:
        entropy = (engine_seed & 0xFFFF_FFFF_FFFF_FFFF, arrival)
        high, low = np.random.SeedSequence(entropy).generate_state(2, np.uint32).tolist()
        return high, low
    return (seed >> 32) & 0xFFFF_FFFF, seed & 0xFFFF_FFFF


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """The books of one request; the scheduler and the engine's commit are their only writers.

    ``num_computed`` counts tokens whose K/V a dispatched step writes; ``num_in_flight`` tokens
    drawn on the device and not read back. ``arrival`` numbers requests in order of arrival.
    ``max_output_tokens`` is where length ends the request. ``*_at`` are seconds of the engine's
    clock.

    ``chain`` holds the digests of full blocks behind their root (see PrefixCache), empty where the
    request shares nothing; the first ``num_registered`` of ``block_ids`` are offered to others.
    ``forced`` are tokens that its first draws give whatever the model says, and the first
    ``num_silent`` draws are told nobody: they were told before.
    ``num_cached_tokens`` counts prompt tokens found in the cache when it was first scheduled.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_output_tokens: int
    stop_token_ids: frozenset[int]
    key: tuple[int, int]
    arrival: int
    arrived_at: float
    cache_salt: str = ""
    group: str | None = None
    rules: TokenRules | None = None
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    output_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    num_computed: int = 0
    num_in_flight: int = 0
    block_ids: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    forced: tuple[int, ...] = ()
    num_silent: int = 0
    num_cached_tokens: int = 0
    row: int | None = None
    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens the host knows: the prompt and the output read back so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_output_left(self) -> int:
        """Tokens that may still be dispatched before length ends the request."""
        left = self.max_output_tokens - len(self.output_token_ids) - self.num_in_flight
        return max(
            left, 0
        )  # a prompt alone, max_output_tokens 0, has a draw in flight all the same

    @property
    def waits_for_token(self) -> bool:
        """True when the next draw depends on one that is not read back."""
        rules = self.rules
        return rules is not None and self.num_in_flight > 0 and rules.needs_last_token

    @property
    def scores_prompt(self) -> bool:
        """True while the prompt's log probabilities are owed: every prompt token is computed."""
        told = self.output_token_ids or self.num_silent
        return self.params.prompt_logprobs is not None and not told

    def begin_replay(self) -> None:
        """Know the prompt alone again: what was drawn is drawn once more, and told nobody."""
        drawn = tuple(self.output_token_ids)
        self.forced = drawn + self.forced[len(drawn) :]
        self.num_silent = max(self.num_silent, len(drawn))
        self.output_token_ids = []

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Those of a prompt that is computed, given out once; None if they are not owed."""
        owed, self.prompt_logprobs = self.prompt_logprobs, []
        prompt = len(self.prompt_token_ids)
        return tuple(owed) if owed and None not in owed[1:prompt] else None

    @property
    def penalised(self) -> bool:
        """True when its draws depend on how often each token was drawn before."""
        params = self.params
        return bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        )

    def tokens_between(self, start: int, end: int) -> Sequence[int]:
        """Known tokens at positions ``start`` to ``end`` - 1."""
        prompt = self.prompt_token_ids
        if end <= len(prompt):
            return prompt[start:end]
        skip = len(prompt)
        return prompt[start:] + self.output_token_ids[max(start - skip, 0) : end - skip]

    def move_to(self, state: RequestState) -> None:
        """Change state; raises IllegalTransition where the table has no such edge."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(
                f"request {self.request_id}: {self.state.name} -> {state.name} "
                f"(from {self.state.name} one may go to "
                f"{sorted(s.name for s in TRANSITIONS[self.state])})"
            )
        self.state = state

    def finish(self, reason: FinishReason) -> None:
        """Move to the finished state of ``reason``."""
        self.move_to(_FINISHED[reason])
        self.finish_reason = reason

    def commit(self, token_id: int, now: float) -> FinishReason | None:
        """Append a token that was read back; returns why the request ends with it, if it does."""
        self.num_in_flight -= 1
        self.output_token_ids.append(token_id)
        self.last_token_at = now
        if self.first_token_at is None:
            self.first_token_at = now
        if token_id in self.stop_token_ids:
            return "stop"
        if len(self.output_token_ids) == self.max_output_tokens:
            return "length"
        return None

    def timings(self, now: float) -> RequestTimings:
        """Where the time of a request that ends ``now`` went; a phase that was cut ends now."""
        scheduled = now if self.first_scheduled_at is None else self.first_scheduled_at
        first = now if self.first_token_at is None else self.first_token_at
        last = first if self.last_token_at is None else self.last_token_at
        return RequestTimings(
            queue_s=scheduled - self.arrived_at,
            prefill_s=first - scheduled,
            decode_s=last - first,
        )
