"""Sampling: each filter against numpy, the draw against its exact distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.model import sampling
from jaxserve.model.linear import cpu_compiler_options
from jaxserve.model.sampling import sample, truncate
from tests.models import rows_of

VOCAB = 97


def kept_by_sorting(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that stay, by sorting, in float64."""
    probs = np.exp(logits.astype(np.float64) - logits.max())
    keep = probs >= min_p * probs.max()
    if top_k > 0:
        kth = np.sort(probs)[::-1][min(top_k, len(probs)) - 1]
        keep &= probs >= kth
    order = np.argsort(-np.where(keep, probs, 0.0), kind="stable")
    total, mass, chosen = probs[keep].sum(), 0.0, set()
    for token in order[: keep.sum()]:
        chosen.add(int(token))
        mass += probs[token]
        if mass >= top_p * total:
            break
    return chosen


@pytest.fixture(scope="module")
def jitted_sample():
    return jax.jit(sample, compiler_options=cpu_compiler_options())


@pytest.fixture(scope="module")
def jitted_truncate():
    return jax.jit(truncate, compiler_options=cpu_compiler_options())


@given(
    seed=st.integers(0, 2**16),
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "top_k": st.sampled_from([0, -1, 1, 2, 7, 96, 97, 500]),
                "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
                "min_p": st.sampled_from([0.0, 0.01, 0.2, 1.0]),
            }
        ),
        min_size=4,
        max_size=4,
    ),
)
def test_truncation_keeps_exactly_the_tokens_that_sorting_keeps(jitted_truncate, seed, rows):
    logits = np.random.default_rng(seed).normal(0, 3, (4, VOCAB)).astype(np.float32)
    kept = np.asarray(jitted_truncate(jnp.asarray(logits), rows_of(rows)))
    for row, setting in enumerate(rows):
        got = set(np.flatnonzero(np.isfinite(kept[row])).tolist())
        assert got == kept_by_sorting(logits[row], **setting)
        np.testing.assert_array_equal(kept[row][list(got)], logits[row][list(got)])


@pytest.mark.parametrize("spread", [0.1, 6.0], ids=["flat", "peaked"])
def test_truncation_is_exact_whether_the_threshold_is_among_the_likeliest_or_not(
    spread, jitted_truncate
):
    vocab = 3 * sampling._SORTED
    logits = np.random.default_rng(4).normal(0, spread, (6, vocab)).astype(np.float32)
    rows = [
        {"top_k": 3},
        {"top_k": sampling._SORTED},
        {"top_k": sampling._SORTED + 1, "top_p": 0.9},
        {"top_p": 0.8},
        {"top_p": 0.3, "min_p": 0.2},
        {"top_k": 10, "top_p": 0.999},
    ]
    kept = np.asarray(jitted_truncate(jnp.asarray(logits), rows_of(rows)))
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for row, setting in enumerate(rows):
        got = set(np.flatnonzero(np.isfinite(kept[row])).tolist())
        assert got == kept_by_sorting(logits[row], **(neutral | setting))


def test_a_tie_at_the_kth_place_keeps_every_tied_token(jitted_truncate):
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, :2] = 5.0
    kept = jitted_truncate(jnp.asarray(logits), rows_of([{"top_k": 3}]))
    assert np.isfinite(kept).sum() == VOCAB


def test_temperature_zero_takes_the_lowest_id_of_the_likeliest(jitted_sample):
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, [40, 41]] = 2.0
    logits[1, 3] = -np.inf
    tokens = jitted_sample(jnp.asarray(logits), rows_of([{}, {}]), jnp.zeros(2, jnp.int32))
    assert tokens.tolist() == [40, 0]


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.3, "min_p": 0.1},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_drawn_frequencies_pass_a_chi_square_against_the_exact_distribution(setting, jitted_sample):
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 2, VOCAB).astype(np.float32)
    temperature = setting["temperature"]
    scaled = logits / np.float32(temperature)
    filters = {
        "top_k": setting.get("top_k", 0),
        "top_p": setting.get("top_p", 1.0),
        "min_p": setting.get("min_p", 0.0),
    }
    kept = sorted(kept_by_sorting(scaled, **filters))
    exact = np.exp(scaled[kept].astype(np.float64))
    exact /= exact.sum()

    rows, steps = 64, 100
    tiled = jnp.asarray(np.tile(logits, (rows, 1)))
    sampling = rows_of([{**setting, "seed": i} for i in range(rows)])
    drawn = np.concatenate(
        [jitted_sample(tiled, sampling, jnp.full(rows, p, jnp.int32)) for p in range(steps)]
    )
    counts = np.bincount(drawn, minlength=VOCAB)
    assert counts.sum() == counts[kept].sum(), "a token outside the filters was drawn"
    # Rare tokens are pooled so that every expectation is at least 10.
    order = np.argsort(exact)
    expected, seen = exact[order] * drawn.size, counts[kept][order]
    pooled = np.searchsorted(np.cumsum(expected), 10.0) + 1
    expected = np.append(expected[pooled:], expected[:pooled].sum())
    seen = np.append(seen[pooled:], seen[:pooled].sum())
    statistic = ((seen - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    # Wilson-Hilferty: the 1 - 1e-4 quantile of chi-square; the seeds are fixed.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit


def test_a_seed_draws_the_same_token_in_any_row_beside_any_neighbours(jitted_sample):
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 2, VOCAB).astype(np.float32)
    mine = {"temperature": 1.0, "top_p": 0.95, "seed": 1234}
    alone = jitted_sample(jnp.asarray(logits[None]), rows_of([mine]), jnp.asarray([17], jnp.int32))
    for row in range(4):
        others = rng.normal(0, 5, (4, VOCAB)).astype(np.float32)
        others[row] = logits
        settings = [{"temperature": 0.7, "top_k": 3, "seed": i} for i in range(4)]
        settings[row] = mine
        positions = jnp.asarray([5, 6, 7, 8], jnp.int32).at[row].set(17)
        tokens = jitted_sample(jnp.asarray(others), rows_of(settings), positions)
        assert tokens[row] == alone[0]


def test_another_seed_or_position_draws_other_tokens(jitted_sample):
    logits = jnp.zeros((64, VOCAB), jnp.float32)
    setting = {"temperature": 1.0}
    by_seed = jitted_sample(
        logits, rows_of([{**setting, "seed": i} for i in range(64)]), jnp.zeros(64, jnp.int32)
    )
    by_position = jitted_sample(logits, rows_of([setting] * 64), jnp.arange(64, dtype=jnp.int32))
    assert len(set(by_seed.tolist())) > 30
    assert len(set(by_position.tolist())) > 30


def test_the_noise_is_the_threefry_of_jax_random():
    from jax.extend.random import threefry_2x32

    from jaxserve.model.sampling import _threefry

    key, high = jnp.asarray([0xDEADBEEF, 0x12345678], jnp.uint32), 77
    ours = _threefry(key[None], jnp.asarray([high], jnp.int32), VOCAB)[0]
    counters = jnp.concatenate(
        [jnp.full(VOCAB, high, jnp.uint32), jnp.arange(VOCAB, dtype=jnp.uint32)]
    )
    theirs = threefry_2x32((key[0], key[1]), counters)[:VOCAB]
    np.testing.assert_array_equal(ours, theirs)


def test_the_noise_of_every_extreme_of_the_bits_is_finite():
    from jaxserve.model.sampling import _gumbel

    bits = jnp.asarray([0, 1, 0x1FF, 0x7FFFFFFF, 0xFFFFFE00, 0xFFFFFF00, 0xFFFFFFFF], jnp.uint32)
    for noise in (_gumbel(bits), jax.jit(_gumbel, compiler_options=cpu_compiler_options())(bits)):
        assert np.isfinite(noise).all()
        assert (np.diff(noise) >= 0).all()


@pytest.mark.parametrize(
    "setting", [{"temperature": 2e-38}, {"temperature": 1.0, "top_p": 1e-40}], ids=str
)
def test_a_vanishing_setting_takes_the_likeliest_token(setting, jitted_sample):
    logits = np.random.default_rng(1).normal(0, 3, (1, VOCAB)).astype(np.float32) + 20
    tokens = [
        int(
            jitted_sample(
                jnp.asarray(logits), rows_of([{**setting, "seed": i}]), jnp.zeros(1, jnp.int32)
            )[0]
        )
        for i in range(20)
    ]
    assert set(tokens) == {int(logits.argmax())}
