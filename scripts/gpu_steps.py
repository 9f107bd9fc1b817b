"""Whole decode steps and boots of a Llama-3.2-1B-shaped model with random weights, timed."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_timing import fill, host_seconds_a_call, seconds_a_step
from step_cases import MODELS

from jaxserve.config import EngineConfig, ModelConfig, SamplingParams
from jaxserve.model.params import param_specs, stacks_layers
from jaxserve.plan.buckets import DecodeShape, PrefillBuckets
from jaxserve.plan.price import decode_traffic, roofline_seconds
from jaxserve.runtime.compile_cache import CompileCache
from jaxserve.runtime.compiler import StepCompiler, compile_executables
from jaxserve.runtime.cross_compile import Build
from jaxserve.runtime.engine import Engine
from jaxserve.runtime.executables import StepShapes, lower_step
from jaxserve.runtime.fingerprint import environment_parts
from jaxserve.runtime.runner import ModelRunner
from jaxserve.runtime.sizing import decode_buckets, step_shapes
from jaxserve.runtime.targets import compile_for_target, load_target
from jaxserve.runtime.thunks import count_launches

ROWS = (1, 8, 64, 256)
CONTEXT = 1024
# Steps a measurement may take: every one adds a token to each row.
SPARE = 1024
BLOCK_SIZE = 16
PROMPT = tuple(range(5, 45))
NEW_TOKENS = 16


def model_of(*, tiny: bool) -> ModelConfig:
    """The 1B shape, or one for a CPU."""
    model = MODELS["llama-3.2-1b"]
    if not tiny:
        return model
    return replace(
        model,
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    )


def random_params(model: ModelConfig) -> Any:
    """Weights whose activations neither grow nor vanish."""
    specs = param_specs(model, "bfloat16", stacked=stacks_layers(jax.default_backend()))
    return fill(specs, (3.0 / model.hidden_size) ** 0.5)


# ---- (d) a decode step ---------------------------------------------------------------------------


def decode_steps(copy_bytes_per_s: float, command_buffers: bool, *, tiny: bool) -> Iterator[dict]:
    """A row for each number of rows: a step beside its byte floor.

    ``command_buffers`` is what XLA_FLAGS was set to for this process.
    """
    model = model_of(tiny=tiny)
    params = random_params(model)
    context = 32 if tiny else CONTEXT
    for rows in (2,) if tiny else ROWS:
        shapes = _decode_shapes(model, rows, context)
        compiled, dumped = _compile_dumped(shapes)
        step_s, host_s = _time_decode(compiled, params, shapes, context)
        traffic = decode_traffic(model, rows=rows, cells=rows * context, dtype="bfloat16")
        floor_s = roofline_seconds(traffic, copy_bytes_per_s)
        yield {
            "rows": rows,
            "context": context,
            "command_buffers": command_buffers,
            "us_a_step": step_s * 1e6,
            "floor_us": floor_s * 1e6,
            "times_floor": step_s / floor_s,
            "host_us_a_call": host_s * 1e6,
            **dumped,
        }


def _decode_shapes(model: ModelConfig, rows: int, context: int) -> StepShapes:
    width = context + SPARE
    a_row = -(-width // BLOCK_SIZE)
    return StepShapes(
        model=model,
        dtype="bfloat16",
        backend="auto",
        num_blocks=rows * a_row + 1,
        block_size=BLOCK_SIZE,
        blocks_per_row=a_row,
        max_num_seqs=rows,
        decode=(DecodeShape(rows, width),),
        prefill_tokens=(),
        stacked=stacks_layers(jax.default_backend()),
    )


def _compile_dumped(shapes: StepShapes) -> tuple[jax.stages.Compiled, dict[str, Any]]:
    """The executable, its compile seconds, and what it launches where the compiler says so."""
    platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    with tempfile.TemporaryDirectory(prefix="jaxserve-check-") as scratch:
        start = time.perf_counter()
        lowered = lower_step(shapes, shapes.decode[0], platform)
        compiled = lowered.compile(compiler_options={"xla_dump_to": scratch})
        said: dict[str, Any] = {"compile_s": time.perf_counter() - start}
        for file in Path(scratch).glob("*.thunk_sequence.txt"):
            said["launches"] = count_launches(file.read_text()).once
        for file in Path(scratch).glob("*.thunk_sequence_after_thunk_passes.txt"):
            said["buffers_recorded"] = file.read_text().count(": kCommandBuffer")
    return compiled, said


def _time_decode(
    compiled: jax.stages.Compiled, params: Any, shapes: StepShapes, context: int
) -> tuple[float, float]:
    """Seconds of a step on the device, and of its call on the host."""

    def zeros(info: Any) -> jax.Array:
        return jnp.zeros(info.shape, info.dtype)

    (_, pool_info, state_info, *sent_info), _ = compiled.args_info
    pool, state = jax.tree.map(zeros, pool_info), jax.tree.map(zeros, state_info)
    # A mask is made of words with a bit for each token that is allowed.
    sent = jax.tree.map(lambda a: ~zeros(a) if a.dtype == jnp.uint32 else zeros(a), sent_info)
    rows, a_row = shapes.max_num_seqs, shapes.blocks_per_row
    order = np.random.default_rng(0).permutation(rows * a_row) + 1
    state = state._replace(
        block_tables_BP=jnp.asarray(order.reshape(rows, a_row), jnp.int32),
        context_lens_B=jnp.full(rows, context, jnp.int32),
    )

    def step(carried: tuple[Any, Any]) -> tuple[Any, Any]:
        return compiled(params, *carried, *sent)[:2]

    step_s, carried = seconds_a_step(step, (pool, state), most=SPARE // 8)
    host_s, _ = host_seconds_a_call(step, carried)
    return step_s, host_s


# ---- (e) and (f) boots ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A small server's engine: what it is compiled for."""

    model: ModelConfig
    config: EngineConfig
    shapes: StepShapes


def deployment(platform: str, *, tiny: bool) -> Deployment:
    """Two rows of 1024 tokens, prompts in chunks of 64: every executable of such an engine."""
    model = model_of(tiny=tiny)
    rows, length, chunk = (1, 64, 32) if tiny else (2, 1024, 64)
    config = EngineConfig(
        max_model_len=length,
        max_num_seqs=rows,
        max_num_batched_tokens=chunk,
        block_size=BLOCK_SIZE,
        num_blocks=rows * length // BLOCK_SIZE + 1,
        dtype="bfloat16",
        attention_backend="streamed",
    )
    assert config.num_blocks is not None
    decode = decode_buckets(config).shapes
    return Deployment(
        model=model,
        config=config,
        shapes=step_shapes(model, config, decode, config.num_blocks, platform),
    )


def boot(cache: Path, *, tiny: bool) -> dict[str, Any]:
    """Compile or load every executable, then answer one prompt; seconds by phase."""
    platform = jax.default_backend()
    asked = deployment(platform, tiny=tiny)
    start = time.perf_counter()
    params = jax.block_until_ready(random_params(asked.model))
    weights = time.perf_counter()
    said: list[str] = []
    compiler = StepCompiler(
        shapes=asked.shapes,
        platform=platform,
        cache=CompileCache(cache, said.append),
        environment=environment_parts(os.environ.get("XLA_FLAGS", "")),
    )
    executables = compile_executables(
        asked.shapes,
        compiler=compiler,
        workers=os.cpu_count() or 1,
        ahead=True,
        late=False,
        progress=lambda built, done, total: None,
        report=said.append,
    )
    ready = time.perf_counter()
    engine = Engine(
        asked.model,
        asked.config,
        ModelRunner(params, executables, asked.shapes),
        num_blocks=asked.shapes.num_blocks,
        decode_buckets=decode_buckets(asked.config),
        prefill_buckets=PrefillBuckets(asked.config.max_num_batched_tokens),
    )
    prompt = [token % asked.model.vocab_size for token in PROMPT]
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    engine.add_request("a", prompt, sampling)
    tokens: list[int] = []
    first = None
    while engine.has_unfinished_requests():
        for update in engine.step():
            tokens += update.new_token_ids
            first = first or time.perf_counter()
    assert first is not None  # the request gives tokens
    hits = sum(built.cache == "hit" for built in executables.all)
    return {
        "weights_s": weights - start,
        "executables_s": ready - weights,
        "first_token_s": first - ready,
        "executables": len(executables.all),
        "from_cache": hits,
        "tokens": " ".join(map(str, tokens)),
        "why": "; ".join([*said, *sorted({b.cache for b in executables.all} - {"hit"})])[:300],
    }


def build_for(device_kind: str, cache: Path) -> dict[str, Any]:
    """Compile the deployment for a card by its name, in a process that uses none.

    Raises ValueError for a card that no packaged target describes.
    """
    names = {load_target(name).device: name for name in ("h200", "a100", "l40")}
    if device_kind not in names:
        raise ValueError(f"no target describes {device_kind}; there are {', '.join(names)}")
    start = time.perf_counter()
    figures = compile_for_target(
        load_target(names[device_kind]),
        deployment("cuda", tiny=False).shapes,
        workers=os.cpu_count() or 1,
        build=Build(cache, xla_flags=os.environ.get("XLA_FLAGS", "")),
    )
    return {"executables": len(figures), "build_s": time.perf_counter() - start}
