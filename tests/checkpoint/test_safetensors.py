"""Safetensors directories: every tensor comes back, and a faulty file is named."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxserve.checkpoint import load_checkpoint
from jaxserve.checkpoint.tensors import expected_shapes
from jaxserve.errors import BootError, CheckpointError, UnsupportedModel
from tests.golden.weights import (
    FAMILIES,
    draw_tensors,
    family_config,
    family_golden,
    tensor_shapes,
    weights_sha256,
    write_checkpoint,
)
from tests.mutations import mutated

FAMILY = "llama_tied"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "model", FAMILY)


def shard(directory: Path, *, halves: int = 2) -> dict[str, str]:
    """Split the single file of ``directory`` under an index; returns the weight map."""
    (directory / "model.safetensors").unlink()
    tensors = draw_tensors(family_config(FAMILY))
    names = list(tensors)
    weight_map = {}
    for i in range(halves):
        part = names[i::halves]
        file = f"model-{i + 1:05}-of-{halves:05}.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_of_a_family_are_those_its_golden_outputs_came_from(family):
    digest = weights_sha256(draw_tensors(family_config(family)))
    assert digest == str(family_golden(family)["weights_sha256"])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_every_family_comes_back_bit_for_bit(tmp_path, family):
    checkpoint = load_checkpoint(str(write_checkpoint(tmp_path, family)))
    wanted = draw_tensors(family_config(family))
    assert dict(checkpoint.tensors.shapes) == tensor_shapes(family_config(family))
    assert expected_shapes(checkpoint.config) == tensor_shapes(family_config(family))
    for name, array in wanted.items():
        np.testing.assert_array_equal(checkpoint.tensors.get(name), array)


def test_shards_hold_the_same_tensors_as_one_file(model):
    whole = load_checkpoint(str(model))
    arrays = {name: whole.tensors.get(name) for name in whole.tensors.shapes}
    shard(model, halves=3)
    sharded = load_checkpoint(str(model))
    assert sharded.tensors.shapes == whole.tensors.shapes
    for name, array in arrays.items():
        np.testing.assert_array_equal(sharded.tensors.get(name), array)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_stays_as_it_is_stored(model, dtype):
    tensors = {n: a.astype(dtype) for n, a in draw_tensors(family_config(FAMILY)).items()}
    save_file(tensors, model / "model.safetensors")
    source = load_checkpoint(str(model)).tensors
    for name, array in tensors.items():
        got = source.get(name)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.view(np.uint16), array.view(np.uint16))


def test_what_old_writers_added_is_passed_over(model):
    tensors = draw_tensors(family_config(FAMILY))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, model / "model.safetensors")
    assert "lm_head.weight" not in load_checkpoint(str(model)).tensors.shapes


def changed(model: Path, **changes: np.ndarray | None) -> None:
    tensors = draw_tensors(family_config(FAMILY))
    for name, array in changes.items():
        if array is None:
            del tensors[name]
        else:
            tensors[name] = array
    save_file(tensors, model / "model.safetensors")


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (NORM, None, r"tensor model\.layers\.1\.input_layernorm\.weight is missing.*model\.safe"),
        (NORM, np.ones(95, np.float32), r"model\.safetensors: tensor .*norm.*\[95\].*\[96\]"),
        (NORM, np.ones(96, np.int64), r"model\.safetensors: tensor .*norm.* is I64.*BF16"),
        ("model.layers.0.self_attn.q_norm.weight", np.ones(32, np.float32), "q_norm.*not part of"),
        ("model.layers.3.mlp.up_proj.weight", np.ones((2, 2), np.float32), "not part of"),
    ],
)
def test_a_wrong_tensor_is_one_line_naming_file_and_tensor(model, name, array, message):
    changed(model, **{name: array})
    with pytest.raises(CheckpointError, match=message) as error:
        load_checkpoint(str(model))
    assert "\n" not in str(error.value)


def test_a_wrong_type_is_an_unsupported_model(model):
    changed(model, **{NORM: np.ones(96, np.float64)})
    with pytest.raises(UnsupportedModel, match="F64"):
        load_checkpoint(str(model))


def test_a_missing_shard_is_named(model):
    weight_map = shard(model)
    gone = sorted(set(weight_map.values()))[1]
    (model / gone).unlink()
    with pytest.raises(CheckpointError, match=f"{gone}: shard is missing"):
        load_checkpoint(str(model))


def test_a_tensor_that_the_index_puts_into_the_wrong_shard_is_named(model):
    weight_map = shard(model)
    weight_map[NORM] = next(file for file in weight_map.values() if file != weight_map[NORM])
    write_index(model, weight_map)
    with pytest.raises(CheckpointError, match=f"{weight_map[NORM]}: tensor {NORM} is missing"):
        load_checkpoint(str(model))


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/etc/passwd",
        "a/../../b",
        "..",
        "",
        "a\\b",
        "x" * 5000,
        "a\n",
        "\ud800",
        7,
        None,
    ],
)
def test_an_index_must_not_lead_out_of_its_directory(model, file):
    (model.parent / "model.safetensors").write_bytes(b"")
    write_index(model, shard(model) | {NORM: file})
    with pytest.raises(CheckpointError, match="no file name in this directory"):
        load_checkpoint(str(model))


@pytest.mark.parametrize("weight_map", [None, [], {}, "model.safetensors"])
def test_an_index_without_a_weight_map_is_refused(model, weight_map):
    shard(model)
    write_index(model, weight_map)
    with pytest.raises(CheckpointError, match="weight_map"):
        load_checkpoint(str(model))


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1])
def test_a_truncated_file_is_refused_before_any_tensor_is_read(model, kept):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a whole"):
        load_checkpoint(str(model))


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**9, 0])
def test_a_forged_header_length_is_refused(model, length):
    path = model / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a whole"):
        load_checkpoint(str(model))


def test_a_directory_with_pickled_weights_only_is_told_why(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*read from safetensors"):
        load_checkpoint(str(model))


# Hostile files: one clear error or the model, and nothing else.


def loaded_or_refused(model: Path) -> str:
    """The refusal; empty: it loads, and a tensor of it can be read."""
    try:
        tensors = load_checkpoint(str(model)).tensors
        assert tensors is not None
        assert tensors.get(NORM).shape == tensors.shapes[NORM]
    except BootError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> tuple[Path, dict[str, str], bytes]:
    """A directory of two shards, its weight map, and the bytes of the first shard."""
    directory = write_checkpoint(tmp_path_factory.mktemp("hostile") / "model", FAMILY)
    weight_map = shard(directory)
    return directory, weight_map, (directory / sorted(set(weight_map.values()))[0]).read_bytes()


@given(data=st.data())
@settings(max_examples=60)
def test_any_one_change_of_the_json_beside_the_weights_is_refused_or_harmless(sharded, data):
    directory, weight_map, _ = sharded
    config = json.loads((directory / "config.json").read_text())
    documents = {
        INDEX: {"metadata": {"total_size": 1}, "weight_map": weight_map},
        "generation_config.json": {"eos_token_id": [5, 6], "temperature": 0.6, "_from": {"a": [1]}},
        "config.json": config,
    }
    name = data.draw(st.sampled_from(list(documents)))
    (directory / name).write_text(json.dumps(data.draw(mutated(documents[name]))))
    try:
        assert "\n" not in loaded_or_refused(directory)
    finally:
        write_index(directory, weight_map)
        (directory / "generation_config.json").unlink(missing_ok=True)
        (directory / "config.json").write_text(json.dumps(config))


@given(data=st.data())
@settings(max_examples=60)
def test_any_one_change_of_a_files_header_is_refused_or_harmless(sharded, data):
    directory, weight_map, whole = sharded
    (length,) = struct.unpack("<Q", whole[:8])
    header, rest = whole[8 : 8 + length], whole[8 + length :]
    if data.draw(st.booleans()):
        changed = json.dumps(data.draw(mutated(json.loads(header)))).encode()
    else:
        at = data.draw(st.integers(0, length - 1))
        changed = header[:at] + bytes([data.draw(st.integers(0, 255))]) + header[at + 1 :]
    path = directory / sorted(set(weight_map.values()))[0]
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + rest)
    try:
        assert "\n" not in loaded_or_refused(directory)
    finally:
        path.write_bytes(whole)
