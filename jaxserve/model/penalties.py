"""What a request's options do to its logits before a token is drawn: bias, penalties, masks."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.plan.batch import ALL_ALLOWED, MOST_COUNTED, LogitBias, SamplingRows


def penalised(sampling: SamplingRows) -> jax.Array:
    """Rows with a penalty that is not neutral, bool [X]."""
    return (
        (sampling.presence_X != 0.0)
        | (sampling.frequency_X != 0.0)
        | (sampling.repetition_X != 1.0)
    )


def shape_logits(
    logits_XV: jax.Array,
    sampling: SamplingRows,
    bias: LogitBias,
    mask_XW: jax.Array,
    counts: Callable[[], jax.Array],
) -> jax.Array:
    """Logits with bias, penalties and masks applied in that order, float32 [X, V].

    ``counts()`` gives the rows' counts_XV and is asked only inside the branch that reads them.
    Where no row has any of the three, the logits pass through.
    """
    any_penalised = jnp.any(penalised(sampling))
    used = (
        any_penalised | jnp.any(bias.values_XE != 0.0) | jnp.any(mask_XW != jnp.uint32(ALL_ALLOWED))
    )

    def shape() -> jax.Array:
        x_XV = _add_bias(logits_XV, bias)
        x_XV = jax.lax.cond(
            any_penalised, lambda: _penalise(x_XV, sampling, counts()), lambda: x_XV
        )
        return jnp.where(_allowed(mask_XW, x_XV.shape[1]), x_XV, -jnp.inf)

    return jax.lax.cond(used, shape, lambda: logits_XV)


def count_tokens(
    counts_BV: jax.Array, rows_X: jax.Array, tokens_X: jax.Array, counted_X: jax.Array
) -> jax.Array:
    """``counts_BV`` with one more of each token in its row, where ``counted_X``, uint16 [B, V].

    A full count stays. Rows that are not counted, and rows out of range, are dropped, so the table
    is updated in place however few there are.
    """
    rows_X = jnp.where(counted_X, rows_X, counts_BV.shape[0])
    old_X = counts_BV.at[rows_X, tokens_X].get(mode="clip")
    full_X = (old_X & jnp.uint16(MOST_COUNTED)) == MOST_COUNTED
    new_X = jnp.where(full_X, old_X, old_X + jnp.uint16(1))
    return counts_BV.at[rows_X, tokens_X].set(new_X, mode="drop")


def _add_bias(logits_XV: jax.Array, bias: LogitBias) -> jax.Array:
    lanes_X1 = jnp.arange(logits_XV.shape[0])[:, None]
    return logits_XV.at[lanes_X1, bias.ids_XE].add(bias.values_XE, mode="drop")


def _penalise(logits_XV: jax.Array, sampling: SamplingRows, counts_XV: jax.Array) -> jax.Array:
    """Repetition over prompt and output, then frequency and presence over the output.

    Repetition divides positive logits and multiplies negative ones (Keskar et al. 2019,
    arXiv 1909.05858, section 4.1, mended for the sign as everybody does); the other two subtract,
    as OpenAI's documentation defines them.
    """
    drawn_XV = (counts_XV & jnp.uint16(MOST_COUNTED)).astype(jnp.float32)
    factor_X1 = sampling.repetition_X[:, None]
    repeated_XV = jnp.where(logits_XV > 0, logits_XV / factor_X1, logits_XV * factor_X1)
    logits_XV = jnp.where(counts_XV != 0, repeated_XV, logits_XV)
    logits_XV = logits_XV - sampling.frequency_X[:, None] * drawn_XV
    return logits_XV - jnp.where(drawn_XV > 0, sampling.presence_X[:, None], 0.0)


def _allowed(mask_XW: jax.Array, vocab: int) -> jax.Array:
    """Masks unpacked, bool [X, V]."""
    bits = jnp.arange(32, dtype=jnp.uint32)[None, None, :]
    bits_XV = (mask_XW[:, :, None] >> bits) & jnp.uint32(1)
    return bits_XV.reshape(mask_XW.shape[0], -1)[:, :vocab] != 0
