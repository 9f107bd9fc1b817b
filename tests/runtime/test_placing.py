"""Weights onto the device: read ahead in order, in both layouts, and a fault is told."""

import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxserve.checkpoint.load import Checkpoint
from jaxserve.checkpoint.tensors import expected_shapes
from jaxserve.errors import CheckpointError
from jaxserve.runtime.placing import place_params
from tests.models import TINY

MODEL = replace(TINY, num_layers=3)


class Tensors:
    """Random tensors that remember who asked."""

    def __init__(self, broken=None):
        rng = np.random.default_rng(5)
        self.shapes = expected_shapes(MODEL)
        self.arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in self.shapes.items()}
        self.broken = broken
        self.threads = set()
        self.asked = []

    def get(self, name):
        self.threads.add(threading.get_ident())
        self.asked.append(name)
        if name == self.broken:
            raise CheckpointError(f"tensor {name}: cut off")
        return self.arrays[name]


def placed(tensors, stacked, told=lambda *said: None):
    checkpoint = Checkpoint(name="m", config=MODEL, tokenizer=None, tensors=tensors)
    return place_params(MODEL, "float32", checkpoint, told, stacked=stacked)


def test_every_tensor_is_read_once_beside_the_thread_that_places_it():
    tensors, said = Tensors(), []
    params = placed(tensors, False, lambda *told: said.append(told))
    assert sorted(tensors.asked) == sorted(tensors.shapes)
    assert threading.get_ident() not in tensors.threads
    total = len(tensors.shapes)
    assert said == [("loading tensors", i, total) for i in range(1, total + 1)]
    np.testing.assert_array_equal(params.embed_VD, tensors.arrays["model.embed_tokens.weight"])
    down = tensors.arrays["model.layers.2.mlp.down_proj.weight"]
    np.testing.assert_array_equal(params.layers[2].down_DF, down)


def test_stacked_layers_are_the_layers_one_after_the_other():
    apart, stacked = placed(Tensors(), False), placed(Tensors(), True)
    for i, layer in enumerate(apart.layers):
        one = jax.tree.map(lambda a, i=i: a[i], stacked.layers)
        jax.tree.map(np.testing.assert_array_equal, one, layer)


def test_a_tensor_that_cannot_be_read_ends_the_loading_with_its_own_error():
    with pytest.raises(CheckpointError, match="up_proj"):
        placed(Tensors(broken="model.layers.1.mlp.up_proj.weight"), True)
