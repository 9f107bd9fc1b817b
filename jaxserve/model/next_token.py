"""From a row's logits to its next token and that token's scores, under all of its options."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.model.logprobs import score_draw, whole_lanes
from jaxserve.model.penalties import shape_logits
from jaxserve.model.sampling import drawn_from, sample
from jaxserve.plan.batch import NEUTRAL_SAMPLING, LogitBias, SamplingRows, Scores


def next_tokens(
    logits_XV: jax.Array,
    sampling: SamplingRows,
    bias: LogitBias,
    mask_XW: jax.Array,
    counts: Callable[[], jax.Array],
    positions_X: jax.Array,
) -> tuple[jax.Array, Scores]:
    """The next token of each row, int32 [X], and its scores.

    In this order: bias, penalties, mask, temperature, min-p, top-k, top-p. ``logits_XV`` float32;
    ``positions_X`` int32 is the position the token will take; ``counts()`` gives uint16 [X, V].
    """
    vocab_size = logits_XV.shape[1]
    shaped_XV = shape_logits(logits_XV, sampling, bias, mask_XW, counts)
    logits_XV, shaped_XV = whole_lanes(logits_XV), whole_lanes(shaped_XV)
    tokens_X = sample(shaped_XV, sampling, positions_X)
    if shaped_XV.shape[1] > vocab_size:  # nan is no maximum: the lanes added could be drawn
        tokens_X = jnp.minimum(tokens_X, vocab_size - 1)
    scores = score_draw(logits_XV, tokens_X, sampling, lambda: drawn_from(shaped_XV, sampling))
    return tokens_X, scores


def idle_as_neutral(sampling: SamplingRows, active_X: jax.Array) -> SamplingRows:
    """``sampling`` with neutral settings where a row is idle, so that it asks for no branch."""

    def pick(x: jax.Array, neutral: float) -> jax.Array:
        active = active_X.reshape((-1,) + (1,) * (x.ndim - 1))
        return jnp.where(active, x, jnp.asarray(neutral, x.dtype))

    return SamplingRows(*map(pick, sampling, NEUTRAL_SAMPLING))
