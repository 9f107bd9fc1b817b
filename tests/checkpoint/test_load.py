"""load_checkpoint: what a name may be, dummy models, and the errors on the way."""

import subprocess
import sys

import huggingface_hub.constants
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from jaxserve.checkpoint import load_checkpoint
from jaxserve.checkpoint.load import Checkpoint
from jaxserve.checkpoint.tokenizer import TokenizerBundle
from jaxserve.errors import BootError, CheckpointError, ConfigError
from tests.golden.gguf_fixture import write_gguf
from tests.golden.weights import draw_tensors, family_config, write_checkpoint
from tests.models import TINY

FAMILY = "llama_tied"


def test_a_directory_and_a_file_are_told_apart_by_what_they_are(tmp_path):
    config = family_config(FAMILY)
    directory = write_checkpoint(tmp_path / "model", FAMILY)
    file = write_gguf(tmp_path / "weights", config, draw_tensors(config))  # no .gguf in the name
    a, b = load_checkpoint(str(directory)), load_checkpoint(str(file))
    assert a.name == str(directory)
    assert b.name == str(file)
    assert a.tokenizer is None
    assert a.tensors.shapes == b.tensors.shapes
    for name in a.tensors.shapes:
        np.testing.assert_array_equal(a.tensors.get(name), b.tensors.get(name))


def with_tokenizer(config, largest_id):
    """A checkpoint whose tokenizer has ids up to ``largest_id``, an added token."""
    vocab = {f"t{i}": i for i in range(largest_id)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokenizer.add_special_tokens(["<last>"])
    assert tokenizer.token_to_id("<last>") == largest_id
    return Checkpoint(
        name="m", config=config, tokenizer=TokenizerBundle(tokenizer=tokenizer), tensors=None
    )


def test_a_tokenizer_fits_up_to_the_vocabularys_last_id_and_may_be_smaller():
    size = TINY.vocab_size
    for largest in (1, size - 2, size - 1):
        checkpoint = with_tokenizer(TINY, largest)
        assert checkpoint.fitting_tokenizer() is checkpoint.tokenizer


def test_a_tokenizer_with_ids_the_model_does_not_know_is_refused_with_both_numbers():
    size = TINY.vocab_size
    with pytest.raises(ConfigError, match=rf"up to {size}, .* ends at {size - 1} .*--tokenizer"):
        with_tokenizer(TINY, size).fitting_tokenizer()


def test_a_checkpoint_without_a_tokenizer_names_the_flag():
    bare = Checkpoint(name="m", config=TINY, tokenizer=None, tensors=None)
    with pytest.raises(ConfigError, match="m has no tokenizer; name one with --tokenizer"):
        bare.fitting_tokenizer()


def test_a_dummy_model_needs_a_config_only_and_reads_no_weights(tmp_path):
    config = family_config(FAMILY)
    directory = write_checkpoint(tmp_path / "model", FAMILY)
    file = write_gguf(tmp_path / "m.gguf", config, draw_tensors(config))
    real = load_checkpoint(str(directory)).config
    (directory / "model.safetensors").unlink()
    for name in (str(directory), str(directory / "config.json"), str(file)):
        dummy = load_checkpoint(name, load_format="dummy")
        assert dummy.tensors is None
        assert dummy.config.hidden_size == real.hidden_size


@pytest.mark.parametrize("load_format", ["safetensors", "gguf"])
def test_a_load_format_that_does_not_fit_names_the_one_that_does(tmp_path, load_format):
    config = family_config(FAMILY)
    directory = write_checkpoint(tmp_path / "model", FAMILY)
    file = write_gguf(tmp_path / "m.gguf", config, draw_tensors(config))
    right, wrong = (directory, file) if load_format == "safetensors" else (file, directory)
    assert load_checkpoint(str(right), load_format=load_format).config.hidden_size == 96
    other = "gguf" if load_format == "safetensors" else "safetensors"
    with pytest.raises(CheckpointError, match=f"use --load-format {other}"):
        load_checkpoint(str(wrong), load_format=load_format)


@pytest.mark.parametrize(
    "name", ["no/such/path", "missing", "/no/where", "a b/c", "x" * 5000, "~nobody-here/x", ""]
)
def test_a_name_that_is_nothing_is_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "":
        (tmp_path / "config.json").write_text("{}")  # "" is the current directory
    with pytest.raises(BootError) as error:
        load_checkpoint(name)
    assert "\n" not in str(error.value)


def test_a_hub_id_that_is_not_at_hand_offline_is_one_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="owner/model: no such local path, and the hub") as e:
        load_checkpoint("owner/model")
    assert "\n" not in str(e.value)


def test_a_directory_with_only_a_gguf_file_points_at_the_file(tmp_path):
    config = family_config(FAMILY)
    write_gguf(tmp_path / "m.gguf", config, draw_tensors(config))
    with pytest.raises(CheckpointError, match=r"no config\.json.*/m\.gguf"):
        load_checkpoint(str(tmp_path))


def test_the_tokenizer_may_come_from_elsewhere(tmp_path):
    directory = write_checkpoint(tmp_path / "model", FAMILY)
    vocabulary = {
        "model": "llama",
        "tokens": ["a", "b", "c"],
        "types": [1] * 3,
        "scores": [0.0] * 3,
        "add_space_prefix": False,
    }
    other = write_gguf(tmp_path / "m.gguf", family_config(FAMILY), {}, vocabulary=vocabulary)
    bundle = load_checkpoint(str(directory), tokenizer=str(other)).tokenizer
    assert bundle is not None
    assert bundle.tokenizer.encode("cab").ids == [2, 0, 1]
    with pytest.raises(CheckpointError, match=r"--tokenizer .*holds no tokenizer"):
        load_checkpoint(str(directory), tokenizer=str(directory))


def test_stop_ids_of_the_generation_config_are_read_from_the_directory(tmp_path):
    directory = write_checkpoint(tmp_path / "model", FAMILY)
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load_checkpoint(str(directory)).config.eos_token_ids == (5, 6, 2)


def test_the_room_does_not_import_jax():
    code = "import sys, jaxserve.checkpoint; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
