"""The order in which a process comes up: load, plan, compile, allocate, warm, serve."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import __version__
from jaxserve.checkpoint.load import Checkpoint, load_checkpoint
from jaxserve.config import DType, EngineConfig, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.model.attention import decode_tile
from jaxserve.model.definition import init_params
from jaxserve.model.params import Params, build_params
from jaxserve.plan.batch import prefill_batch_specs
from jaxserve.plan.buckets import DecodeBuckets, PrefillBuckets
from jaxserve.plan.capture import CapturePlan, plan_capture
from jaxserve.plan.pool import DeviceMemory, KVPoolPlan, kv_bytes_per_block, plan_kv_pool
from jaxserve.plan.price import weight_bytes
from jaxserve.plan.report import boot_info, boot_lines
from jaxserve.plan.units import MIB, format_bytes
from jaxserve.runtime.compiler import compile_executables
from jaxserve.runtime.engine import Engine
from jaxserve.runtime.executables import Built, Executables, StepShapes
from jaxserve.runtime.runner import ModelRunner
from jaxserve.serve.app import AppParts, create_app
from jaxserve.serve.async_engine import AsyncEngine
from jaxserve.serve.launch import Serving
from jaxserve.serve.metrics import Metrics
from jaxserve.serve.settings import ServeSettings
from jaxserve.serve.text import Text

Report = Callable[[str], None]
Progress = Callable[[str, int, int], None]
"""``progress(what, done, total)``; may be called from several threads, one at a time."""

# Held back on a device for what no plan counts: the runtime's context, inputs, fragmentation.
_RESERVE_BYTES = 512 * MIB


@dataclass(frozen=True, kw_only=True)
class BootedEngine:
    """An engine with every planned shape compiled and run once, and what was decided."""

    engine: Engine
    runner: ModelRunner
    executables: Executables
    model: ModelConfig
    config: EngineConfig
    pool: KVPoolPlan
    capture: CapturePlan
    seconds: Mapping[str, float]

    def info(self) -> dict[str, Any]:
        """The boot decision as /health publishes it."""
        return boot_info(self.pool, self.capture, self.executables.decode) | {
            "attention_backend": self.config.attention_backend,
            "dtype": self.config.dtype,
            "workspace_bytes": self.executables.temp_bytes,
            "boot_seconds": {k: round(v, 3) for k, v in self.seconds.items()},
        }


def resolve(config: EngineConfig, model: ModelConfig, platform: str) -> EngineConfig:
    """``config`` with every "auto" decided for ``model`` on ``platform``.

    Raises ConfigError for a context longer than the model was trained for.
    """
    longest = model.max_position_embeddings
    max_model_len = config.max_model_len
    if max_model_len == EngineConfig.max_model_len:  # the default gives way to a shorter model
        max_model_len = min(max_model_len, longest)
    if max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {max_model_len}: the model's context is {longest} tokens; "
            f"use --max-model-len {longest} or less"
        )
    dtype: DType = "float32" if platform == "cpu" else model.dtype
    return replace(
        config,
        max_model_len=max_model_len,
        dtype=dtype if config.dtype == "auto" else config.dtype,
        attention_backend=(
            "streamed" if config.attention_backend == "auto" else config.attention_backend
        ),
    )


def place_params(
    model: ModelConfig, dtype: str, checkpoint: Checkpoint, progress: Progress
) -> Params:
    """The checkpoint's weights, fused and on the device in ``dtype``; random without tensors."""
    if checkpoint.tensors is None:
        return jax.block_until_ready(init_params(model, dtype, seed=0))
    tensors = checkpoint.tensors
    total, done = len(tensors.shapes), 0

    def get(name: str) -> np.ndarray:
        nonlocal done
        array = tensors.get(name)
        done += 1
        progress("loading tensors", done, total)
        return array

    return build_params(model, get, put=lambda a: jax.device_put(a.astype(jnp.dtype(dtype))))


def _device_memory(config: EngineConfig, shapes: StepShapes) -> DeviceMemory | None:
    """What the device reports of its memory, None where it reports nothing (CPUs).

    The allocator's limit is this process's share, so the whole is the limit over the share. The
    workspace is the compiler's own figure for the largest steps; it ignores the pool's size, so a
    pool of the fewest blocks prices it.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats is None:
        return None
    largest = replace(shapes, decode=shapes.decode[-1:], prefill_tokens=shapes.prefill_tokens[-1:])
    return DeviceMemory(
        total_bytes=int(stats["bytes_limit"] / config.gpu_memory_utilization),
        weight_bytes=weight_bytes(shapes.model, shapes.dtype),
        workspace_bytes=compile_executables(largest).temp_bytes,
        reserve_bytes=_RESERVE_BYTES,
        free_bytes=stats["bytes_limit"] - stats["bytes_in_use"],
    )


def _host_bytes() -> int:
    """Bytes of host memory a pool may take: half of what is there."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def warm_engine(runner: ModelRunner, shapes: StepShapes) -> None:
    """Run every executable once, on empty rows, so that no request pays for a first call."""
    runner.permute_rows(np.full(shapes.max_num_seqs, -1, np.int32))
    for shape in shapes.decode:
        runner.decode(shape, np.zeros(shape.rows, np.int32)).read()
    for tokens in shapes.prefill_tokens:
        batch = jax.tree.map(
            lambda s: np.zeros(s.shape, s.dtype),
            prefill_batch_specs(tokens, shapes.max_num_seqs, shapes.blocks_per_row),
        )
        no_row = np.full(shapes.max_num_seqs, shapes.max_num_seqs, np.int32)
        runner.prefill(batch._replace(rows_S=no_row)).read()


def build_engine(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    report: Report = lambda line: None,
    progress: Progress = lambda what, done, total: None,
) -> BootedEngine:
    """From a checkpoint to an engine that will compile nothing more.

    ``report`` gets one line a phase. Raises BootError.
    """
    model = checkpoint.config
    platform = jax.default_backend()
    config = resolve(config, model, platform)
    seconds: dict[str, float] = {}
    mark = time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal mark
        seconds[phase], mark = time.perf_counter() - mark, time.perf_counter()

    bytes_of_weights = weight_bytes(model, config.dtype)
    report(f"loading {checkpoint.name}: {format_bytes(bytes_of_weights)} of {config.dtype} weights")
    params = place_params(model, config.dtype, checkpoint, progress)
    lap("weights")

    streamed = config.attention_backend != "rectangle"
    decode = DecodeBuckets(
        config.max_num_seqs,
        config.max_model_len,
        width_multiple=config.max_model_len,
        streamed=streamed,
        tile=decode_tile(config.block_size, config.blocks_per_row) if streamed else None,
    )
    prefill = PrefillBuckets(config.max_num_batched_tokens)
    capture = plan_capture(decode, num_heads=model.num_heads)
    shapes = StepShapes(
        model=model,
        dtype=config.dtype,
        backend=config.attention_backend,
        num_blocks=config.blocks_per_row + 1,
        block_size=config.block_size,
        blocks_per_row=config.blocks_per_row,
        max_num_seqs=config.max_num_seqs,
        decode=capture.shapes,
        prefill_tokens=prefill.tokens,
    )
    pool = plan_kv_pool(
        config,
        kv_bytes_per_block(model, config.block_size, config.dtype),
        device=_device_memory(config, shapes),
        host_bytes=_host_bytes(),
    )
    shapes = replace(shapes, num_blocks=pool.num_blocks)
    for line in boot_lines(pool, capture):
        report(line)
    lap("plan")

    report(f"compiling {1 + len(shapes.decode) + len(shapes.prefill_tokens)} executables")

    def built(step: Built, done: int, total: int) -> None:
        progress(f"compiling, {step.name} took {step.trace_s + step.compile_s:.1f} s", done, total)

    executables = compile_executables(shapes, workers=os.cpu_count() or 1, progress=built)
    lap("compile")
    report("allocating the pool and warming every executable")
    runner = ModelRunner(params, executables, shapes)
    warm_engine(runner, shapes)
    lap("warm")
    engine = Engine(
        model,
        config,
        runner,
        num_blocks=pool.num_blocks,
        decode_buckets=decode,
        prefill_buckets=prefill,
    )
    return BootedEngine(
        engine=engine,
        runner=runner,
        executables=executables,
        model=model,
        config=config,
        pool=pool,
        capture=capture,
        seconds=seconds,
    )


def build_app(
    settings: ServeSettings,
    *,
    report: Report,
    progress: Progress,
    on_death: Callable[[BaseException], None],
) -> Serving:
    """The whole server behind its port: checkpoint, engine, bridge and routes, in that order."""
    choice, server = settings.checkpoint, settings.server
    checkpoint = load_checkpoint(
        choice.model,
        load_format=choice.load_format,
        tokenizer=choice.tokenizer,
        progress=progress,
    )
    booted = build_engine(checkpoint, settings.engine, report=report, progress=progress)
    bundle = checkpoint.tokenizer
    if bundle is None:
        raise ConfigError(
            f"{checkpoint.name} has no tokenizer; name one with --tokenizer (a directory or a "
            "GGUF file)"
        )
    text = Text(
        bundle.tokenizer,
        chat_template=server.chat_template or bundle.chat_template,
        special_tokens=dict(bundle.special_tokens),
        bos_token_id=bundle.bos_token_id,
        add_bos=bundle.add_bos,
    )
    names = server.served_model_names or (checkpoint.name,)
    max_model_len = booted.config.max_model_len
    metrics = Metrics(names[0], max_model_len=max_model_len, prefix=server.metrics_prefix)
    engine = AsyncEngine(
        booted.engine,
        max_requests=booted.config.max_num_seqs + server.max_queued_requests,
        on_step=metrics.observe_step,
        on_death=on_death,
    )
    app = create_app(
        AppParts(
            engine=engine,
            text=text,
            metrics=metrics,
            served_names=names,
            max_model_len=max_model_len,
            version=__version__,
            boot_info=booted.info,
            api_keys=server.api_keys,
        )
    )
    return Serving(app, engine)
