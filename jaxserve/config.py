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
from typing import Any, Literal, get_args

from jaxserve.errors import ConfigError, InvalidRequest

AttentionBackend = Literal[
    "auto", "rectangle", "streamed", "streamed_xla", "streamed_triton", "streamed_mosaic"
]
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

    ``deterministic``: a request's tokens and log probabilities are bit for bit those it gets
    alone, whoever is in the batch, however its prompt was cut or found in the cache, and after a
    preemption. Every step then has its one largest size.

    ``enable_prefix_caching`` keeps the K/V of full blocks for later requests that begin with the
    same tokens.
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
    enable_prefix_caching: bool = True
    seed: int = 0
    bucket_decode: bool = True
    persist_inputs: bool = True
    capture_decode: bool = True
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.deterministic and self.attention_backend == "rectangle":
            raise ConfigError(
                "--deterministic needs a read that walks each row by itself: use "
                "--attention-backend streamed"
            )
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
        if self.compile_cache_dir is not None:  # a string is as good
            object.__setattr__(self, "compile_cache_dir", Path(self.compile_cache_dir).expanduser())
        for name, flag in (("warm_rows", "--warm-rows"), ("warm_width", "--warm-width")):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{flag} {value}: must be at least 1")


LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

MAX_CHOICES = 128
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 4096
MAX_LOGIT_BIAS = 300
MAX_ALLOWED_TOKEN_IDS = 2**18
MAX_BAD_WORDS = 1024
MAX_BAD_WORDS_CHARACTERS = 16_384
MAX_LOGPROBS = 20


_COUNTS = ("logprobs", "prompt_logprobs")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are drawn and when they end (vLLM's names and neutral values).

    temperature 0 is greedy. top_k 0 or -1 keeps all. top_p 1 and min_p 0 keep all. seed None lets
    the engine draw one. max_tokens 0 computes the prompt and draws nothing; None draws up to the
    end of the context.

    presence_penalty and frequency_penalty count the output, repetition_penalty the prompt as well.
    logit_bias is (token id, what is added to its logit). ``bad_words`` are text; an engine acts on
    ``bad_words_token_ids``, their spellings in tokens. min_tokens bans what ends a request until
    that many tokens are drawn.

    logprobs and prompt_logprobs are how many of the likeliest tokens are reported beside each token
    of the output and of the prompt; None: nothing is. ``raw_logprobs`` are the model's own, over
    the whole vocabulary at temperature 1; ``processed_logprobs`` those of the distribution drawn
    from. Raises InvalidRequest naming the field.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # one string, as vLLM takes it
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("n", "max_tokens", "min_tokens", "top_k", "seed", *_COUNTS):
            value = getattr(self, name)
            if value is not None and not hasattr(value, "__index__"):
                raise InvalidRequest(f"{name}={value!r}, must be an integer", name)
        self._check_lengths()
        self._check_draw()
        self._check_tokens()
        self._check_stop()

    def _check_lengths(self) -> None:
        _check_range("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidRequest(f"max_tokens={self.max_tokens}, must be at least 0", "max_tokens")
        if self.min_tokens < 0:
            raise InvalidRequest(f"min_tokens={self.min_tokens}, must be at least 0", "min_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}", "min_tokens"
            )
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, 0, MAX_LOGPROBS)
        if self.logprobs_mode not in get_args(LogprobsMode):
            raise InvalidRequest(
                f"logprobs_mode={self.logprobs_mode!r}, use one of {get_args(LogprobsMode)}",
                "logprobs_mode",
            )

    def _check_draw(self) -> None:
        _check_range("temperature", self.temperature, 0, 100)
        if not -1 <= self.top_k < 2**31:
            raise InvalidRequest(
                f"top_k={self.top_k}, must be -1, 0 (off) or positive, below 2^31", "top_k"
            )
        if not 0.0 < self.top_p <= 1.0:  # also true for nan, here and below
            raise InvalidRequest(f"top_p={self.top_p}, must be in (0, 1]", "top_p")
        _check_range("min_p", self.min_p, 0, 1)
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InvalidRequest(f"seed={self.seed}, must be a 64-bit integer", "seed")
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        if not 0.01 <= self.repetition_penalty <= 100.0:
            raise InvalidRequest(
                f"repetition_penalty={self.repetition_penalty}, must be in [0.01, 100]",
                "repetition_penalty",
            )

    def _check_tokens(self) -> None:
        _check_count("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
        for token, bias in self.logit_bias:
            _check_range(f"logit_bias of token {token}", bias, -100, 100, "logit_bias")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidRequest("logit_bias names a token twice", "logit_bias")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids is empty: no token could be drawn", "allowed_token_ids"
            )
        _check_count("allowed_token_ids", self.allowed_token_ids or (), MAX_ALLOWED_TOKEN_IDS)
        _check_count("bad_words", self.bad_words, MAX_BAD_WORDS)
        if not all(self.bad_words):
            raise InvalidRequest("bad_words holds an empty string", "bad_words")
        characters = sum(map(len, self.bad_words))
        if characters > MAX_BAD_WORDS_CHARACTERS:  # every draw is compared with their tokens
            raise InvalidRequest(
                f"bad_words has {characters} characters in all, at most {MAX_BAD_WORDS_CHARACTERS}",
                "bad_words",
            )
        if not all(self.bad_words_token_ids):
            raise InvalidRequest(
                "bad_words_token_ids holds a word of 0 tokens", "bad_words_token_ids"
            )

    def _check_stop(self) -> None:
        _check_count("stop", self.stop, 16)
        _check_count("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if not all(self.stop):
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


def _check_range(
    what: str, value: float, least: float, most: float, field: str | None = None
) -> None:
    """Raise InvalidRequest unless ``value`` is in [least, most]; nan is not."""
    if not least <= value <= most:
        raise InvalidRequest(f"{what}={value}, must be in [{least}, {most}]", field or what)


def _check_count(field: str, values: tuple[Any, ...], most: int) -> None:
    if len(values) > most:
        raise InvalidRequest(f"{field} has {len(values)} entries, at most {most}", field)
