"""Log probabilities, ranks and the likeliest tokens against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.model.logprobs import score_draw, score_prompt, score_tokens
from jaxserve.plan.batch import PROCESSED_LOGPROBS, RAW_LOGPROBS, Scores
from tests.models import rows_of

VOCAB, DIM = 61, 5
SCORE = jax.jit(score_tokens)


def check_scores(scores: Scores, i: int, logits: np.ndarray, token: int) -> None:
    """Entry i of ``scores`` is what sorting the softmax of ``logits`` says."""
    exact = logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64))
    order = sorted(range(len(exact)), key=lambda t: (-exact[t], t))[:20]
    np.testing.assert_allclose(scores.logprobs_X[i], exact[token], rtol=1e-5, atol=1e-5)
    assert scores.ranks_X[i] == 1 + sum(exact > exact[token])
    assert np.asarray(scores.top_ids_XN[i]).tolist() == order
    np.testing.assert_allclose(scores.top_logprobs_XN[i], exact[order], rtol=1e-5, atol=1e-5)


@given(
    seed=st.integers(0, 2**16), tokens=st.lists(st.integers(0, VOCAB - 1), min_size=3, max_size=3)
)
def test_a_token_is_scored_as_sorting_the_softmax_says(seed, tokens):
    logits = np.random.default_rng(seed).normal(0, 5, (3, VOCAB)).astype(np.float32)
    scores = SCORE(logits, jnp.asarray(tokens, jnp.int32))
    for i, token in enumerate(tokens):
        check_scores(scores, i, logits[i], token)


def test_equals_share_a_rank_and_are_listed_by_their_ids():
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, [7, 40]] = 3.0
    scores = SCORE(logits, jnp.asarray([40, 0], jnp.int32))
    assert scores.ranks_X.tolist() == [1, 3]
    assert scores.top_ids_XN[0, :4].tolist() == [7, 40, 0, 1]


def test_banned_tokens_come_last_with_a_log_probability_of_minus_infinity():
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, [5, 6]] = [0.0, np.log(3.0)]
    scores = SCORE(logits, jnp.asarray([5], jnp.int32))
    np.testing.assert_allclose(np.exp(scores.top_logprobs_XN[0, :2]), [0.75, 0.25], rtol=1e-6)
    assert np.isneginf(scores.top_logprobs_XN[0, 2:]).all()


def test_vocabularies_under_twenty_tokens_are_listed_whole():
    assert SCORE(np.zeros((1, 3), np.float32), jnp.zeros(1, jnp.int32)).top_ids_XN.shape == (1, 3)


def test_each_row_is_scored_in_the_distribution_it_asked_for():
    rng = np.random.default_rng(3)
    raw, processed = rng.normal(0, 3, (2, 3, VOCAB)).astype(np.float32)
    sampling = rows_of([{"logprobs": PROCESSED_LOGPROBS}, {}, {"logprobs": RAW_LOGPROBS}])
    tokens = jnp.asarray([1, 2, 3], jnp.int32)
    scores = jax.jit(score_draw, static_argnums=3)(raw, tokens, sampling, lambda: processed)
    check_scores(scores, 0, processed[0], 1)
    check_scores(scores, 2, raw[2], 3)


def test_where_nobody_asks_nothing_is_scored():
    logits = jnp.full((2, VOCAB), jnp.nan)
    tokens = jnp.zeros(2, jnp.int32)
    scores = jax.jit(score_draw, static_argnums=3)(
        logits, tokens, rows_of([{}, {}]), lambda: logits
    )
    assert not any(np.asarray(x).any() for x in scores)


@pytest.mark.parametrize("tokens", [1, 31, 32, 40, 100])
@pytest.mark.parametrize("wanted", ["all", "first", "last", "middle"])
def test_targets_are_scored_wherever_they_lie(tokens, wanted):
    rng = np.random.default_rng(tokens)
    head = rng.normal(0, 1, (DIM, VOCAB)).astype(np.float32)
    hidden = rng.normal(0, 2, (tokens, DIM)).astype(np.float32)
    targets = rng.integers(0, VOCAB, tokens).astype(np.int32)
    keep = {"all": slice(None), "first": slice(1), "last": slice(-1, None), "middle": slice(33, 35)}
    unwanted = np.ones(tokens, bool)
    unwanted[keep[wanted]] = False
    targets[unwanted] = -1
    scores = jax.jit(score_prompt, static_argnums=(0, 3))(
        lambda h: h @ head, hidden, targets, VOCAB
    )
    for t in np.flatnonzero(~unwanted):
        check_scores(scores, t, hidden[t] @ head, int(targets[t]))


def test_a_batch_without_targets_computes_no_logits():
    trips = []

    def logits(hidden):
        jax.debug.callback(lambda: trips.append(1))
        return jnp.zeros((hidden.shape[0], VOCAB))

    score = jax.jit(score_prompt, static_argnums=(0, 3))
    score(logits, jnp.zeros((100, DIM)), jnp.full(100, -1, jnp.int32), VOCAB)
    jax.effects_barrier()
    assert trips == []
    score(logits, jnp.zeros((100, DIM)), jnp.full(100, -1, jnp.int32).at[40].set(0), VOCAB)
    jax.effects_barrier()
    assert trips == [1]  # of four tiles, the one that holds the target
