"""convert_checkpoint.py: there and back without losing a bit, and what it refuses."""

import json
from pathlib import Path

import convert_checkpoint
import numpy as np
import pytest

from jaxserve.checkpoint import load_checkpoint
from jaxserve.errors import ConfigError
from tests.golden.gguf_fixture import write_gguf
from tests.golden.weights import draw_tensors, family_config, write_checkpoint

TOKENIZERS = Path(__file__).parents[1] / "golden" / "tokenizers.json"


def convert(*arguments):
    return convert_checkpoint.convert(convert_checkpoint.parse_args([str(a) for a in arguments]))


def test_safetensors_to_orbax_and_back_is_bit_exact(tmp_path):
    source = write_checkpoint(tmp_path / "hf", "llama3_gqa")
    said = convert(source, tmp_path / "orbax")
    assert "orbax" in said
    convert(tmp_path / "orbax", tmp_path / "back", "--max-shard-size", "0.0001")
    first = load_checkpoint(str(source))
    there = load_checkpoint(str(tmp_path / "orbax"), load_format="orbax")
    back = load_checkpoint(str(tmp_path / "back"), load_format="safetensors")
    assert first.config == there.config == back.config
    assert first.tensors is not None
    for name in first.tensors.shapes:
        for other in (there, back):
            assert other.tensors is not None
            got, wanted = other.tensors.get(name), first.tensors.get(name)
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(got, wanted, err_msg=name)
    assert (tmp_path / "back" / "model.safetensors.index.json").is_file()


def test_an_output_that_exists_is_left_alone(tmp_path):
    source = write_checkpoint(tmp_path / "hf", "llama_tied")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        convert(source, tmp_path / "out")


def test_what_fails_half_way_leaves_nothing_behind(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "hf", "llama_tied")

    def broken(path, tensors):
        next(iter(tensors))
        raise OSError("No space left on device")

    monkeypatch.setattr(convert_checkpoint, "write_orbax", broken)
    with pytest.raises(OSError, match="No space"):
        convert(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_gguf_model_becomes_a_directory_with_config_and_tokenizer(tmp_path):
    config = family_config("llama_tied")
    vocabulary = json.loads(TOKENIZERS.read_text())["byte_level"]
    path = write_gguf(tmp_path / "tiny.gguf", config, draw_tensors(config), vocabulary=vocabulary)
    convert(path, tmp_path / "out")
    first, second = load_checkpoint(str(path)), load_checkpoint(str(tmp_path / "out"))
    assert second.config == first.config
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"]
    assert first.tensors is not None
    assert second.tensors is not None
    for name in first.tensors.shapes:
        np.testing.assert_array_equal(second.tensors.get(name), first.tensors.get(name))
    assert first.tokenizer is not None
    assert second.tokenizer is not None
    text = "Hello, world 123"
    ids = second.tokenizer.tokenizer.encode(text).ids
    assert ids == first.tokenizer.tokenizer.encode(text).ids
    assert second.tokenizer.special_tokens == first.tokenizer.special_tokens


def test_an_output_relative_to_where_one_stands_is_written_there(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "hf", "llama_tied")
    monkeypatch.chdir(tmp_path)
    convert(source, "out")
    assert load_checkpoint("out", load_format="orbax").config == load_checkpoint(str(source)).config
