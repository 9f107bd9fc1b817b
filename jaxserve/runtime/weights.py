"""New weights in the place of those in use, checked before anything changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoint import load_checkpoint
from jaxserve.config import ModelConfig
from jaxserve.errors import CheckpointError, ConfigError, InvalidWeights
from jaxserve.model.canonical import (
    canonical_specs,
    canonical_tree,
    check_canonical,
    check_leaf,
    check_params,
    fuse_params,
    pure_tree,
    replace_params,
)
from jaxserve.model.params import (
    LayerParams,
    Params,
    build_params,
    insert_layer,
    stack_layers,
)
from jaxserve.runtime.executables import StepShapes


def first_params(tree: Any, model: ModelConfig, dtype: str, *, stacked: bool) -> Params:
    """The parameters an engine starts with: ``Params`` as they are, canonical weights fused.

    Raises InvalidWeights naming the leaf.
    """
    if isinstance(tree, Params):
        check_params(tree, model, dtype, stacked=stacked)
        return jax.device_put(tree)
    tree = pure_tree(tree)
    check_canonical(tree, model, dtype)
    return fuse_params(jax.device_put(tree), model, stacked)


class Saving:
    """A checkpoint on its way to the disk; the engine runs on meanwhile."""

    def __init__(self, checkpointer: Any, path: Path) -> None:
        self._checkpointer = checkpointer
        self.path = path

    def wait(self) -> Path:
        """Block until the checkpoint is whole and return where it is. Raises OSError."""
        self._checkpointer.wait_until_finished()
        self._checkpointer.close()
        return self.path


def save_params(params: Params, model: ModelConfig, path: Path) -> Saving:
    """Start to save ``params`` as an Orbax checkpoint at ``path``, in the nnx module's layout.

    They are copied off the device before this returns, so they may change at once; arrays keep
    their sharding in the checkpoint. Raises ConfigError for a path that exists.
    """
    import orbax.checkpoint as ocp

    path = path.expanduser().absolute()
    if path.exists():
        raise ConfigError(f"{path} exists; name a directory that does not")
    tree = jax.jit(canonical_tree, static_argnums=1)(params, model)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(path, tree)
    return Saving(checkpointer, path)


@dataclass(frozen=True)
class HostParams:
    """Fused weights in host memory, one LayerParams a layer, checked against a model."""

    params: Params


@dataclass(frozen=True)
class Canonical:
    """Canonical weights on the device, checked against a model."""

    tree: Any


Fitting = Params | HostParams | Canonical
"""Weights that fit an engine, in one of the forms that ``updated_params`` puts in place."""


def fitting_weights(tree: Any, shapes: StepShapes, device: Any) -> Fitting:
    """``tree`` checked against the model and, but for a checkpoint's, on ``device``.

    * ``Params`` in the engine's layout are taken as they are, without a copy. They stay the
      caller's too, who must not donate them while the engine has them.
    * canonical weights, see model/canonical.py.
    * a path to a checkpoint is read to the host, or was by ``read_params``.

    Raises InvalidWeights naming the leaf, or saying what kind of thing came instead.
    """
    model, dtype, stacked = shapes.model, shapes.dtype, shapes.stacked
    try:
        if isinstance(tree, str | Path):
            return read_params(Path(tree), shapes)
        if isinstance(tree, HostParams):
            return tree
        if isinstance(tree, Params):
            check_params(tree, model, dtype, stacked=stacked)
            return jax.block_until_ready(jax.device_put(tree, device))
        tree = pure_tree(tree)
        check_canonical(tree, model, dtype)
        return Canonical(jax.block_until_ready(jax.device_put(tree, device)))
    except (InvalidWeights, MemoryError):
        raise
    except Exception as error:  # a caller's tree may hold anything: donated arrays, strings
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InvalidWeights(f"these weights cannot be used: {why}") from error


def updated_params(
    old: Params, fitting: Fitting, shapes: StepShapes, *, borrowed: bool = False
) -> Params:
    """The parameters that ``fitting`` weights make; ``old`` must not be used afterwards.

    Canonical weights are fused in one jitted call in the memory of ``old``, those of a checkpoint
    placed over it a layer at a time. ``borrowed``: ``old`` are a caller's arrays and left alone;
    the new ones come beside them.
    """
    if isinstance(fitting, Params):
        return fitting
    if isinstance(fitting, HostParams):
        place = _fresh if borrowed else _placed
        return place(old, fitting.params, shapes.stacked)
    if borrowed:
        return fuse_params(fitting.tree, shapes.model, shapes.stacked)
    return replace_params(old, fitting.tree, shapes.model, shapes.stacked)


def read_params(path: Path, shapes: StepShapes) -> HostParams:
    """A checkpoint's weights; any thread may read them while the engine runs.

    Raises InvalidWeights naming the file and the tensor.
    """
    try:
        checkpoint = load_checkpoint(str(path.expanduser()), tokenizer=None)
        if checkpoint.tensors is None:
            raise InvalidWeights(f"{path}: no weights in it")
        for name, spec in canonical_specs(shapes.model, shapes.dtype).items():
            shape = checkpoint.tensors.shapes.get(name)
            if shape is None:
                raise InvalidWeights(f"{path}: {name} is missing")
            check_leaf(f"{path}: {name}", tuple(shape), spec.dtype, spec)
        extra = sorted(
            checkpoint.tensors.shapes.keys() - canonical_specs(shapes.model, shapes.dtype).keys()
        )
        if extra:
            raise InvalidWeights(f"{path}: {extra[0]} is no tensor of this model")
        return HostParams(
            build_params(
                shapes.model,
                checkpoint.tensors.get,
                put=lambda a: np.asarray(a).astype(jnp.dtype(shapes.dtype), copy=False),
            )
        )
    except CheckpointError as error:
        raise InvalidWeights(str(error)) from error


def _fresh(old: Params, host: Params, stacked: bool) -> Params:
    """``host`` on the device beside ``old``."""
    device = jax.tree.leaves(old)[0].sharding
    layers: Any = (jax.device_put(layer, device) for layer in host.layers)
    return Params(
        embed_VD=jax.device_put(host.embed_VD, device),
        layers=stack_layers(layers, len(host.layers)) if stacked else tuple(layers),
        final_norm_D=jax.device_put(host.final_norm_D, device),
        head_VD=jax.tree.map(lambda head: jax.device_put(head, device), host.head_VD),
    )


def _placed(old: Params, host: Params, stacked: bool) -> Params:
    """``host`` on the device; each array of ``old`` goes before the next one comes."""
    device = jax.tree.leaves(old)[0].sharding

    def put(before: jax.Array, new: np.ndarray) -> jax.Array:
        before.delete()
        return jax.device_put(new, device)

    layers: Any
    if stacked:
        assert isinstance(old.layers, LayerParams)
        layers = old.layers
        for i, layer in enumerate(host.layers):
            layers = insert_layer(layers, jax.device_put(layer, device), jnp.int32(i))
    else:
        layers = tuple(
            jax.tree.map(put, before, new)
            for before, new in zip(old.layers, host.layers, strict=True)
        )
    return Params(
        embed_VD=put(old.embed_VD, host.embed_VD),
        layers=layers,
        final_norm_D=put(old.final_norm_D, host.final_norm_D),
        head_VD=jax.tree.map(put, old.head_VD, host.head_VD),
    )
