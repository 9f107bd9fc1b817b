"""The draw under all options at once: frequencies of every row against its exact distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.model.linear import cpu_compiler_options
from jaxserve.model.next_token import idle_as_neutral, next_tokens
from jaxserve.plan.batch import NEUTRAL_SAMPLING, PROCESSED_LOGPROBS, LogitBias
from tests.models import pack_mask, rows_of

VOCAB = 50
DRAW = jax.jit(
    lambda logits, sampling, bias, mask, counts, positions: next_tokens(
        logits, sampling, bias, mask, lambda: counts, positions
    ),
    compiler_options=cpu_compiler_options(),
)

# One row each: its settings, what biases it, what it may draw, its prompt and its output.
MIXTURE = [
    ({"temperature": 1.0}, {}, None, (), ()),
    ({"temperature": 0.7, "presence": 1.5}, {}, None, (1, 2), (3, 3, 4)),
    ({"temperature": 1.0, "frequency": 0.8}, {}, None, (), (3, 3, 3, 4)),
    ({"temperature": 1.3, "repetition": 1.8}, {}, None, (5, 6), (7, 7)),
    ({"temperature": 1.0}, {3: 2.5, 4: -100.0}, None, (), ()),
    ({"temperature": 1.0, "top_k": 5}, {}, set(range(0, 50, 2)), (), ()),
    ({"temperature": 1.5, "top_p": 0.6}, {9: 3.0}, set(range(25)), (), ()),
    ({"temperature": 1.0, "min_p": 0.1, "frequency": -0.5, "presence": 0.2}, {}, None, (), (1, 1)),
]


def exact_distribution(logits, settings, bias, allowed, prompt, output):
    """The probabilities one row draws from, straight from the definitions, in float64."""
    x = logits.astype(np.float64)
    for token, value in bias.items():
        x[token] += value
    for token in {*prompt, *output}:
        x[token] *= settings.get("repetition", 1.0) ** (-1 if x[token] > 0 else 1)
    for token in set(output):
        x[token] -= settings.get("frequency", 0.0) * output.count(token)
        x[token] -= settings.get("presence", 0.0)
    p = np.exp((x - x.max()) / settings["temperature"])
    if allowed is not None:
        p[[t for t in range(VOCAB) if t not in allowed]] = 0.0
    p[p < settings.get("min_p", 0.0) * p.max()] = 0.0
    if "top_k" in settings:
        p[p < np.sort(p)[-settings["top_k"]]] = 0.0
    if "top_p" in settings:
        order = np.argsort(-p)
        enough = np.searchsorted(np.cumsum(p[order]) / p.sum(), settings["top_p"])
        p[order[enough + 1 :]] = 0.0
    return p / p.sum()


def inputs():
    rows = len(MIXTURE)
    logits = np.random.default_rng(11).normal(0, 1.5, (rows, VOCAB)).astype(np.float32)
    bias = LogitBias(np.zeros((rows, 300), np.int32), np.zeros((rows, 300), np.float32))
    counts = np.zeros((rows, VOCAB), np.uint16)
    for i, (_, biases, _, prompt, output) in enumerate(MIXTURE):
        bias.ids_XE[i, : len(biases)] = list(biases)
        bias.values_XE[i, : len(biases)] = list(biases.values())
        for token in output:
            counts[i, token] += 1
        counts[i, list(prompt)] |= 0x8000
    mask = np.stack([pack_mask(allowed, VOCAB) for _, _, allowed, _, _ in MIXTURE])
    return logits, bias, mask, counts


@pytest.fixture(scope="module")
def drawn():
    """Tokens [draws, rows]: batches that repeat the mixture, each draw at its own position."""
    repeats = 100
    logits, bias, mask, counts = jax.tree.map(lambda x: np.tile(x, (repeats, 1)), inputs())
    sampling = rows_of([{**settings, "seed": i} for i, (settings, *_) in enumerate(MIXTURE)])
    sampling = jax.tree.map(lambda x: jnp.tile(x, (repeats,) + (1,) * (x.ndim - 1)), sampling)
    tokens = []
    for batch in range(40):
        at = np.repeat(np.arange(repeats, dtype=np.int32) + batch * repeats, len(MIXTURE))
        tokens.append(DRAW(logits, sampling, bias, mask, counts, at)[0].reshape(repeats, -1))
    return np.concatenate(tokens)


@pytest.mark.parametrize("row", range(len(MIXTURE)))
def test_rows_of_one_batch_draw_each_from_its_own_distribution(row, drawn):
    exact = exact_distribution(inputs()[0][row], *MIXTURE[row])
    seen = np.bincount(drawn[:, row], minlength=VOCAB)
    assert not seen[exact == 0].any(), "a token was drawn that cannot be"
    # Rare tokens are pooled so that every expectation is at least 10.
    order = np.argsort(exact)
    expected, counted = exact[order] * seen.sum(), seen[order]
    pooled = int(np.searchsorted(np.cumsum(expected), 10.0)) + 1
    expected = np.append(expected[pooled:], expected[:pooled].sum())
    counted = np.append(counted[pooled:], counted[:pooled].sum())
    statistic = ((counted - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    # Wilson-Hilferty: the 1 - 1e-4 quantile of chi-square; the seeds are fixed.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit


def test_processed_log_probabilities_are_of_the_distribution_drawn_from():
    logits, bias, mask, counts = inputs()
    settings = [{**s, "logprobs": PROCESSED_LOGPROBS} for s, *_ in MIXTURE]
    at = jnp.zeros(len(MIXTURE), jnp.int32)
    tokens, scores = DRAW(logits, rows_of(settings), bias, mask, counts, at)
    for i, row in enumerate(MIXTURE):
        exact = exact_distribution(logits[i], *row)
        assert np.exp(scores.logprobs_X[i]) == pytest.approx(exact[tokens[i]], rel=1e-4)
        listed = np.exp(np.asarray(scores.top_logprobs_XN[i]))
        np.testing.assert_allclose(listed, np.sort(exact)[::-1][:20], rtol=1e-4, atol=1e-7)


def test_a_greedy_row_is_scored_after_its_options_and_without_a_temperature():
    logits, bias, mask, counts = inputs()
    settings = [{"logprobs": PROCESSED_LOGPROBS}] * len(MIXTURE)
    at = jnp.zeros(len(MIXTURE), jnp.int32)
    tokens, scores = DRAW(logits, rows_of(settings), bias, mask, counts, at)
    for i, (_, biases, allowed, *_) in enumerate(MIXTURE):
        exact = exact_distribution(logits[i], {"temperature": 1.0}, biases, allowed, (), ())
        assert tokens[i] == exact.argmax()
        assert np.exp(scores.logprobs_X[i]) == pytest.approx(exact.max(), rel=1e-4)
        assert scores.ranks_X[i] == 1


def test_an_idle_row_asks_for_nothing_whatever_it_holds():
    asked = ("temperature", "top_k", "top_p", "presence", "repetition", "logprobs")
    busy = dict.fromkeys(asked, 3)
    rows = idle_as_neutral(rows_of([busy, busy]), jnp.asarray([False, True]))
    for x, neutral in zip(rows, NEUTRAL_SAMPLING, strict=True):
        assert (np.asarray(x[0]) == neutral).all()
    assert rows.temperature_X[1] == 3.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_weights_draw_no_token_that_is_none(temperature):
    logits, bias, mask, counts = inputs()
    settings = [{"temperature": temperature}] * len(MIXTURE)
    at = np.zeros(len(MIXTURE), np.int32)
    broken = np.full_like(logits, np.nan)
    tokens, _ = DRAW(broken, rows_of(settings), bias, mask, counts, at)
    assert np.asarray(tokens).max() < VOCAB
