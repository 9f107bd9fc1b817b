"""Weights onto the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoint.load import Checkpoint
from jaxserve.config import ModelConfig
from jaxserve.model.definition import init_params
from jaxserve.model.params import Params, build_params

# Tensors read side by side, and how many wait at most: they are what host memory holds.
_READERS = 4
_AHEAD = 8


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
    names: list[str] = []
    build_params(model, names.append, concat=lambda parts: None)  # the order it asks in
    with ThreadPoolExecutor(max_workers=_READERS, thread_name_prefix="weights") as readers:
        ahead = deque(readers.submit(tensors.get, name) for name in names[:_AHEAD])
        done = 0

        def get(name: str) -> np.ndarray:
            nonlocal done
            array = ahead.popleft().result()
            done += 1
            if done + len(ahead) < len(names):
                ahead.append(readers.submit(tensors.get, names[done + len(ahead)]))
            progress("loading tensors", done, len(names))
            return array

        try:
            return build_params(
                model,
                get,
                put=lambda a: jax.device_put(a.astype(jnp.dtype(dtype))),
                stacked=stacked,
            )
        finally:
            readers.shutdown(cancel_futures=True)
