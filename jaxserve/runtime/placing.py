"""Weights onto the device."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoint.load import Checkpoint
from jaxserve.config import ModelConfig
from jaxserve.model.definition import init_params
from jaxserve.model.params import Params, build_params


def place_params(
    model: ModelConfig,
    dtype: str,
    checkpoint: Checkpoint,
    progress: Callable[[str, int, int], None],
    *,
    stacked: bool = False,
) -> Params:
    """The checkpoint's weights, fused and on the device in ``dtype``; random without tensors.

    ``stacked``: with the layers in one, see ``Params``.
    """
    if checkpoint.tensors is None:
        return jax.block_until_ready(init_params(model, dtype, seed=0, stacked=stacked))
    tensors = checkpoint.tensors
    total, done = len(tensors.shapes), 0

    def get(name: str) -> np.ndarray:
        nonlocal done
        array = tensors.get(name)
        done += 1
        progress("loading tensors", done, total)
        return array

    return build_params(
        model,
        get,
        put=lambda a: jax.device_put(a.astype(jnp.dtype(dtype))),
        stacked=stacked,
    )
