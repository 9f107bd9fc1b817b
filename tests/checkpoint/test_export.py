"""A model written as a Hugging Face directory is the same model when it is read."""

import json
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.checkpoint import load_checkpoint
from jaxserve.checkpoint.export import hf_config, write_safetensors
from jaxserve.checkpoint.hf_config import parse_hf_config
from jaxserve.checkpoint.tensors import expected_shapes
from jaxserve.config import RopeScaling
from tests.golden.weights import FAMILIES, family_config
from tests.models import FULL, TINY

MODELS = [
    *(parse_hf_config(family_config(name)) for name in FAMILIES),
    replace(TINY, rope_scaling=RopeScaling(kind="linear", factor=2.0)),
    replace(FULL, eos_token_ids=(2, 0), bos_token_id=1, sliding_window=None),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m.architecture}-{m.hidden_size}")
def test_a_config_is_read_back_as_it_was(model):
    assert parse_hf_config(json.loads(json.dumps(hf_config(model)))) == model


@pytest.mark.parametrize("shard_bytes", [1, 5000, 10**9])
def test_shards_of_any_size_hold_every_tensor_bit_for_bit(shard_bytes, tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in expected_shapes(TINY).items()
    }
    write_safetensors(tmp_path, iter(tensors.items()), shard_bytes)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(TINY)))
    source = load_checkpoint(str(tmp_path)).tensors
    assert source is not None
    for name, array in tensors.items():
        np.testing.assert_array_equal(source.get(name), array)
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) == (len(tensors) if shard_bytes == 1 else max(1, len(shards)))
    if shard_bytes == 5000:
        data = {f: sum(tensors[n].nbytes for n in names) for f, names in by_file(tmp_path).items()}
        alone = [f for f, names in by_file(tmp_path).items() if len(names) == 1]
        assert all(size <= 5000 for f, size in data.items() if f not in alone)


def by_file(directory):
    files = {}
    for name, file in json.loads((directory / "model.safetensors.index.json").read_text())[
        "weight_map"
    ].items():
        files.setdefault(file, []).append(name)
    return files
