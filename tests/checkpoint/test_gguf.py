"""GGUF files: tensors under Hugging Face names and order, and a header that is not believed."""

import math
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.checkpoint import load_checkpoint
from jaxserve.checkpoint.gguf_file import GGUFFile
from jaxserve.checkpoint.gguf_model import parse_gguf_config
from jaxserve.config import RopeScaling
from jaxserve.errors import BootError, CheckpointError, UnsupportedModel
from tests.golden.gguf_fixture import write_gguf
from tests.golden.weights import draw_tensors, family_config

UP = "model.layers.0.mlp.up_proj.weight"


def write_family(path: Path, family: str, **options) -> Path:
    config = family_config(family)
    return write_gguf(path, config, draw_tensors(config), **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    return write_family(tmp_path_factory.mktemp("gguf") / "m.gguf", "llama_tied").read_bytes()


@pytest.mark.parametrize(
    "family", ["llama2_mha", "llama_tied", "llama_bias", "mistral_window", "qwen2_bias"]
)
def test_tensors_come_back_under_their_hugging_face_names_and_in_their_order(tmp_path, family):
    checkpoint = load_checkpoint(str(write_family(tmp_path / "m.gguf", family)))
    wanted = draw_tensors(family_config(family))
    assert list(checkpoint.tensors.shapes) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(checkpoint.tensors.get(name), array)


@pytest.mark.parametrize("family", ["llama2_mha", "llama_tied", "llama_bias", "qwen2_bias"])
def test_the_config_is_the_one_the_hugging_face_file_gives(tmp_path, family):
    raw = family_config(family)
    config = parse_gguf_config(GGUFFile(write_family(tmp_path / "m.gguf", family)))
    assert config.vocab_size == raw["vocab_size"]
    assert config.intermediate_size == raw["intermediate_size"]
    assert config.num_kv_heads == raw["num_key_value_heads"]
    assert config.rope_theta == raw["rope_theta"]
    assert config.rms_norm_eps == pytest.approx(raw["rms_norm_eps"])
    assert config.tie_word_embeddings == raw["tie_word_embeddings"]
    assert config.qkv_bias == (family != "llama2_mha" and family != "llama_tied")
    assert config.o_bias == raw.get("attention_bias", False)
    assert config.mlp_bias == raw.get("mlp_bias", False)
    assert config.dtype == "float32"


def test_explicit_head_sizes_and_a_window_are_read(tmp_path):
    path = write_family(
        tmp_path / "m.gguf", "mistral_window", metadata={"llama.attention.sliding_window": 8}
    )
    config = parse_gguf_config(GGUFFile(path))
    assert config.head_dim == 32
    assert config.sliding_window == 8


# The largest error of a stored value, as a share of the largest weight: half a step. The step
# itself is rounded to float16.
STEP = {
    Q.F16: 2**-11,
    Q.BF16: 2**-8,
    Q.Q8_0: 1 / 254,
    Q.Q5_0: 1 / 16,
    Q.Q5_1: 1 / 31,
    Q.Q4_0: 1 / 8,
    Q.Q4_1: 1 / 15,
}


@pytest.mark.parametrize("kind", STEP)
def test_a_quantised_tensor_is_its_source_up_to_half_a_step(tmp_path, kind):
    config = family_config("llama_tied")
    tensors = draw_tensors(config)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, types={UP: kind})
    got = load_checkpoint(str(path)).tensors.get(UP).astype(np.float32)
    assert got.shape == tensors[UP].shape
    largest = np.abs(tensors[UP]).max()
    assert np.abs(got - tensors[UP]).max() <= largest * (STEP[kind] + 2**-11)


def k_block(kind: Q) -> tuple[bytes, float]:
    """One block of 256 equal values, laid out by hand, and the value."""
    one, zero = np.float16(1).tobytes(), np.float16(0).tobytes()
    scales = bytes([1] * 4 + [0] * 4 + [1] * 4)  # eight 6-bit scales of 1, eight minima of 0
    if kind == Q.Q4_K:
        return one + zero + scales + b"\x33" * 128, 3.0
    if kind == Q.Q5_K:  # all fifth bits set: 3 + 16
        return one + zero + scales + b"\xff" * 32 + b"\x33" * 128, 19.0
    return b"\x33" * 128 + b"\x00" * 64 + b"\x01" * 16 + one, 3.0 - 32.0  # Q6_K


@pytest.mark.parametrize("kind", [Q.Q4_K, Q.Q5_K, Q.Q6_K])
def test_a_k_quantised_block_is_what_its_layout_says(tmp_path, kind):
    block, value = k_block(kind)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    raw = np.frombuffer(block * 6, np.uint8).reshape(3, -1)  # 3 rows of 512
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = GGUFFile(tmp_path / "m.gguf").load("token_embd.weight")
    np.testing.assert_array_equal(got, np.full((3, 512), value, np.float32))


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [((), "float32"), ((Q.F16,), "float16"), ((Q.BF16,), "bfloat16"), ((Q.Q4_1,), "bfloat16")],
)
def test_the_dtype_is_the_widest_the_stored_matrices_need(tmp_path, kinds, dtype):
    types = dict.fromkeys([UP], kinds[0]) if kinds else {}
    path = write_family(tmp_path / "m.gguf", "llama_tied", types=types)
    assert parse_gguf_config(GGUFFile(path)).dtype == dtype


def llama3_factor(i: int, head_dim: int, theta: float, factor: float) -> float:
    """Llama 3.1's rule for one frequency, case by case."""
    wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
    if wavelength < 8192 / 4:
        return 1.0
    if wavelength > 8192 / 1:
        return factor
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return 1 / ((1 - smooth) / factor + smooth)


def write_with_factors(path: Path, factors: list[float]) -> Path:
    config = family_config("llama_tied") | {"rope_theta": 500_000.0}
    extra = {"rope_freqs.weight": factors}
    return write_gguf(path, config, draw_tensors(config), extra=extra)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_found_again_from_the_factors_a_file_keeps(tmp_path, factor):
    factors = [llama3_factor(i, 32, 500_000.0, factor) for i in range(16)]
    config = parse_gguf_config(GGUFFile(write_with_factors(tmp_path / "m.gguf", factors)))
    assert config.rope_scaling == RopeScaling(kind="llama3", factor=factor, original_max=8192)


def test_factors_of_one_are_no_scaling(tmp_path):
    path = write_with_factors(tmp_path / "m.gguf", [1.0] * 16)
    assert load_checkpoint(str(path)).config.rope_scaling is None


def test_factors_of_another_rule_are_refused(tmp_path):
    path = write_with_factors(tmp_path / "m.gguf", [1.0] * 8 + [8.0] * 8)
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight does not follow"):
        load_checkpoint(str(path))


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"type": "none", "factor": 4.0}, None),
        ({"factor": 4.0}, RopeScaling(kind="linear", factor=4.0)),
        ({"type": "linear", "factor": 4.0}, RopeScaling(kind="linear", factor=4.0)),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32},
            RopeScaling(
                kind="yarn",
                factor=4.0,
                original_max=32,
                attention_factor=pytest.approx(1 + 0.1 * math.log(4)),
            ),
        ),
    ],
)
def test_rope_scaling_metadata_is_read(tmp_path, metadata, scaling):
    entries = {f"llama.rope.scaling.{key}": value for key, value in metadata.items()}
    path = write_family(tmp_path / "m.gguf", "llama_tied", metadata=entries)
    assert parse_gguf_config(GGUFFile(path)).rope_scaling == scaling


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"general.architecture": "gemma"}, "'gemma'.*llama, qwen2"),
        ({"llama.expert_count": 8}, "expert_count=8"),
        ({"split.count": 3}, r"split\.count=3"),
        ({"llama.rope.dimension_count": 16}, "dimension_count=16"),
        ({"llama.attention.value_length": 16}, "value_length=16"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope.*yarn"),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'.*gpt2"),
    ],
)
def test_a_feature_of_the_file_that_is_lacking_is_refused_by_name(tmp_path, metadata, named):
    path = write_family(tmp_path / "m.gguf", "llama_tied", metadata=metadata)
    with pytest.raises(UnsupportedModel, match=named):
        load_checkpoint(str(path))


def test_a_tensor_type_that_is_lacking_is_refused_with_the_list(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    raw = np.zeros((2, gguf.GGML_QUANT_SIZES[Q.Q2_K][1]), np.uint8)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=Q.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"token_embd.* is Q2_K; supported: F32.*Q6_K"):
        GGUFFile(tmp_path / "m.gguf")


def test_a_tensor_nobody_asked_for_is_refused_by_its_own_name(tmp_path):
    config = family_config("llama_tied")
    path = write_gguf(
        tmp_path / "m.gguf",
        config,
        draw_tensors(config),
        extra={"blk.0.attn_q_norm.weight": [1.0] * 32},
    )
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q_norm\.weight"):
        load_checkpoint(str(path))


def test_the_usual_end_marks_stop_beside_the_one_id_a_file_names(tmp_path):
    vocabulary = {
        "model": "gpt2",
        "tokens": ["<|endoftext|>", "a", "<|eot_id|>", "<|im_end|>", "b"],
        "types": [3, 1, 3, 1, 1],  # <|im_end|> is an ordinary token here
        "merges": [],
    }
    path = write_family(tmp_path / "m.gguf", "llama_tied", vocabulary=vocabulary)
    assert parse_gguf_config(GGUFFile(path)).eos_token_ids == (2, 0)


@pytest.mark.parametrize(
    ("at", "form", "value", "message"),
    [
        (0, "<I", 0x46554746, "not a GGUF file"),
        (4, "<I", 1, "version 1"),
        (4, ">I", 3, "little-endian"),
        (8, "<Q", 2**40, "tensor count of 1099511627776 would take"),
        (8, "<Q", 2**64 - 1, "tensor count"),
        (16, "<Q", 2**63, "metadata count"),
        (24, "<Q", 2**62, "metadata key would take"),
    ],
)
def test_an_absurd_header_is_refused_before_anything_is_allocated(
    tmp_path, whole, at, form, value, message
):
    data = bytearray(whole)
    struct.pack_into(form, data, at, value)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(tmp_path / "m.gguf")


def test_an_absurd_array_length_is_refused_before_anything_is_allocated(tmp_path):
    vocabulary = {"model": "gpt2", "tokens": ["a", "b", "c"], "types": [1] * 3, "merges": []}
    path = write_family(tmp_path / "m.gguf", "llama_tied", vocabulary=vocabulary)
    data = bytearray(path.read_bytes())
    for key in (b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type"):
        struct.pack_into("<Q", data, data.index(key) + len(key) + 8, 2**50)
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="would take"):
            GGUFFile(path)


def test_every_truncation_is_refused(tmp_path, whole):
    path = tmp_path / "m.gguf"
    header = whole.index(b"output_norm.weight") + 100
    for kept in [*range(0, header, 7), len(whole) - 1]:
        path.write_bytes(whole[:kept])
        with pytest.raises(CheckpointError):
            GGUFFile(path)


@given(at=st.integers(0, 3000), value=st.integers(0, 255))
def test_any_changed_byte_of_the_header_is_refused_or_harmless(tmp_path_factory, whole, at, value):
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    data = bytearray(whole)
    data[at] = value
    path.write_bytes(data)
    name, refusal = "model.norm.weight", ""
    try:
        tensors = load_checkpoint(str(path)).tensors
        assert tensors.get(name).shape == tensors.shapes[name]
    except BootError as error:
        refusal = str(error)
    assert "\n" not in refusal
