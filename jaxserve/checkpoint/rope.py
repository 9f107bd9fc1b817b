"""How the rotary embedding of a checkpoint was stretched, from a config or from factors."""

from __future__ import annotations

import math

import numpy as np

from jaxserve.checkpoint.values import Values, short
from jaxserve.config import RopeScaling
from jaxserve.errors import CheckpointError, UnsupportedModel

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def parse_hf_rope(values: Values, max_positions: int) -> tuple[float, RopeScaling | None, int]:
    """(rope_theta, scaling, positions served) of a config.json, in either of its spellings.

    Old: ``rope_theta`` beside ``rope_scaling`` with ``type`` or ``rope_type``. New: both inside
    ``rope_parameters``. YaRN configs often keep the length before stretching in
    ``max_position_embeddings``; original times factor is served then.
    """
    raw = values.raw.get("rope_scaling") or values.raw.get("rope_parameters") or {}
    if not isinstance(raw, dict) or any(isinstance(v, dict) for v in raw.values()):
        raise UnsupportedModel(f"{values.file}: rope parameters per layer: {short(raw)}")
    rope = Values(raw, f"{values.file}: rope_parameters")
    theta = rope.positive("rope_theta", values.positive("rope_theta", 10_000.0))
    if raw.get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedModel(
            f"{values.file}: partial_rotary_factor={short(raw['partial_rotary_factor'])} is not "
            "supported"
        )
    kind = raw.get("rope_type") or raw.get("type") or "default"
    # A top-level value wins, as in transformers; without any, positions were never stretched.
    original = values.optional_count("original_max_position_embeddings")
    original = original or rope.count("original_max_position_embeddings", max_positions)
    if kind == "default":
        return theta, None, max_positions
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=rope.positive("factor")), max_positions
    if kind == "llama3":
        scaling = RopeScaling(
            kind="llama3",
            factor=rope.positive("factor"),
            original_max=original,
            low_freq_factor=rope.positive("low_freq_factor"),
            high_freq_factor=rope.positive("high_freq_factor"),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise CheckpointError(
                f"{rope.file}: high_freq_factor={scaling.high_freq_factor} must be above "
                f"low_freq_factor={scaling.low_freq_factor}"
            )
        return theta, scaling, max_positions
    if kind == "yarn":
        scaling = RopeScaling(
            kind="yarn",
            factor=rope.positive("factor"),
            original_max=original,
            beta_fast=rope.positive("beta_fast", 32.0),
            beta_slow=rope.positive("beta_slow", 1.0),
            attention_factor=rope.optional_number("attention_factor"),
            mscale=rope.optional_number("mscale"),
            mscale_all_dim=rope.optional_number("mscale_all_dim"),
            truncate=rope.flag("truncate", True),
        )
        if scaling.attention_factor == 0:
            raise CheckpointError(f"{rope.file}: attention_factor=0, must be above 0")
        return theta, scaling, max(max_positions, int(original * scaling.factor))
    raise UnsupportedModel(
        f"{values.file}: rope type {short(kind)} is not supported; supported: "
        f"{', '.join(ROPE_TYPES)}"
    )


def parse_gguf_rope(values: Values, arch: str) -> RopeScaling | None:
    """The scaling that GGUF metadata ``{arch}.rope.scaling.*`` describes.

    llama.cpp multiplies cos and sin by attn_factor * (1 + 0.1 ln factor) under YaRN, and takes
    a factor without a type for linear.
    """
    prefix = f"{arch}.rope.scaling"
    factor = values.optional_number(f"{prefix}.factor") or 1.0
    kind = values.text(f"{prefix}.type") or "linear"
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind != "yarn":
        raise UnsupportedModel(
            f"{values.file}: {prefix}.type={short(kind)} is not supported; supported: none, "
            "linear, yarn, and llama3 as factors"
        )
    for key in ("yarn_log_multiplier", "yarn_ext_factor"):
        if values.optional_number(f"{prefix}.{key}") not in (None, 1.0):
            raise UnsupportedModel(f"{values.file}: {prefix}.{key} is not supported")
    attn_factor = values.positive(f"{prefix}.attn_factor", 1.0)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max=values.count(
            f"{prefix}.original_context_length", values.count(f"{arch}.context_length")
        ),
        beta_fast=values.positive(f"{prefix}.yarn_beta_fast", 32.0),
        beta_slow=values.positive(f"{prefix}.yarn_beta_slow", 1.0),
        attention_factor=attn_factor * (1.0 + 0.1 * math.log(factor)) if factor > 1 else None,
    )


def llama3_factors(scaling: RopeScaling, theta: float, head_dim: int) -> np.ndarray:
    """What each of the head_dim / 2 frequencies is divided by, float64 (Llama 3.1's rule)."""
    assert scaling.original_max is not None
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_max / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling.factor + smooth)


def scaling_from_factors(factors: np.ndarray, theta: float, file: str) -> RopeScaling | None:
    """The scaling behind a GGUF file's ``rope_freqs.weight`` [head_dim / 2], float32.

    The file keeps only what each frequency is divided by. Llama 3.1 to 3.3 all stretch 8192
    positions with low and high factors 1 and 4, so the largest entry is the only unknown; factors
    that do not follow from it are refused.
    """
    if np.allclose(factors, 1.0, rtol=1e-6):
        return None
    scaling = RopeScaling(
        kind="llama3",
        factor=round(float(factors.max()), 4),
        original_max=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    if not np.allclose(factors, llama3_factors(scaling, theta, 2 * len(factors)), rtol=1e-4):
        raise UnsupportedModel(
            f"{file}: rope_freqs.weight does not follow from Llama 3's scaling "
            f"(8192 positions, factor {scaling.factor:g}); other factors are not supported"
        )
    return scaling
