"""Rotary position embedding: frequencies of a config, and the turn of queries and keys.

Sources: Su et al. 2021 (arXiv 2104.09864) for the embedding, Peng et al. 2023 (arXiv 2309.00071)
for YaRN; the Llama-3.1 release for its scaling.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import ModelConfig, RopeScaling


def _llama3(freqs: np.ndarray, s: RopeScaling, original_max: int) -> np.ndarray:
    """Keep short wavelengths, divide long ones by the factor, blend linearly in between."""
    turns = original_max * freqs / (2 * math.pi)  # full turns over the original context
    keep = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1)
    return freqs * (keep + (1 - keep) / s.factor)


def _yarn(freqs: np.ndarray, s: RopeScaling, original_max: int, theta: float) -> np.ndarray:
    """Divide by the factor the pairs that turn less than beta_slow times, keep those above
    beta_fast, ramp linearly over the pair index in between."""
    pairs = len(freqs)

    def pair_with(turns: float) -> float:
        return pairs * math.log(original_max / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_with(s.beta_fast), pair_with(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001
    stretch = np.clip((np.arange(pairs) - low) / (high - low), 0, 1)
    return freqs * ((1 - stretch) + stretch / s.factor)


def _yarn_magnitude(s: RopeScaling) -> float:
    """YaRN's attention temperature, folded into the length of queries and keys."""
    if s.attention_factor is not None:
        return s.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0

    if s.mscale and s.mscale_all_dim:
        return mscale(s.mscale) / mscale(s.mscale_all_dim)
    return mscale(1.0)


def rotary_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Radians a position for each of the H / 2 pairs (float32), and the factor on the result."""
    pairs = np.arange(0, config.head_dim, 2, dtype=np.float64)
    freqs = config.rope_theta ** (-pairs / config.head_dim)
    magnitude = 1.0
    s = config.rope_scaling
    if s is not None:
        original_max = s.original_max or config.max_position_embeddings
        if s.kind == "linear":
            freqs = freqs / s.factor
        elif s.kind == "llama3":
            freqs = _llama3(freqs, s, original_max)
        else:
            freqs = _yarn(freqs, s, original_max, config.rope_theta)
            magnitude = _yarn_magnitude(s)
    return freqs.astype(np.float32), magnitude


def rotary_table(config: ModelConfig, positions_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin at each position, float32 [T, H / 2]; shared by all layers of a step."""
    freqs, magnitude = rotary_frequencies(config)
    angles = positions_T.astype(jnp.float32)[:, None] * jnp.asarray(freqs)[None, :]
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude


def rotate(x_TXH: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn each head's (first half, second half) pairs by the table's angles; any head count X."""
    cos, sin = (t[:, None, :] for t in table)
    first, second = jnp.split(x_TXH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_TXH.dtype)
