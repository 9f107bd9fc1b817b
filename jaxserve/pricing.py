"""Price a deployment: a boot's decisions without its weights, its pool or its server."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

import jax

from jaxserve.boot import resolve
from jaxserve.checkpoint.load import Checkpoint
from jaxserve.config import BootConfig, EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.plan.capture import plan_capture
from jaxserve.plan.compiled import CompiledFigures, Key
from jaxserve.plan.pool import DeviceMemory, check_asked_size, kv_bytes_per_block, plan_kv_pool
from jaxserve.plan.price import weight_bytes
from jaxserve.plan.price_list import PriceList, price_list
from jaxserve.runtime.compiler import StepCompiler
from jaxserve.runtime.cross_compile import Build
from jaxserve.runtime.executables import StepShapes
from jaxserve.runtime.sizing import (
    RESERVE_BYTES,
    check_asked_sizes,
    check_list_serves,
    decode_buckets,
    device_memory,
    host_bytes,
    prefill_buckets,
    step_shapes,
)
from jaxserve.runtime.targets import GpuTarget, compile_for_target, load_target

# Whose bandwidth the least times are stated at where no target is named.
_REFERENCE = "h200"


def price_deployment(
    checkpoint: Checkpoint,
    config: EngineConfig,
    boot: BootConfig,
    target: GpuTarget | None = None,
    *,
    build: Build | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    report: Callable[[str], None] = lambda line: None,
) -> PriceList:
    """What a boot of ``checkpoint`` would decide, compile and hold.

    With a ``target`` every executable is compiled for it, on a machine that need not have one, and
    the pool is sized to its memory; a ``build`` keeps them. Without, everything is arithmetic, and
    this machine's device is asked for nothing but its memory, and for that only where ``config``
    leaves the pool's size open. Raises BootError.
    """
    if not config.capture_decode:
        raise ConfigError(
            "--plan: a server that compiles no list has no prices; keep --cuda-graphs"
        )
    model = checkpoint.config
    platform = jax.default_backend() if target is None else "cuda"
    config = resolve(config, model, platform)
    buckets = decode_buckets(config)
    capture = plan_capture(
        buckets, num_heads=model.num_heads, max_rows=boot.warm_rows, max_width=boot.warm_width
    )
    try:
        if platform == "cpu":  # a GPU's memory would have to be asked for
            check_asked_sizes(model, config, boot, buckets, None)
        check_list_serves(capture, boot)
    except ConfigError as refusal:
        report(f"a boot with these flags would be refused: {refusal}")
    shapes = step_shapes(model, config, capture.shapes, config.blocks_per_row + 1, platform)

    def compile_list(
        target: GpuTarget, shapes: StepShapes, build: Build | None = None
    ) -> Mapping[Key, CompiledFigures]:
        return compile_for_target(
            target,
            shapes,
            workers=os.cpu_count() or 1,
            build=build,
            progress=lambda done, total: progress(f"compiling for {target.device}", done, total),
            report=report,
        )

    per_block = kv_bytes_per_block(model, config.block_size, config.dtype)
    weights = weight_bytes(model, config.dtype)
    if target is not None:
        room = target.memory_bytes - weights - RESERVE_BYTES
        check_asked_size(
            config, per_block, available_bytes=room, advised_bytes=room, where=target.device
        )
    device = None
    if config.num_blocks is None and config.kv_cache_memory_bytes is None:
        if target is None:
            device = _memory_here(config, shapes)
        else:
            figures = compile_list(target, _largest(shapes))
            device = DeviceMemory(  # nobody else on it
                total_bytes=target.memory_bytes,
                weight_bytes=weights,
                workspace_bytes=max(made.temp_bytes for made in figures.values()),
                reserve_bytes=RESERVE_BYTES,
            )
    pool = plan_kv_pool(
        config,
        per_block,
        device=device,
        host_bytes=host_bytes(),
    )
    compiled = None
    if target is not None:
        compiled = compile_list(target, replace(shapes, num_blocks=pool.num_blocks), build)
    reference = load_target(_REFERENCE) if target is None else target
    return price_list(
        checkpoint.name,
        model,
        config,
        pool,
        capture,
        buckets,
        prefill_buckets(config),
        bandwidth=reference.bandwidth,
        bandwidth_of=reference.device,
        target=None if target is None else target.device,
        compiled=compiled,
    )


def _largest(shapes: StepShapes) -> StepShapes:
    """The steps of most rows and of most tokens, which need the most workspace."""
    return replace(shapes, decode=shapes.decode[-1:], prefill_tokens=shapes.prefill_tokens[-1:])


def _memory_here(config: EngineConfig, shapes: StepShapes) -> DeviceMemory | None:
    """This device's memory without the weights in it, None where it reports none (CPUs)."""
    stats = jax.local_devices()[0].memory_stats()
    if stats is None:
        return None
    compiler = StepCompiler(shapes=shapes, platform=jax.default_backend())
    memory = device_memory(config, shapes.model, stats, compiler.workspace_bytes())
    assert memory.free_bytes is not None  # it has just been read
    return replace(memory, free_bytes=memory.free_bytes - memory.weight_bytes)
