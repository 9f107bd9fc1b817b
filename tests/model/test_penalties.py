"""Bias, penalties and masks against numpy, row by row."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.model.linear import cpu_compiler_options
from jaxserve.model.penalties import count_tokens, penalised, shape_logits
from jaxserve.plan.batch import ALL_ALLOWED, LogitBias
from tests.models import pack_mask, rows_of

VOCAB = 70  # not a multiple of 32: the last word of a mask has bits of no token

SHAPE = jax.jit(
    lambda logits, sampling, bias, mask, counts: shape_logits(
        logits, sampling, bias, mask, lambda: counts
    ),
    compiler_options=cpu_compiler_options(),
)
COUNT = jax.jit(count_tokens, donate_argnums=0)


def shaped_by_hand(logits, row, prompt, output):
    """One row, token by token, in float64."""
    result = []
    for token, logit in enumerate(logits.astype(np.float64)):
        logit += dict(row.get("bias", ())).get(token, 0.0)
        times = output.count(token)
        if times or token in prompt:
            factor = row.get("repetition", 1.0)
            logit = logit / factor if logit > 0 else logit * factor
        logit -= row.get("frequency", 0.0) * times
        logit -= row.get("presence", 0.0) * (times > 0)
        allowed = row.get("allowed")
        result.append(logit if allowed is None or token in allowed else -np.inf)
    return np.array(result)


def bias_of(rows):
    ids, values = np.full((len(rows), 300), VOCAB, np.int32), np.zeros((len(rows), 300), np.float32)
    for i, row in enumerate(rows):
        for j, (token, value) in enumerate(row.get("bias", ())):
            ids[i, j], values[i, j] = token, value
    return LogitBias(ids, values)


def counts_of(histories):
    counts = np.zeros((len(histories), VOCAB), np.uint16)
    for i, (prompt, output) in enumerate(histories):
        for token in output:
            counts[i, token] += 1
        for token in prompt:
            counts[i, token] |= 0x8000
    return counts


def masks_of(rows):
    return np.stack([pack_mask(row.get("allowed"), VOCAB) for row in rows])


token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=12)
settings = st.fixed_dictionaries(
    {},
    optional={
        "presence": st.sampled_from([-1.5, 0.7]),
        "frequency": st.sampled_from([-0.3, 2.0]),
        "repetition": st.sampled_from([0.5, 1.3]),
        "bias": st.sampled_from([[(0, 5.0), (69, -100.0)], [(3, -0.5), (1, 100.0), (64, 2.0)]]),
        "allowed": st.sets(st.integers(0, VOCAB - 1), min_size=1),
    },
)


@given(
    seed=st.integers(0, 2**16),
    rows=st.lists(settings, min_size=4, max_size=4),
    histories=st.lists(st.tuples(token_lists, token_lists), min_size=4, max_size=4),
)
def test_each_row_is_shaped_by_its_own_options_and_its_own_history(seed, rows, histories):
    logits = np.random.default_rng(seed).normal(0, 4, (4, VOCAB)).astype(np.float32)
    got = SHAPE(logits, rows_of(rows), bias_of(rows), masks_of(rows), counts_of(histories))
    wanted = [
        shaped_by_hand(logits[i], rows[i], prompt, output)
        for i, (prompt, output) in enumerate(histories)
    ]
    np.testing.assert_allclose(got, np.stack(wanted), rtol=1e-6, atol=1e-5)


def test_rows_that_ask_for_nothing_get_their_logits_bit_for_bit():
    logits = np.random.default_rng(1).normal(0, 4, (4, VOCAB)).astype(np.float32)
    garbage = np.random.default_rng(2).integers(0, 2**16, (4, VOCAB)).astype(np.uint16)
    rows = [{}, {"bias": [(3, 1.0)]}, {"frequency": 1.0}, {}]
    got = np.asarray(SHAPE(logits, rows_of(rows), bias_of(rows), masks_of(rows), garbage))
    for row in (0, 3):
        np.testing.assert_array_equal(got[row], logits[row])
    changed = np.flatnonzero(got[1] != logits[1])
    assert changed.tolist() == [3]
    nothing = [{}] * 4
    alone = SHAPE(logits, rows_of(nothing), bias_of(nothing), masks_of(nothing), garbage)
    np.testing.assert_array_equal(alone, logits)


def test_a_word_of_all_ones_bans_nothing():
    assert (masks_of([{}]) == ALL_ALLOWED).all()


def test_tokens_are_counted_in_their_own_row_where_a_penalty_asks():
    counts = np.zeros((3, VOCAB), np.uint16)
    counts[:, 9] = [0x8000, 0x8001, 5]
    rows = jnp.asarray([2, 0, 1], jnp.int32)
    tokens = jnp.asarray([9, 9, 11], jnp.int32)
    got = COUNT(jnp.asarray(counts), rows, tokens, jnp.asarray([True, True, False]))
    counts[2, 9], counts[0, 9] = 6, 0x8001
    np.testing.assert_array_equal(got, counts)


def test_a_full_count_stays_full_and_a_row_out_of_range_is_dropped():
    counts = jnp.full((2, VOCAB), 0x7FFF, jnp.uint16).at[1].set(0xFFFF)
    expected = np.asarray(counts).copy()
    rows, tokens = jnp.asarray([0, 1, 2], jnp.int32), jnp.asarray([4, 5, 6], jnp.int32)
    got = COUNT(counts, rows, tokens, jnp.asarray([True, True, True]))
    np.testing.assert_array_equal(got, expected)


def test_each_penalty_alone_makes_a_row_penalised():
    rows = [{}, {"presence": 0.1}, {"frequency": -0.1}, {"repetition": 1.1}]
    assert penalised(rows_of(rows)).tolist() == [False, True, True, True]
