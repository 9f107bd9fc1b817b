"""A dispatched iteration until it is read back, and the device as the loop sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxserve.plan.batch import PrefillBatch, Scores
from jaxserve.plan.buckets import DecodeShape
from jaxserve.sched.outputs import TokenLogprobs
from jaxserve.sched.request import Request
from jaxserve.sched.scheduler import Schedule
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

    def prepare_params(self, tree: Any) -> Any:
        """What ``update_params`` takes, of weights in any form; raises InvalidWeights."""
        ...

    def update_params(self, fitting: Any) -> None:
        """Other weights, from ``prepare_params``."""
        ...

    def sleep(self, *, weights: bool) -> None:
        """Give up the device's memory, with ``weights`` all of it."""
        ...

    def wake(self) -> None:
        """Take it again, with nothing in the pool."""
        ...


@dataclass(frozen=True, slots=True)
class Flight:
    """A dispatched iteration that is not read back; ``weight_version`` computes it."""

    schedule: Schedule
    shape: DecodeShape | None
    decode: Pending | None
    prefill: Pending | None
    weight_version: int

    def read_draws(self, scores: dict[Request, TokenLogprobs] | None) -> list[tuple[Request, int]]:
        """The tokens that count, with who drew them; blocks until the device is done.

        Adds the log probabilities that are wanted to ``scores``; None: nobody wants any.
        """
        drawn: list[tuple[Request, int]] = []
        if self.decode is not None:
            drawn += _read(self.decode, self.schedule.decode, scores)
        if self.prefill is not None:
            chunks = self.schedule.chunks
            rows = [chunk.request if chunk.samples else None for chunk in chunks]
            drawn += _read(self.prefill, rows, scores)
        return drawn

    def read_prompts(self) -> None:
        """Keep the log probabilities of prompts that are wanted."""
        chunks = self.schedule.chunks
        if self.prefill is None or not any(chunk.request.scores_prompt for chunk in chunks):
            return
        scores = self.prefill.read_prompt_scores()
        start = 0
        for chunk in chunks:
            if chunk.request.scores_prompt:
                collect_prompt_logprobs(chunk, scores, start)
            start += chunk.end - chunk.start


def _read(
    pending: Pending,
    rows: Sequence[Request | None],
    scores: dict[Request, TokenLogprobs] | None,
) -> list[tuple[Request, int]]:
    """What ``rows`` drew; what the device drew past them is padding."""
    tokens = pending.read().tolist()
    drawn = [(r, t) for r, t in zip(rows, tokens, strict=False) if r is not None]
    if scores is not None and any(r.params.logprobs is not None for r, _ in drawn):
        read = pending.read_scores()
        for i, request in enumerate(rows):
            if request is not None and request.params.logprobs is not None:
                scores[request] = token_logprobs(read, i, tokens[i], request.params.logprobs)
    return drawn
