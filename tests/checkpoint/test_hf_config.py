"""config.json and generation_config.json become a ModelConfig, or are refused by name."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.checkpoint.hf_config import parse_hf_config
from jaxserve.checkpoint.values import load_json
from jaxserve.config import RopeScaling
from jaxserve.errors import BootError, CheckpointError, UnsupportedModel
from tests.golden.weights import FAMILIES, family_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}


def test_absent_keys_take_the_values_transformers_gives_them():
    config = parse_hf_config(LLAMA)
    assert config.num_kv_heads == 4
    assert config.head_dim == 16
    assert config.rms_norm_eps == 1e-6
    assert config.rope_theta == 10_000.0
    assert config.rope_scaling is None
    assert config.dtype == "float32"
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()


def test_null_counts_as_absent():
    nulls = {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None, "dtype": None}
    assert parse_hf_config(LLAMA | nulls) == parse_hf_config(LLAMA)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_golden_family_is_read_with_the_sizes_in_its_file(family: str):
    raw = family_config(family)
    config = parse_hf_config(raw)
    assert config.architecture == raw["architectures"][0]
    assert config.hidden_size == raw["hidden_size"]
    assert config.num_kv_heads == raw["num_key_value_heads"]
    assert config.tie_word_embeddings == raw["tie_word_embeddings"]
    assert config.qkv_bias == (raw.get("attention_bias", False) or "qwen2" in family)
    assert config.o_bias == raw.get("attention_bias", False)
    assert config.mlp_bias == raw.get("mlp_bias", False)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kind", "fields", "scaling"),
    [
        ("default", {}, None),
        ("linear", {"factor": 2.0}, RopeScaling(kind="linear", factor=2.0)),
        ("llama3", LLAMA3, RopeScaling(kind="llama3", factor=8.0, original_max=64)),
        ("yarn", YARN, RopeScaling(kind="yarn", factor=4.0, original_max=64)),
        (
            "yarn",
            YARN | {"beta_fast": 16, "beta_slow": 2, "mscale": 0.5, "mscale_all_dim": 0.7}
            | {"truncate": False, "attention_factor": 1.5},
            RopeScaling(
                kind="yarn",
                factor=4.0,
                original_max=64,
                beta_fast=16.0,
                beta_slow=2.0,
                mscale=0.5,
                mscale_all_dim=0.7,
                truncate=False,
                attention_factor=1.5,
            ),
        ),
    ],
)  # fmt: skip
def test_rope_scaling_reads_the_same_in_all_three_spellings(kind, fields, scaling):
    oldest = {"rope_theta": 5e5, "rope_scaling": {"type": kind, **fields}}
    old = {"rope_theta": 5e5, "rope_scaling": {"rope_type": kind, **fields}}
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": kind, **fields}}
    configs = [parse_hf_config(LLAMA | spelling) for spelling in (oldest, old, new)]
    assert configs[0] == configs[1] == configs[2]
    assert configs[0].rope_scaling == scaling
    assert configs[0].rope_theta == 5e5


def test_the_original_length_defaults_to_the_served_one_and_a_top_level_value_wins():
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    scaling = parse_hf_config(LLAMA | yarn).rope_scaling
    assert scaling is not None
    assert scaling.original_max == 256
    yarn["rope_scaling"]["original_max_position_embeddings"] = 128
    scaling = parse_hf_config(LLAMA | yarn | {"original_max_position_embeddings": 32}).rope_scaling
    assert scaling is not None
    assert scaling.original_max == 32


def test_yarn_serves_the_stretched_length():
    stretched = parse_hf_config(
        LLAMA
        | {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        }
    )
    assert stretched.max_position_embeddings == 1024
    already = parse_hf_config(LLAMA | {"rope_scaling": {"type": "yarn", **YARN}})
    assert already.max_position_embeddings == 256


@pytest.mark.parametrize(
    ("raw", "window"),
    [
        (LLAMA | {"sliding_window": 8}, None),  # the Llama code has no window
        (MISTRAL | {"sliding_window": 8}, 8),
        (MISTRAL | {"sliding_window": None}, None),
        (MISTRAL, 4096),
        (MISTRAL | {"sliding_window": 8, "layer_types": ["sliding_attention"] * 4}, 8),
        (QWEN2 | {"sliding_window": 8}, None),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, 8),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}, None),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 8}, None),  # 28 full layers
        (QWEN2 | {"sliding_window": 8, "layer_types": ["full_attention"] * 4}, None),
    ],
)
def test_the_window_is_the_one_the_architecture_would_use(raw, window):
    assert parse_hf_config(raw).sliding_window == window


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (LLAMA | {"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*LlamaForCausalLM"),
        (LLAMA | {"architectures": None, "model_type": "gpt2"}, "model_type gpt2"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*gptq"),
        (LLAMA | {"use_qk_norm": True}, "use_qk_norm=True"),
        (LLAMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (LLAMA | {"dtype": "float8_e4m3fn"}, "float8_e4m3fn.*bfloat16"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.*yarn"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer"),
        (LLAMA | {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        (MISTRAL | {"layer_types": ["sliding_attention", "full_attention"] * 2}, "layer_types"),
        (MISTRAL | {"layer_types": ["full_attention"] * 4}, "layer_types"),
        (QWEN2 | {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 1}, "3 layers.*1 with full"),
    ],
)
def test_what_would_change_the_mathematics_is_refused_by_name(raw, named):
    with pytest.raises(UnsupportedModel, match=named):
        parse_hf_config(raw)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "128"}, "vocab_size='128'"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000.*4096"),
        ({"rope_theta": float("nan")}, "rope_theta=nan"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"eos_token_id": ["2"]}, "eos_token_id"),
        ({"num_key_value_heads": 3}, "num_heads=4.*num_kv_heads=3"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1}}, "high_freq"),
    ],
)
def test_a_wrong_value_is_one_line_naming_its_key(change, named):
    with pytest.raises(BootError, match=named) as error:
        parse_hf_config(LLAMA | change)
    assert "\n" not in str(error.value)


def test_grouped_families_do_not_guess_the_number_of_kv_heads():
    raw = {k: v for k, v in QWEN2.items() if k != "num_key_value_heads"}
    with pytest.raises(CheckpointError, match="num_key_value_heads is missing"):
        parse_hf_config(raw)


def test_stop_ids_of_the_generation_config_come_first_and_none_is_said_twice():
    config = parse_hf_config(LLAMA | {"eos_token_id": 2}, {"eos_token_id": [7, 2, 9]})
    assert config.eos_token_ids == (7, 2, 9)
    config = parse_hf_config(LLAMA | {"eos_token_id": [2, 3]}, {"eos_token_id": 7})
    assert config.eos_token_ids == (7, 2, 3)


@given(
    key=st.sampled_from([*LLAMA, "head_dim", "rope_scaling", "sliding_window", "eos_token_id"]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["type", "factor", "x"]), inner, max_size=3)
        ),
        max_leaves=4,
    ),
)
def test_any_json_value_anywhere_is_read_or_refused_and_nothing_else(key, value):
    refusal = ""
    try:
        parse_hf_config(MISTRAL | {key: value})
    except BootError as error:
        refusal = str(error)
    assert "\n" not in refusal


@pytest.mark.parametrize("text", ["[1, 2]", '"config"', "null", "{", "", "[" * 100_000])
def test_a_file_that_holds_no_json_object_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        load_json(path)


def test_a_json_object_is_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert load_json(path) == LLAMA
