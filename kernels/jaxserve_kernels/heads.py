"""Queries by the kv head they read."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve_kernels.arguments import Extras


def scaled_queries(q_XNH: jax.Array, scale: float, num_kv_heads: int, extras: Extras) -> jax.Array:
    """Queries by kv head, times ``scale`` and the keys' own: float32 [X, K, G, H]."""
    X, N, H = q_XNH.shape
    q_XKGH = q_XNH.reshape(X, num_kv_heads, N // num_kv_heads, H).astype(jnp.float32) * scale
    return q_XKGH if extras.k_scale_K is None else q_XKGH * extras.k_scale_K[None, :, None, None]


def finished(out_XKGH: jax.Array, extras: Extras, dtype: jnp.dtype) -> jax.Array:
    """Results of ``scaled_queries`` times the values' scale, in ``dtype``: [X, N, H]."""
    if extras.v_scale_K is not None:
        out_XKGH = out_XKGH * extras.v_scale_K[None, :, None, None]
    X, K, G, H = out_XKGH.shape
    return out_XKGH.reshape(X, K * G, H).astype(dtype)
