"""Scores that a step gave back, as what a request is told of its tokens."""

from __future__ import annotations

import math

from jaxserve.plan.batch import Scores
from jaxserve.sched.outputs import TokenLogprobs
from jaxserve.sched.scheduler import Chunk


def token_logprobs(scores: Scores, i: int, token_id: int, count: int) -> TokenLogprobs:
    """Entry ``i`` of ``scores``, with the ``count`` likeliest of the tokens that could be drawn."""
    likeliest = zip(
        scores.top_ids_XN[i, :count].tolist(),
        scores.top_logprobs_XN[i, :count].tolist(),
        strict=True,
    )
    return TokenLogprobs(
        token_id,
        float(scores.logprobs_X[i]),
        int(scores.ranks_X[i]),
        tuple(pair for pair in likeliest if pair[1] != -math.inf),
    )


def collect_prompt_logprobs(chunk: Chunk, scores: Scores, start: int) -> None:
    """Add what a chunk, whose tokens begin at ``start`` of its batch, says of its prompt.

    A prompt that is computed again after a preemption is said the same of again.
    """
    request = chunk.request
    count = request.params.prompt_logprobs
    assert count is not None
    prompt = request.prompt_token_ids
    if not request.prompt_logprobs:
        request.prompt_logprobs = [None] * len(prompt)
    for position in range(chunk.start + 1, min(chunk.end + 1, len(prompt))):
        i = start + position - 1 - chunk.start
        request.prompt_logprobs[position] = token_logprobs(scores, i, prompt[position], count)
