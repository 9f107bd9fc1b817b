"""Price a deployment: a boot's decisions without its weights, its pool or its server."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

import jax

from jaxserve.boot import resolve
from jaxserve.checkpoint.load import Checkpoint
from jaxserve.config import EngineConfig
from jaxserve.model.attention import decode_tile
from jaxserve.plan.buckets import DecodeBuckets, PrefillBuckets
from jaxserve.plan.capture import plan_capture
from jaxserve.plan.compiled import CompiledFigures, Key
from jaxserve.plan.pool import DeviceMemory, KVPoolPlan, kv_bytes_per_block, plan_kv_pool
from jaxserve.plan.price import weight_bytes
from jaxserve.plan.price_list import PriceList, price_list
from jaxserve.plan.units import MIB
from jaxserve.runtime.compiler import compile_executables
from jaxserve.runtime.executables import StepShapes
from jaxserve.runtime.targets import GpuTarget, compile_for_target, load_target

# Held back on a device for what no plan counts: the runtime's context, inputs, fragmentation.
_RESERVE_BYTES = 512 * MIB
# Whose bandwidth the least times are stated at where no target is named.
_REFERENCE = "h200"

Progress = Callable[[str, int, int], None]


def price_deployment(
    checkpoint: Checkpoint,
    config: EngineConfig,
    target: GpuTarget | None = None,
    *,
    progress: Progress = lambda what, done, total: None,
) -> PriceList:
    """What a boot of ``checkpoint`` under ``config`` would decide, compile and hold.

    With a ``target`` every executable is compiled for it, on a machine that need not have one, and
    the pool is sized to its memory. Without, everything is arithmetic and this machine's device is
    asked for nothing but its memory, and only where ``config`` leaves the pool's size open.
    Raises BootError.
    """
    model = checkpoint.config
    config = resolve(config, model, jax.default_backend() if target is None else "cuda")
    streamed = config.attention_backend != "rectangle"
    decode = DecodeBuckets(
        config.max_num_seqs,
        config.max_model_len,
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

    def compile_list(what: str, shapes: StepShapes) -> Mapping[Key, CompiledFigures]:
        assert target is not None
        return compile_for_target(
            target,
            shapes,
            workers=os.cpu_count() or 1,
            progress=lambda done, total: progress(what, done, total),
        )

    pool = _plan_pool(config, shapes, target, compile_list)
    reference = target or load_target(_REFERENCE)
    return price_list(
        checkpoint.name,
        model,
        config,
        pool,
        capture,
        decode,
        prefill,
        bandwidth=reference.bandwidth,
        bandwidth_of=reference.device,
        target=None if target is None else target.device,
        compiled=None
        if target is None
        else compile_list("compiling", replace(shapes, num_blocks=pool.num_blocks)),
    )


def _plan_pool(
    config: EngineConfig,
    shapes: StepShapes,
    target: GpuTarget | None,
    compile_list: Callable[[str, StepShapes], Mapping[Key, CompiledFigures]],
) -> KVPoolPlan:
    """The pool a boot would plan on ``target``, or here."""
    bytes_per_block = kv_bytes_per_block(shapes.model, config.block_size, config.dtype)
    if config.num_blocks is not None or config.kv_cache_memory_bytes is not None:
        return plan_kv_pool(config, bytes_per_block)
    weights = weight_bytes(shapes.model, shapes.dtype)
    # Workspace grows with rows and tokens, and not with the pool.
    largest = replace(shapes, decode=shapes.decode[-1:], prefill_tokens=shapes.prefill_tokens[-1:])
    if target is not None:
        figures = compile_list("compiling the largest", largest)
        device = DeviceMemory(
            total_bytes=target.memory_bytes,
            weight_bytes=weights,
            workspace_bytes=max(made.temp_bytes for made in figures.values()),
            reserve_bytes=_RESERVE_BYTES,
        )
        return plan_kv_pool(config, bytes_per_block, device=device)
    stats = jax.local_devices()[0].memory_stats()
    if stats is None:
        half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        return plan_kv_pool(config, bytes_per_block, host_bytes=half)
    limit = stats["bytes_limit"]  # this process's share of the whole
    device = DeviceMemory(
        total_bytes=int(limit / config.gpu_memory_utilization),
        weight_bytes=weights,
        workspace_bytes=compile_executables(largest).temp_bytes,
        reserve_bytes=_RESERVE_BYTES,
        free_bytes=limit - stats["bytes_in_use"] - weights,  # they are not resident yet
    )
    return plan_kv_pool(config, bytes_per_block, device=device)
