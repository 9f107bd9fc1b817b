"""Draw one token a row inside the step, whatever mixture of settings the rows carry.

One program serves every mixture: settings are arrays, and what no row asks for is skipped on the
device by ``lax.cond``. Truncation needs no sort. Each filter keeps the tokens at or above a
threshold, and the threshold is found exactly by bisection over the bit patterns of float32, whose
order as integers is the order of the numbers: 32 passes over the row. On CPUs, where a pass costs
as much as picking the likeliest few, those are sorted first and the search is for the rows whose
threshold is not among them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.plan.batch import SamplingRows

_INT_MIN = -(2**31)
# Below these float32 underflows; nothing but the likeliest token has a chance anyway.
_LEAST_TEMPERATURE = 1e-5
_LEAST_TOP_P = 1e-6
# How many of the likeliest tokens are sorted on CPUs.
_SORTED = 256


def _ordered(x: jax.Array) -> jax.Array:
    """float32 as int32 with the same order (-0.0 just below 0.0)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _largest_threshold(rows: int, holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest t per row with holds(t_X), for a ``holds`` true at INT_MIN and monotone in t.

    t is built from the top bit down in offset binary, so no midpoint can overflow.
    """

    def body(i: jax.Array, t_X: jax.Array) -> jax.Array:
        bit = jnp.left_shift(jnp.int32(1), jnp.int32(31) - i)
        trial = jnp.where(i == 0, jnp.zeros_like(t_X), t_X | bit)
        return jnp.where(holds(trial), trial, t_X)

    return jax.lax.fori_loop(0, 32, body, jnp.full((rows,), _INT_MIN, jnp.int32))


def _keep_top_k(scaled_XV: jax.Array, keys_XV: jax.Array, top_k_X: jax.Array) -> jax.Array:
    """Threshold of the k most likely tokens (ties with the k-th stay); k <= 0 keeps all."""
    rows, vocab = keys_XV.shape
    all_X = top_k_X <= 0
    k_X = jnp.where(all_X, vocab, jnp.minimum(top_k_X, vocab))

    def search() -> jax.Array:
        def holds(t_X: jax.Array) -> jax.Array:
            return jnp.sum(keys_XV >= t_X[:, None], axis=1, dtype=jnp.int32) >= k_X

        return _largest_threshold(rows, holds)

    def sort() -> jax.Array:
        likeliest_XN = _likeliest(scaled_XV)
        sorted_X = jnp.where(all_X, _INT_MIN, _pick(likeliest_XN, k_X - 1))
        found_X = all_X | (k_X <= likeliest_XN.shape[1])
        return _complete(sorted_X, found_X, search)

    return jax.lax.platform_dependent(cpu=sort, default=search)


def _keep_top_p(
    scaled_XV: jax.Array, keys_XV: jax.Array, floor_X: jax.Array, top_p_X: jax.Array
) -> jax.Array:
    """Threshold of the smallest set of most likely tokens whose weight reaches p of the total.

    Tokens whose key is below ``floor_X`` weigh nothing; p >= 1 keeps all.
    """

    def weigh(x_XM: jax.Array, keys_XM: jax.Array) -> jax.Array:
        return jnp.where(keys_XM >= floor_X[:, None], jnp.exp(x_XM - best_X1), 0.0)

    best_X1 = jnp.max(scaled_XV, axis=1, keepdims=True)
    weights_XV = weigh(scaled_XV, keys_XV)
    off_X = top_p_X >= 1.0
    goal_X = jnp.maximum(top_p_X, _LEAST_TOP_P) * jnp.sum(weights_XV, axis=1)

    def search() -> jax.Array:
        def holds(t_X: jax.Array) -> jax.Array:
            kept = jnp.where(keys_XV >= t_X[:, None], weights_XV, 0.0)
            return jnp.sum(kept, axis=1) >= goal_X

        return jnp.where(off_X, _INT_MIN, _largest_threshold(keys_XV.shape[0], holds))

    def sort() -> jax.Array:
        likeliest_XN = _likeliest(scaled_XV)
        sums_XN = jnp.cumsum(weigh(likeliest_XN, _ordered(likeliest_XN)), axis=1)
        short_X = jnp.sum(sums_XN < goal_X[:, None], axis=1, dtype=jnp.int32)
        sorted_X = jnp.where(off_X, _INT_MIN, _pick(likeliest_XN, short_X))
        return _complete(sorted_X, off_X | (short_X < likeliest_XN.shape[1]), search)

    return jax.lax.platform_dependent(cpu=sort, default=search)


def _likeliest(x_XV: jax.Array) -> jax.Array:
    """The largest values of each row, in falling order."""
    return jax.lax.top_k(x_XV, min(_SORTED, x_XV.shape[1]))[0]


def _pick(x_XN: jax.Array, index_X: jax.Array) -> jax.Array:
    """The key of entry ``index_X`` of each row; an index past the end gives the last."""
    index_X1 = jnp.minimum(index_X, x_XN.shape[1] - 1)[:, None]
    return _ordered(jnp.take_along_axis(x_XN, index_X1, axis=1)[:, 0])


def _complete(
    sorted_X: jax.Array, found_X: jax.Array, search: Callable[[], jax.Array]
) -> jax.Array:
    """``sorted_X`` where found, else searched for: a row's threshold never depends on others."""
    return jax.lax.cond(
        jnp.all(found_X), lambda: sorted_X, lambda: jnp.where(found_X, sorted_X, search())
    )


def truncate(scaled_XV: jax.Array, sampling: SamplingRows) -> jax.Array:
    """Tempered logits with the tokens outside min-p, top-k and top-p at -inf, float32 [X, V].

    min-p keeps tokens of at least ``min_p`` times the likeliest one's probability; top-p is taken
    over what min-p and top-k left, renormalised.
    """
    rows = scaled_XV.shape[0]
    off = jnp.full((rows,), _INT_MIN, jnp.int32)
    keys_XV = _ordered(scaled_XV)
    best_X = jnp.max(scaled_XV, axis=1)
    floor_X = _ordered(best_X + jnp.log(sampling.min_p_X))  # log 0 = -inf keeps all
    top_k_X = jax.lax.cond(
        jnp.any(sampling.top_k_X > 0),
        lambda: _keep_top_k(scaled_XV, keys_XV, sampling.top_k_X),
        lambda: off,
    )
    floor_X = jnp.maximum(floor_X, top_k_X)
    top_p_X = jax.lax.cond(
        jnp.any(sampling.top_p_X < 1.0),
        lambda: _keep_top_p(scaled_XV, keys_XV, floor_X, sampling.top_p_X),
        lambda: off,
    )
    floor_X = jnp.maximum(floor_X, top_p_X)
    return jnp.where(keys_XV >= floor_X[:, None], scaled_XV, -jnp.inf)


def _argmax(x_XV: jax.Array) -> jax.Array:
    """The lowest index of each row's maximum, int32 [X], as two plain reductions.

    A variadic reduction over (value, index) runs as scalar code on CPUs, and what makes ``x`` would
    be fused into it (the barrier keeps that out): thirty times slower than this.
    """
    x_XV = jax.lax.optimization_barrier(x_XV)
    best_X1 = jnp.max(x_XV, axis=1, keepdims=True)
    last = x_XV.shape[1] - 1
    index_XV = jax.lax.broadcasted_iota(jnp.int32, x_XV.shape, 1)
    return jnp.min(jnp.where(x_XV == best_X1, index_XV, last), axis=1)


def _threefry(key_X2: jax.Array, counter_high_X: jax.Array, vocab: int) -> jax.Array:
    """Threefry-2x32-20 (Salmon et al. 2011) of the counters (high, 0 .. vocab - 1), uint32 [X, V].

    The function of ``jax.random``, whose own form runs as a loop on CPUs and costs more than the
    rest of sampling there; written out, it fuses into what uses it. Gives the first output word.
    """
    k0, k1 = key_X2[:, 0][:, None], key_X2[:, 1][:, None]
    keys = (k0, k1, k0 ^ k1 ^ jnp.uint32(0x1BD11BDA))
    x0 = counter_high_X.astype(jnp.uint32)[:, None] + k0
    x1 = jax.lax.broadcasted_iota(jnp.uint32, (1, vocab), 1) + k1
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << jnp.uint32(turn)) | (x1 >> jnp.uint32(32 - turn))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0


def _gumbel(bits: jax.Array) -> jax.Array:
    """Standard Gumbel noise from uniform uint32 bits, float32, always finite.

    The uniform is the middle of one of 2^23 cells. Half a cell more than that would not fit the
    24 bits of a float32: the last one would round to 1 and its noise to infinity.
    """
    uniform = ((bits >> jnp.uint32(9)).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def _kept(logits_XV: jax.Array, sampling: SamplingRows) -> jax.Array:
    """Tempered and truncated logits, float32 [X, V]."""
    temperature_X = jnp.maximum(sampling.temperature_X, _LEAST_TEMPERATURE)
    return truncate(logits_XV / temperature_X[:, None], sampling)


def drawn_from(logits_XV: jax.Array, sampling: SamplingRows) -> jax.Array:
    """Logits of the distribution a token is drawn from, float32 [X, V].

    A greedy row draws from none: its logits are given as they are.
    """
    drawn_X1 = (sampling.temperature_X >= _LEAST_TEMPERATURE)[:, None]
    return jnp.where(drawn_X1, _kept(logits_XV, sampling), logits_XV)


def _draw(logits_XV: jax.Array, sampling: SamplingRows, positions_X: jax.Array) -> jax.Array:
    """Gumbel-max draw of every row with its own key and position, int32 [X]."""
    kept_XV = _kept(logits_XV, sampling)
    noise_XV = _gumbel(_threefry(sampling.keys_X2, positions_X, logits_XV.shape[1]))
    return _argmax(kept_XV + noise_XV)


def sample(logits_XV: jax.Array, sampling: SamplingRows, positions_X: jax.Array) -> jax.Array:
    """The next token of each row, int32 [X].

    ``logits_XV`` float32; ``positions_X`` int32 is the position the new token will take, which
    with the row's key fixes the draw. Temperature 0 (or below 1e-5) takes the likeliest token, the
    lowest id of equals.
    """
    drawn_X = sampling.temperature_X >= _LEAST_TEMPERATURE
    greedy_X = _argmax(logits_XV)
    token_X = jax.lax.cond(
        jnp.any(drawn_X), lambda: _draw(logits_XV, sampling, positions_X), lambda: greedy_X
    )
    return jnp.where(drawn_X, token_X, greedy_X)
