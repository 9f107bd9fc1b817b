"""A GGUF file as a ModelConfig and as tensors under Hugging Face names."""

from __future__ import annotations

import re

import numpy as np
from gguf.constants import GGMLQuantizationType

from jaxserve.checkpoint.gguf_file import GGUFFile
from jaxserve.checkpoint.hf_config import MAX_LAYERS
from jaxserve.checkpoint.rope import parse_gguf_rope, scaling_from_factors
from jaxserve.checkpoint.tensors import Shapes, check_tensors, expected_shapes
from jaxserve.checkpoint.values import Values, short
from jaxserve.config import DType, ModelConfig
from jaxserve.errors import CheckpointError, UnsupportedModel

# Mistral and SmolLM files say llama. Only llama.cpp's llama stores q and k rotary-interleaved.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
FACTORS = "rope_freqs.weight"
_CONTROL = 3  # a token type: see gguf_tokenizer.py
# End marks that a file may name nowhere: it has one eos id, chat models often have several.
_END_MARKS = {
    "<|endoftext|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "</s>",
}
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def parse_gguf_config(file: GGUFFile) -> ModelConfig:
    """The config that the file's metadata and tensor list describe.

    Raises UnsupportedModel for an architecture or a feature this engine lacks.
    """
    values = Values(file.metadata, str(file.path))
    arch = values.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: architecture {short(arch)} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    hidden_size = values.count(f"{arch}.embedding_length")
    num_heads = values.count(f"{arch}.attention.head_count")
    head_dim = values.count(f"{arch}.attention.key_length", max(hidden_size // num_heads, 1))
    _check_features(values, arch, head_dim)
    theta = values.positive(f"{arch}.rope.freq_base", 10_000.0)
    scaling = parse_gguf_rope(values, arch)
    if FACTORS in file.tensors:
        if scaling is not None:
            raise UnsupportedModel(f"{file.path}: {FACTORS} beside {arch}.rope.scaling")
        scaling = scaling_from_factors(_factors(file, head_dim), theta, str(file.path))
    embedding = file.tensors.get("token_embd.weight")
    return ModelConfig(
        architecture=ARCHITECTURES[arch],
        vocab_size=(
            embedding.shape[0] if embedding is not None else values.count(f"{arch}.vocab_size")
        ),
        hidden_size=hidden_size,
        intermediate_size=values.count(f"{arch}.feed_forward_length"),
        num_layers=values.count(f"{arch}.block_count", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=values.count(f"{arch}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=values.count(f"{arch}.context_length"),
        rms_norm_eps=values.positive(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        tie_word_embeddings="output.weight" not in file.tensors,
        sliding_window=values.count(f"{arch}.attention.sliding_window", 0, least=0) or None,
        dtype=_dtype(file),
        bos_token_id=next(iter(values.ids("tokenizer.ggml.bos_token_id")), None),
        eos_token_ids=_eos_token_ids(values),
    )


def _check_features(values: Values, arch: str, head_dim: int) -> None:
    for key, neutral in (
        ("split.count", 1),  # one file of several
        (f"{arch}.expert_count", 0),
        (f"{arch}.attention.value_length", head_dim),
        (f"{arch}.rope.dimension_count", head_dim),
        (f"{arch}.attention.causal", True),
        (f"{arch}.logit_scale", None),
        (f"{arch}.attention.scale", None),
        (f"{arch}.residual_scale", None),
        (f"{arch}.embedding_scale", None),
        (f"{arch}.attn_logit_softcapping", None),
        (f"{arch}.final_logit_softcapping", None),
        (f"{arch}.attention.sliding_window_pattern", None),
        (f"{arch}.rope.scale_linear", None),
    ):
        if values.raw.get(key) not in (neutral, None):
            raise UnsupportedModel(
                f"{values.file}: {key}={short(values.raw[key])} is not supported"
            )
    if arch == "qwen2" and values.raw.get("qwen2.attention.sliding_window"):
        # The files do not say which layers it holds for.
        raise UnsupportedModel(f"{values.file}: a sliding window of qwen2 is not supported")


def _factors(file: GGUFFile, head_dim: int) -> np.ndarray:
    tensor = file.tensors[FACTORS]
    if tensor.shape != (head_dim // 2,) or tensor.type != GGMLQuantizationType.F32:
        raise CheckpointError(
            f"{file.path}: {FACTORS} is {tensor.type.name} {list(tensor.shape)}, must be F32 "
            f"[{head_dim // 2}]"
        )
    return file.load(FACTORS)


def _dtype(file: GGUFFile) -> DType:
    """What the matrices are stored in; bfloat16 for quantised ones, whose range float16 lacks."""
    kinds = {t.type.name for t in file.tensors.values() if len(t.shape) == 2}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F16", "F32"} else "bfloat16"


def _eos_token_ids(values: Values) -> tuple[int, ...]:
    """The ids the metadata names, then those of the usual end marks among the control tokens."""
    named = (
        values.ids("tokenizer.ggml.eos_token_id")
        + values.ids("tokenizer.ggml.eot_token_id")
        + values.ids("tokenizer.ggml.eom_token_id")
    )
    tokens = values.raw.get("tokenizer.ggml.tokens") or ()
    types = values.raw.get("tokenizer.ggml.token_type") or ()
    marks = tuple(
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and token in _END_MARKS
    )
    return tuple(dict.fromkeys(named + marks))


class GGUFTensors:
    """The tensors of ``file``, dequantised one at a time."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        """Check names and shapes of all tensors. Raises CheckpointError naming the tensor."""
        self.shapes: Shapes = expected_shapes(config)
        self._file = file
        self._config = config
        # A name of no known form keeps its own, so that the check can refuse it by that name.
        self._stored_name = {_hf_name(name) or name: name for name in file.tensors}
        self._stored_name.pop(FACTORS, None)
        check_tensors(
            self.shapes,
            {name: file.tensors[stored].shape for name, stored in self._stored_name.items()},
            dict.fromkeys(self._stored_name, str(file.path)),
        )

    def get(self, name: str) -> np.ndarray:
        """The tensor as float32, or as float16 or bfloat16 where it is stored so."""
        array = self._file.load(self._stored_name[name])
        if self._config.architecture == "LlamaForCausalLM":
            if ".q_proj." in name:
                return unpermute(array, self._config.num_heads)
            if ".k_proj." in name:
                return unpermute(array, self._config.num_kv_heads)
        return array


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k (weight [heads * H, in] or bias [heads * H]) from llama.cpp's order.

    llama.cpp rotates neighbouring rows 2i and 2i + 1 of a head; here, as in transformers, the pair
    is i and i + H/2.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _hf_name(name: str) -> str | None:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _LAYER_NAMES:
        return None
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
