"""What may be asked for: the model, the engine and a request's sampling, as frozen values.

Shape letters, used in every name of the repository:

    B decode rows      T prefill tokens    S prefill segments   P blocks a row
    D model width      F ffn width         L layers             V vocabulary
    N query heads      K kv heads          G query heads a kv head (N // K)
    H head size        C blocks of the pool                     Z tokens a block
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxserve.errors import ConfigError, InvalidRequest

AttentionBackend = Literal["auto", "rectangle", "streamed"]
DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the rotary frequencies of a checkpoint were stretched; ``kind`` selects the fields used.

    ``linear``: factor. ``llama3``: factor, low_freq_factor, high_freq_factor, original_max.
    ``yarn``: factor, beta_fast, beta_slow, original_max, attention_factor (None: derived from
    factor), mscale and mscale_all_dim (None: absent), truncate.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-family decoder's shape. Sizes are counts of elements; ``dtype`` is the checkpoint's.

    ``sliding_window`` is the number of most recent tokens a query sees (itself included), None for
    all. ``eos_token_ids`` end a generation.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    dtype: DType = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"model config: {name}={getattr(self, name)}, must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model config: num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"model config: head_dim={self.head_dim} is odd; rotary needs pairs")

    @property
    def q_size(self) -> int:
        """Width of all query heads together, N * H elements."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together, K * H elements."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is asked to hold. Lengths are tokens, ``*_bytes`` bytes, shares in [0, 1].

    ``num_blocks`` and ``kv_cache_memory_bytes`` override the sizing of the KV pool, in that order.
    ``watermark`` is the share of the pool kept free when a request is admitted; it delays an
    admission and never excludes one.

    ``bucket_decode`` rounds a decode step's shape up to a closed set, ``persist_inputs`` donates
    the decode state so that it stays where it is, ``capture_decode`` compiles every step before the
    first request. An engine refuses two of the three.
    """

    max_model_len: int = 2048
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    attention_backend: AttentionBackend = "auto"
    dtype: DType | Literal["auto"] = "auto"
    watermark: float = 0.01
    seed: int = 0
    bucket_decode: bool = True
    persist_inputs: bool = True
    capture_decode: bool = True

    def __post_init__(self) -> None:
        for name, flag in (
            ("max_model_len", "--max-model-len"),
            ("max_num_seqs", "--max-num-seqs"),
            ("max_num_batched_tokens", "--max-num-batched-tokens"),
            ("block_size", "--block-size"),
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag} {getattr(self, name)}: must be at least 1")
        for name, flag in (
            ("num_blocks", "--num-gpu-blocks-override"),
            ("kv_cache_memory_bytes", "--kv-cache-memory-bytes"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{flag} {value}: must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below "
                f"--max-num-seqs {self.max_num_seqs}: an iteration could not decode every row"
            )
        if self.block_size & (self.block_size - 1) or not 8 <= self.block_size <= 256:
            raise ConfigError(f"--block-size {self.block_size}: use a power of two from 8 to 256")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization}: "
                "a share of the device in (0, 1], e.g. 0.9"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark {self.watermark}: a share of the pool in [0, 1)")

    @property
    def blocks_per_row(self) -> int:
        """P: blocks that hold ``max_model_len`` tokens."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, kw_only=True)
class BootConfig:
    """How a process comes up; nothing here changes a token.

    ``compile_cache_dir`` keeps compiled steps for the next boot (None: nothing is kept). ``warm``
    runs each one once before the first request. ``warm_rows`` and ``warm_width`` (tokens) shorten
    the list; the shapes left out need ``allow_late_compile``, which compiles a shape when a request
    first meets it.
    """

    compile_cache_dir: Path | None = None
    warm: bool = True
    warm_rows: int | None = None
    warm_width: int | None = None
    allow_late_compile: bool = False

    def __post_init__(self) -> None:
        for name, flag in (("warm_rows", "--warm-rows"), ("warm_width", "--warm-width")):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{flag} {value}: must be at least 1")


MAX_STOP_CHARACTERS = 1024


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are drawn and when they end (vLLM's names and neutral values).

    temperature 0 is greedy. top_k 0 or -1 keeps all. top_p 1 and min_p 0 keep all. seed None lets
    the engine draw one. Raises InvalidRequest naming the field.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens={self.max_tokens}, must be at least 1", "max_tokens")
        if not 0.0 <= self.temperature <= 100.0:  # also false for nan
            raise InvalidRequest(
                f"temperature={self.temperature}, must be in [0, 100]", "temperature"
            )
        if self.top_k < -1:
            raise InvalidRequest(f"top_k={self.top_k}, must be -1, 0 (off) or positive", "top_k")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p={self.top_p}, must be in (0, 1]", "top_p")
        if not 0.0 <= self.min_p <= 1.0:
            raise InvalidRequest(f"min_p={self.min_p}, must be in [0, 1]", "min_p")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InvalidRequest(f"seed={self.seed}, must be a 64-bit integer", "seed")
        if len(self.stop) > 16:
            raise InvalidRequest(f"stop has {len(self.stop)} strings, at most 16", "stop")
        if any(not s for s in self.stop):
            raise InvalidRequest("stop holds an empty string", "stop")
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARACTERS:  # every token is compared with every start of a stop
            raise InvalidRequest(
                f"stop holds a string of {longest} characters, at most {MAX_STOP_CHARACTERS}",
                "stop",
            )

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken."""
        return self.temperature == 0.0
