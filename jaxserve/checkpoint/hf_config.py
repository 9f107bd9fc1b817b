"""Hugging Face's config.json and generation_config.json as a ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoint.rope import parse_hf_rope
from jaxserve.checkpoint.values import Values, short
from jaxserve.config import DType, ModelConfig
from jaxserve.errors import UnsupportedModel

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
}
DTYPE_NAMES: dict[str, DType] = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
}
MAX_LAYERS = 4096

# Keys that change the mathematics of a Llama-family model when they hold anything but this.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "quantization_config": (None,),
    "compression_config": (None,),
    "qk_norm": (False, None),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (1, None),
    "logits_scaling": (1, None),
    "attention_multiplier": (None,),
    "residual_multiplier": (1, None),
    "embedding_multiplier": (1, None),
    "no_rope_layers": (None, []),
    "num_local_experts": (None, 0, 1),
    "is_encoder_decoder": (False, None),
}


def parse_hf_config(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    *,
    file: str = "config.json",
) -> ModelConfig:
    """The config of a supported architecture; ``file`` is what errors name.

    The stop ids of ``generation_config`` come first, those of ``config`` are added. Raises
    UnsupportedModel for whatever this engine would compute differently, CheckpointError for a
    value that cannot be.
    """
    values = Values(config, file)
    architecture = _architecture(values)
    for key, neutral in _NEUTRAL.items():
        if config.get(key) not in neutral:
            raise UnsupportedModel(f"{file}: {key}={short(config[key])} is not supported")

    hidden_size = values.count("hidden_size")
    num_heads = values.count("num_attention_heads")
    llama = architecture == "LlamaForCausalLM"
    # null means as many as query heads; the other families' default for a lacking key is a number
    # that fits one model only.
    grouped = llama or "num_key_value_heads" in config
    num_kv_heads = values.count("num_key_value_heads", num_heads if grouped else None)
    head_dim = values.count("head_dim", max(hidden_size // num_heads, 1))
    num_layers = values.count("num_hidden_layers", most=MAX_LAYERS)
    max_positions = values.count("max_position_embeddings")
    theta, scaling, max_positions = parse_hf_rope(values, max_positions)
    attention_bias = llama and values.flag("attention_bias")
    generation = Values(generation_config or {}, "generation_config.json")
    return ModelConfig(
        architecture=architecture,
        vocab_size=values.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=values.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=values.positive("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias,
        mlp_bias=llama and values.flag("mlp_bias"),
        tie_word_embeddings=values.flag("tie_word_embeddings"),
        sliding_window=_sliding_window(values, architecture, num_layers),
        dtype=_dtype(values),
        bos_token_id=next(iter(values.ids("bos_token_id")), None),
        eos_token_ids=tuple(
            dict.fromkeys(generation.ids("eos_token_id") + values.ids("eos_token_id"))
        ),
    )


def _architecture(values: Values) -> str:
    names = values.raw.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        name = names[0]
    else:  # hand-written configs often leave it out
        by_type = {model_type: name for name, model_type in ARCHITECTURES.items()}
        model_type = values.raw.get("model_type")
        name = by_type.get(str(model_type), f"model_type {model_type}")
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{values.file}: {name} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return name


def _sliding_window(values: Values, architecture: str, num_layers: int) -> int | None:
    """The window of all layers, or None; as the architecture's code in transformers reads it."""
    window = values.optional_count("sliding_window")
    if "sliding_window" not in values.raw:
        window = 4096  # the default of both families that have one
    if architecture == "LlamaForCausalLM":
        window = None  # such configs may carry the key; the model has no window
    elif architecture == "Qwen2ForCausalLM" and not values.flag("use_sliding_window"):
        window = None

    layer_types = values.raw.get("layer_types")
    if layer_types is None:
        full = 0
        if architecture == "Qwen2ForCausalLM" and window is not None:
            full = min(values.count("max_window_layers", 28, least=0), num_layers)
        windowed = num_layers - full if window is not None else 0
    else:
        kinds = {"full_attention", "sliding_attention"}
        if not isinstance(layer_types, list) or not set(map(str, layer_types)) <= kinds:
            raise UnsupportedModel(f"{values.file}: layer_types={short(layer_types)}")
        windowed = layer_types.count("sliding_attention")
        full = len(layer_types) - windowed
        mistral = architecture == "MistralForCausalLM"  # its code windows every layer regardless
        if (windowed and window is None) or (mistral and full and window is not None):
            raise UnsupportedModel(
                f"{values.file}: layer_types has {windowed} sliding layers of {num_layers}, but "
                f"sliding_window={window} in a {architecture}"
            )
    if windowed and full:
        raise UnsupportedModel(
            f"{values.file}: {windowed} layers with sliding attention and {full} with full "
            "attention; mixed layers are not supported"
        )
    return window if windowed else None


def _dtype(values: Values) -> DType:
    name = values.raw.get("dtype") or values.raw.get("torch_dtype") or "float32"
    dtype = DTYPE_NAMES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise UnsupportedModel(
            f"{values.file}: dtype={short(name)} is not supported; supported: "
            f"{', '.join(DTYPE_NAMES)}"
        )
    return dtype
