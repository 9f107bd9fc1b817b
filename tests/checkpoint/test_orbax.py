"""Orbax checkpoints in and out: the layout of the nnx module, bit for bit, and what is refused."""

import json
from dataclasses import replace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jaxserve.checkpoint import load_checkpoint
from jaxserve.checkpoint.export import hf_config
from jaxserve.checkpoint.orbax_files import OrbaxTensors, find_orbax, write_orbax
from jaxserve.checkpoint.tensors import expected_shapes
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.model.definition import LlamaForCausalLM, params_of
from jaxserve.runtime.placing import place_params
from tests.models import FULL, TINY

UNTIED = replace(TINY, tie_word_embeddings=False)


def saved(path, config, tree):
    """An Orbax checkpoint of ``tree`` beside a config.json, as a training run would leave it."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf_config(config)))
    with ocp.StandardCheckpointer() as writer:
        writer.save(path / "params", tree)
    return path


def drawn(config, dtype="float32"):
    rng = np.random.default_rng(3)
    return {
        name: rng.standard_normal(shape).astype(np.dtype(dtype))
        for name, shape in expected_shapes(config).items()
    }


@pytest.mark.parametrize("config", [UNTIED, FULL], ids=["untied", "full"])
@pytest.mark.parametrize("pure", [False, True], ids=["nnx-state", "pure-dict"])
def test_a_plain_nnx_checkpoint_becomes_the_parameters_of_the_module_it_was_saved_from(
    config, pure, tmp_path
):
    module = LlamaForCausalLM(config, rngs=nnx.Rngs(1))
    state = nnx.state(module)
    path = saved(tmp_path / "model", config, nnx.to_pure_dict(state) if pure else state)
    checkpoint = load_checkpoint(str(path), load_format="orbax")
    got = place_params(checkpoint.config, config.dtype, checkpoint, lambda *told: None)
    jax.tree.map(np.testing.assert_array_equal, got, params_of(module))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_come_back_from_orbax_bit_for_bit(dtype, tmp_path):
    tensors = drawn(UNTIED, dtype)
    write_orbax(tmp_path / "model", tensors.items())
    found = find_orbax(tmp_path / "model")
    assert found is not None
    source = OrbaxTensors(found, replace(UNTIED, dtype=dtype))
    for name, array in tensors.items():
        got = source.get(name)
        assert got.dtype == array.dtype
        assert got.tobytes() == array.tobytes(), name


def test_a_model_larger_than_a_group_is_written_in_several(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxserve.checkpoint.orbax_files._GROUP_BYTES", 4096)
    tensors = drawn(UNTIED)
    write_orbax(tmp_path / "model", iter(tensors.items()))
    found = find_orbax(tmp_path / "model")
    assert found is not None
    source = OrbaxTensors(found, UNTIED)
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(source.get(name), tensors[name])


def test_a_restored_tree_is_the_state_of_the_module(tmp_path):
    """What is written here, a training run can restore into its module without knowing us."""
    tensors = drawn(UNTIED)
    write_orbax(tmp_path / "model", tensors.items())
    found = find_orbax(tmp_path / "model")
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.restore(found)
    module = LlamaForCausalLM(UNTIED, rngs=nnx.Rngs(0))
    wanted = nnx.to_pure_dict(nnx.state(module))
    paths = {"/".join(str(k.key) for k in path) for path, _ in jax.tree.leaves_with_path(tree)}
    assert paths == {
        "/".join(str(k.key) for k in path) for path, _ in jax.tree.leaves_with_path(wanted)
    }


def test_a_missing_leaf_is_named(tmp_path):
    tensors = drawn(UNTIED)
    del tensors["model.norm.weight"]
    write_orbax(tmp_path / "model", tensors.items())
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        OrbaxTensors(find_orbax(tmp_path / "model"), UNTIED)


def test_a_leaf_of_another_shape_is_named_with_both_shapes(tmp_path):
    tensors = drawn(UNTIED)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1]
    write_orbax(tmp_path / "model", tensors.items())
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has shape .* the config wants"):
        OrbaxTensors(find_orbax(tmp_path / "model"), UNTIED)


def test_a_leaf_nobody_asked_for_is_refused(tmp_path):
    tensors = drawn(UNTIED)
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(8, np.float32)
    write_orbax(tmp_path / "model", tensors.items())
    with pytest.raises(CheckpointError, match="q_norm"):
        OrbaxTensors(find_orbax(tmp_path / "model"), UNTIED)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"tree_metadata": 3}', b"\xff\xfe"])
def test_a_damaged_tree_is_one_clear_error(damage, tmp_path):
    write_orbax(tmp_path / "model", drawn(UNTIED).items())
    found = find_orbax(tmp_path / "model")
    assert found is not None
    (found / "_METADATA").write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"not a whole Orbax tree|is missing"):
        OrbaxTensors(found, UNTIED)


def test_a_format_that_is_not_there_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config(TINY)))
    with pytest.raises(CheckpointError, match="--load-format orbax"):
        load_checkpoint(str(tmp_path), load_format="orbax")
    assert issubclass(CheckpointError, Exception)
    with pytest.raises((CheckpointError, ConfigError)):
        load_checkpoint(str(tmp_path))
