"""Log probabilities of tokens, computed only where somebody asked for them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.config import MAX_LOGPROBS
from jaxserve.plan.batch import NO_LOGPROBS, NO_TARGET, PROCESSED_LOGPROBS, SamplingRows, Scores

# Tokens of a prompt scored at once: what their logits take, [tile, V] float32, is workspace of
# every prefill.
_PROMPT_TILE = 32
_LANES = 16


def whole_lanes(logits_XV: jax.Array) -> jax.Array:
    """``logits_XV`` with -inf up to a multiple of the CPU's vector lanes.

    XLA:CPU runs over all rows as one line of numbers, and computes what is left past the last whole
    vector by other code, whose exp and log round otherwise: without this, a row's scores could
    depend on which row it is.
    """
    missing = -logits_XV.shape[1] % _LANES
    if not missing or logits_XV.shape[1] < 2 * _LANES:
        return logits_XV
    return jnp.pad(logits_XV, ((0, 0), (0, missing)), constant_values=-jnp.inf)


def score_tokens(logits_XV: jax.Array, tokens_X: jax.Array) -> Scores:
    """Scores of ``tokens_X`` int32 in the distribution of ``logits_XV`` float32.

    The likeliest are the min(MAX_LOGPROBS, V) best, of equals the lowest id first.
    """
    logits_XV = whole_lanes(logits_XV)
    chosen_X1 = jnp.take_along_axis(logits_XV, tokens_X[:, None], axis=1)
    total_X1 = jax.nn.logsumexp(logits_XV, axis=1, keepdims=True)
    likelier_X = jnp.sum(logits_XV > chosen_X1, axis=1, dtype=jnp.int32)
    top_XN, ids_XN = jax.lax.top_k(logits_XV, min(MAX_LOGPROBS, logits_XV.shape[1]))
    return Scores((chosen_X1 - total_X1)[:, 0], likelier_X + 1, ids_XN, top_XN - total_X1)


def score_draw(
    raw_XV: jax.Array,
    tokens_X: jax.Array,
    sampling: SamplingRows,
    processed: Callable[[], jax.Array],
) -> Scores:
    """Scores of the tokens drawn, in the model's own distribution or in the one drawn from.

    ``processed()`` gives the logits of the latter, float32 [X, V], and is asked only inside the
    branch that reads them.
    """
    processed_X = sampling.logprobs_X == PROCESSED_LOGPROBS

    def score() -> Scores:
        logits_XV = jax.lax.cond(
            jnp.any(processed_X),
            lambda: jnp.where(processed_X[:, None], processed(), raw_XV),
            lambda: raw_XV,
        )
        return score_tokens(logits_XV, tokens_X)

    return jax.lax.cond(
        jnp.any(sampling.logprobs_X != NO_LOGPROBS), score, lambda: _none(*raw_XV.shape)
    )


def score_prompt(
    logits: Callable[[jax.Array], jax.Array], hidden_TD: jax.Array, targets_T: jax.Array, vocab: int
) -> Scores:
    """Scores of ``targets_T`` int32, each after its token; those of NO_TARGET mean nothing.

    ``logits`` maps hidden states [X, D] to float32 [X, V]. Tiles of tokens are computed from the
    first that holds a target to the last, so a batch that wants none computes none.
    """
    tokens = targets_T.shape[0]
    tile = min(_PROMPT_TILE, tokens)
    index_T = jnp.arange(tokens)
    first = jnp.min(jnp.where(targets_T != NO_TARGET, index_T, tokens)) // tile
    end = (jnp.max(jnp.where(targets_T != NO_TARGET, index_T, -tile)) + tile) // tile

    def score_tile(i: jax.Array, scores: Scores) -> Scores:
        start = jnp.minimum(i * tile, tokens - tile)  # the last tile may repeat tokens
        hidden_XD = jax.lax.dynamic_slice_in_dim(hidden_TD, start, tile)
        targets_X = jax.lax.dynamic_slice_in_dim(targets_T, start, tile)
        made = score_tokens(logits(hidden_XD), jnp.maximum(targets_X, 0))
        return jax.tree.map(
            lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, start, 0), scores, made
        )

    return jax.lax.fori_loop(first, end, score_tile, _none(tokens, vocab))


def _none(rows: int, vocab: int) -> Scores:
    likeliest = (rows, min(MAX_LOGPROBS, vocab))
    return Scores(
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(likeliest, jnp.int32),
        jnp.zeros(likeliest, jnp.float32),
    )
