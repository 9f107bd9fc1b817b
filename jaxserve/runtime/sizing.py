"""The sizes a boot decides on: buckets, the programs' shapes, and the memory there is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxserve.config import BootConfig, EngineConfig, ModelConfig
from jaxserve.errors import BootUnsound, ConfigError
from jaxserve.model.attention import decode_tile
from jaxserve.model.params import stacks_layers
from jaxserve.plan.buckets import DecodeBuckets, DecodeShape, PrefillBuckets
from jaxserve.plan.capture import CapturePlan, plan_capture
from jaxserve.plan.gates import DecodeRead, check_capture_limit, check_capture_matches_cache
from jaxserve.plan.pool import (
    DeviceMemory,
    KVPoolPlan,
    check_asked_size,
    kv_budget_bytes,
    kv_bytes_per_block,
    plan_kv_pool,
)
from jaxserve.plan.price import weight_bytes
from jaxserve.plan.units import MIB, format_bytes, round_up
from jaxserve.runtime.compiler import StepCompiler
from jaxserve.runtime.executables import Executables, StepShapes

# Held back on a device for what no plan counts: the runtime's context, inputs, fragmentation.
RESERVE_BYTES = 512 * MIB


def decode_read(config: EngineConfig) -> DecodeRead:
    """The read that decode steps use under ``config.attention_backend`` (resolved)."""
    if config.attention_backend == "rectangle":
        return DecodeRead(tile=None)
    return DecodeRead(tile=decode_tile(config.block_size, config.blocks_per_row))


def decode_buckets(config: EngineConfig) -> DecodeBuckets:
    """The decode shapes of ``config``, whose read decides whether width is an axis."""
    tile = decode_read(config).tile
    return DecodeBuckets(
        config.max_num_seqs,
        config.max_model_len,
        streamed=tile is not None,
        tile=tile,
        pinned=config.deterministic,
    )


def prefill_buckets(config: EngineConfig) -> PrefillBuckets:
    """The prefill sizes of ``config``."""
    return PrefillBuckets(config.max_num_batched_tokens, pinned=config.deterministic)


def exact_shape(config: EngineConfig, rows: int, width: int) -> DecodeShape:
    """The shape of a step that is not bucketed: its own rows, and width in whole blocks."""
    if config.attention_backend != "rectangle":
        return DecodeShape(rows, config.max_model_len)
    return DecodeShape(rows, min(config.max_model_len, round_up(width, config.block_size)))


def step_shapes(
    model: ModelConfig,
    config: EngineConfig,
    decode: tuple[DecodeShape, ...],
    num_blocks: int,
    platform: str,
) -> StepShapes:
    """What the programs are compiled from: the ``decode`` list, a pool of ``num_blocks``."""
    return StepShapes(
        model=model,
        dtype=config.dtype,
        backend=config.attention_backend,
        num_blocks=num_blocks,
        block_size=config.block_size,
        blocks_per_row=config.blocks_per_row,
        max_num_seqs=config.max_num_seqs,
        decode=decode,
        prefill_tokens=prefill_buckets(config).tokens,
        persist_inputs=config.persist_inputs,
        stacked=stacks_layers(platform),
        deterministic=config.deterministic,
    )


def device_memory(
    config: EngineConfig, model: ModelConfig, stats: Mapping[str, int], workspace_bytes: int
) -> DeviceMemory:
    """A device's memory from what its allocator reports with the weights resident.

    The allocator's limit is this process's share, so the whole is the limit over the share.
    """
    return DeviceMemory(
        total_bytes=int(stats["bytes_limit"] / config.gpu_memory_utilization),
        weight_bytes=weight_bytes(model, config.dtype),
        workspace_bytes=workspace_bytes,
        reserve_bytes=RESERVE_BYTES,
        free_bytes=stats["bytes_limit"] - stats["bytes_in_use"],
    )


def physical_bytes() -> int:
    """Bytes of this host's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def host_bytes() -> int:
    """Bytes of host memory a pool may take unasked: half of what is there."""
    return physical_bytes() // 2


def check_asked_sizes(
    model: ModelConfig,
    config: EngineConfig,
    boot: BootConfig,
    buckets: DecodeBuckets,
    memory: Mapping[str, int] | None,
    *,
    weights_placed: bool = False,
) -> None:
    """Refuse, before any weight is read, what the flags and the memory alone show cannot be.

    ``memory`` is the device's, still without the weights unless ``weights_placed``, None on a host.
    ``plan_sizes`` asks again once the weights are placed and the workspace is known. Raises
    BootError.
    """
    if config.capture_decode:
        capture = plan_capture(
            buckets, num_heads=model.num_heads, max_rows=boot.warm_rows, max_width=boot.warm_width
        )
        check_list_serves(capture, boot)
    per_block = kv_bytes_per_block(model, config.block_size, config.dtype)
    asked = config.num_blocks is not None or config.kv_cache_memory_bytes is not None
    if asked or memory is None:
        plan_kv_pool(config, per_block, host_bytes=host_bytes())
    if memory is None:
        total, advised, where = physical_bytes(), host_bytes(), "this host"
    else:
        total = advised = memory["bytes_limit"] - memory["bytes_in_use"]
        where = "the device"
    weights = 0 if weights_placed and memory is not None else weight_bytes(model, config.dtype)
    if weights + RESERVE_BYTES > total:
        raise ConfigError(
            f"the model's {format_bytes(weights)} of {config.dtype} weights and a reserve of "
            f"{format_bytes(RESERVE_BYTES)} do not fit the {format_bytes(total)} that {where} has; "
            "use a smaller model or a narrower --dtype"
        )
    check_asked_size(
        config,
        per_block,
        available_bytes=total - weights - RESERVE_BYTES,
        advised_bytes=advised,
        where=where,
    )


def check_list_serves(capture: CapturePlan, boot: BootConfig) -> None:
    """Refuse a list that leaves shapes out where nothing may be compiled for them later."""
    if capture.trimmed and not boot.allow_late_compile:
        raise ConfigError(
            f"capture list: {capture.count} of {capture.full_count} shapes, up to "
            f"{capture.max_rows} rows x {capture.max_width} tokens (width bound by "
            f"{capture.width_bound_by}), and a request that needs another could not be served: "
            "add --allow-late-compile, lower --max-num-seqs or --max-model-len, or use "
            "--attention-backend streamed, which needs fewer shapes"
        )


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The two sizing decisions and what is compiled for them.

    ``workspace_bytes`` is what the pool left for workspace, None where memory is not counted.
    """

    pool: KVPoolPlan
    capture: CapturePlan | None
    compiler: StepCompiler
    workspace_bytes: int | None


def plan_sizes(
    model: ModelConfig,
    config: EngineConfig,
    boot: BootConfig,
    buckets: DecodeBuckets,
    compiler: StepCompiler,
    memory: Mapping[str, int] | None,
) -> Sizes:
    """The pool, then the list, each from numbers taken when the other is accounted for.

    The pool takes what the compiled steps' workspace leaves. The list is asked against the memory
    that is free once the pool is decided, which the device cannot see yet.
    """

    def plan_list(free_bytes: int | None, reserved_bytes: int) -> CapturePlan | None:
        if not config.capture_decode:
            return None
        return plan_capture(
            buckets,
            num_heads=model.num_heads,
            free_bytes=free_bytes,
            reserved_bytes=reserved_bytes,
            max_rows=boot.warm_rows,
            max_width=boot.warm_width,
        )

    def sized(capture: CapturePlan | None, num_blocks: int) -> StepCompiler:
        decode = () if capture is None else capture.shapes
        return replace(
            compiler, shapes=step_shapes(model, config, decode, num_blocks, compiler.platform)
        )

    capture = plan_list(None, 0)
    probe = sized(capture, config.blocks_per_row + 1)
    workspace = None if memory is None else probe.workspace_bytes()
    device = None
    if memory is not None and workspace is not None:
        device = device_memory(config, model, memory, workspace)
    per_block = kv_bytes_per_block(model, config.block_size, config.dtype)
    if device is not None:
        available = kv_budget_bytes(device, 1.0)
        check_asked_size(
            config,
            per_block,
            available_bytes=available,
            advised_bytes=available,
            where="the device",
        )
    earlier = probe.earlier()
    pool = plan_kv_pool(
        config,
        per_block,
        device=device,
        host_bytes=host_bytes(),
        previous_num_blocks=None if earlier is None else earlier.num_blocks,
    )
    if memory is not None:
        free = memory["bytes_limit"] - memory["bytes_in_use"]
        capture = plan_list(free, pool.pool_bytes)
    if capture is not None:
        check_capture_matches_cache(capture, buckets)
        check_capture_limit(capture, capture.limit)
        check_list_serves(capture, boot)
    return Sizes(
        pool=pool,
        capture=capture,
        compiler=sized(capture, pool.num_blocks),
        workspace_bytes=workspace,
    )


def check_workspace(planned_bytes: int | None, executables: Executables) -> None:
    """Refuse executables that take more than the pool's plan left for them."""
    if planned_bytes is not None and executables.temp_bytes > planned_bytes + RESERVE_BYTES:
        raise BootUnsound(
            f"workspace of {format_bytes(executables.temp_bytes)}, and the pool was sized for "
            f"{format_bytes(planned_bytes)}: lower --gpu-memory-utilization"
        )
