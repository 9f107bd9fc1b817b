"""How many blocks the KV pool has, decided once at boot."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.errors import ConfigError, PoolTooSmall
from jaxserve.plan.batch import kv_pool_spec
from jaxserve.plan.units import MIB, cdiv, format_bytes, round_down

# Readings of free memory that differ by no more than this plan the same pool; see plan_kv_pool.
FREE_MEMORY_JITTER = 64 * MIB
# Rounding the block count down may cost this share of the blocks that fit: 1 / 32 on a fresh plan,
# 1 / 8 where it saves compiling every executable again.
GRID_STEPS = 32
KEEP_STEPS = 8

SizedBy = Literal["budget", "previous", "requests", "num_blocks", "kv_cache_memory_bytes"]


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What a device has and what this process takes of it besides the pool, in bytes.

    ``workspace_bytes`` is the largest temporary of any executable and ``reserve_bytes`` what is
    held back for the rest (the runtime's own context, inputs). ``free_bytes`` is what the device
    reports free *with the weights resident*, None where it reports nothing.
    """

    total_bytes: int
    weight_bytes: int
    workspace_bytes: int
    reserve_bytes: int
    free_bytes: int | None = None

    @property
    def foreign_bytes(self) -> int:
        """What is neither free nor our weights: held by other processes or by the runtime."""
        if self.free_bytes is None:
            return 0
        return max(0, self.total_bytes - self.free_bytes - self.weight_bytes)


@dataclass(frozen=True, kw_only=True)
class KVPoolPlan:
    """The pool's size and what decided it.

    ``num_blocks`` (C) counts the null block, which holds no token. ``budget_bytes`` is what the
    pool was allowed, None when the count itself was given.
    """

    num_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int
    sized_by: SizedBy
    budget_bytes: int | None

    @property
    def pool_bytes(self) -> int:
        """Bytes of every layer's K and V arrays, null block included."""
        return self.num_blocks * self.bytes_per_block

    @property
    def capacity_tokens(self) -> int:
        """Tokens the pool holds."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def full_length_requests(self) -> int:
        """How many requests of ``max_model_len`` tokens fit at once."""
        return (self.num_blocks - 1) // cdiv(self.max_model_len, self.block_size)

    def as_dict(self) -> dict[str, Any]:
        """Fields and derived figures, ready for JSON."""
        return asdict(self) | {
            "pool_bytes": self.pool_bytes,
            "capacity_tokens": self.capacity_tokens,
            "full_length_requests": self.full_length_requests,
        }

    def describe(self) -> str:
        """One line for the boot log."""
        return (
            f"KV pool: {self.num_blocks} blocks of {self.block_size} tokens, "
            f"{format_bytes(self.pool_bytes)}, {self.capacity_tokens} tokens "
            f"({self.full_length_requests} full-length requests of {self.max_model_len}), "
            f"sized by {self.sized_by}"
        )


def kv_bytes_per_block(model: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes one block takes over all layers: 2 (K and V) * L * K * Z * H * itemsize.

    K counts KV heads; counting query heads would overstate a grouped-query model by N / K.
    """
    one_array = kv_pool_spec(1, model.num_kv_heads, block_size, model.head_dim, dtype)
    return 2 * model.num_layers * one_array.nbytes


def kv_budget_bytes(device: DeviceMemory, utilization: float) -> int:
    """Bytes left for the pool when the whole process keeps to ``utilization`` of the device.

    The share covers weights, workspace, reserve and pool. What other processes hold lowers the
    budget only once the share no longer fits beside them. Not positive when nothing is left.
    """
    taken = device.workspace_bytes + device.reserve_bytes
    budget = int(device.total_bytes * utilization) - device.weight_bytes - taken
    if device.free_bytes is None:
        return budget
    return min(budget, device.free_bytes - taken)


def utilization_for(device: DeviceMemory, pool_bytes: int) -> float | None:
    """The least utilization, in whole hundredths, whose budget holds ``pool_bytes``, else None."""
    ours = device.weight_bytes + device.workspace_bytes + device.reserve_bytes + pool_bytes
    percent = cdiv(ours * 100, device.total_bytes)
    for utilization in (percent / 100, (percent + 1) / 100):  # the second if a float fell short
        if utilization <= 1.0 and kv_budget_bytes(device, utilization) >= pool_bytes:
            return utilization
    return None


def grid_step(num_blocks: int) -> int:
    """The grid at ``num_blocks``: the largest power of two up to ``num_blocks`` / GRID_STEPS."""
    return 1 << max(0, (num_blocks // GRID_STEPS).bit_length() - 1)


def _settle(
    budget_bytes: int, bytes_per_block: int, least: int, previous: int | None
) -> tuple[int, SizedBy]:
    """A block count that ``budget_bytes`` holds and that a slightly other budget gives as well.

    ``least`` must fit. See plan_kv_pool for what is guaranteed.
    """
    fits = budget_bytes // bytes_per_block
    if previous is not None and max(least, fits - fits // KEEP_STEPS) <= previous <= fits:
        return previous, "previous"
    steady = max(0, budget_bytes - FREE_MEMORY_JITTER) // bytes_per_block
    return max(least, round_down(steady, grid_step(steady))), "budget"


def _budget(
    config: EngineConfig, device: DeviceMemory | None, host_bytes: int | None
) -> tuple[int, SizedBy]:
    """The bytes the pool may take, and whether they were given or measured."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    if device is not None:
        return kv_budget_bytes(device, config.gpu_memory_utilization), "budget"
    if host_bytes is not None:
        return host_bytes, "budget"
    raise ValueError("plan_kv_pool: give device, host_bytes or a size in the config")


def plan_kv_pool(
    config: EngineConfig,
    bytes_per_block: int,
    *,
    device: DeviceMemory | None = None,
    host_bytes: int | None = None,
    previous_num_blocks: int | None = None,
) -> KVPoolPlan:
    """Decide the pool's block count.

    In this order: ``config.num_blocks`` as given; what ``config.kv_cache_memory_bytes`` holds; on a
    ``device``, what its budget holds (``kv_budget_bytes``); on a host, which reports no memory of
    its own, ``max_num_seqs`` requests of full length, or what ``host_bytes`` holds if that is less
    (the bytes this process may take for the pool).

    A count that comes from measured memory is an argument shape of every executable, so it is
    rounded down to a grid of ``grid_step`` blocks (at most 1/32 of the pool). No rounding alone can
    always give two readings one count: it fails when a grid line lies between them, which for
    readings d bytes apart is d / (step * bytes_per_block) of the cases. ``previous_num_blocks``,
    the count an earlier boot compiled for, closes the gap: it is kept while it fits and gives up at
    most 1/8 of the blocks. A fresh plan leaves FREE_MEMORY_JITTER of its budget unused, so a next
    boot whose budget is up to that much less or more is certain to keep the count, on a device and
    from a budget of 20 * FREE_MEMORY_JITTER (1.25 GiB) plus 21 blocks on.

    Raises PoolTooSmall when one request of ``max_model_len`` tokens does not fit beside the null
    block, naming a length that would and the knob to turn.
    """
    least = config.blocks_per_row + 1
    budget: int | None = None
    sized_by: SizedBy = "num_blocks"
    if config.num_blocks is not None:
        fits = config.num_blocks
    else:
        budget, sized_by = _budget(config, device, host_bytes)
        fits = budget // bytes_per_block
    if fits < least:
        raise PoolTooSmall(_refusal(config, bytes_per_block, fits, budget, device))
    num_blocks = fits
    if budget is not None and sized_by == "budget":
        wanted = config.max_num_seqs * config.blocks_per_row + 1
        if device is None and fits >= wanted:
            num_blocks, sized_by = wanted, "requests"
        else:
            num_blocks, sized_by = _settle(budget, bytes_per_block, least, previous_num_blocks)
    return KVPoolPlan(
        num_blocks=num_blocks,
        block_size=config.block_size,
        bytes_per_block=bytes_per_block,
        max_model_len=config.max_model_len,
        sized_by=sized_by,
        budget_bytes=budget,
    )


class _Asked(NamedTuple):
    """The pool's size as a flag gave it: the flag as typed, its bytes, and the flag that fits."""

    text: str
    nbytes: int
    fitting: str


def _asked(config: EngineConfig, bytes_per_block: int, fitting_blocks: int) -> _Asked | None:
    """What ``config`` asks for, beside the value that gives ``fitting_blocks``; None: nothing."""
    if config.num_blocks is not None:
        flag, value, per_block = "--num-gpu-blocks-override", config.num_blocks, 1
        nbytes = value * bytes_per_block
    elif config.kv_cache_memory_bytes is not None:
        flag, value = "--kv-cache-memory-bytes", config.kv_cache_memory_bytes
        nbytes, per_block = value, bytes_per_block
    else:
        return None
    return _Asked(f"{flag} {value}", nbytes, f"{flag} {fitting_blocks * per_block}")


def check_asked_size(
    config: EngineConfig,
    bytes_per_block: int,
    *,
    available_bytes: int,
    advised_bytes: int,
    where: str,
) -> None:
    """Refuse a pool size that a flag gave and that ``where`` cannot hold.

    ``available_bytes`` is what is left beside the weights, ``advised_bytes`` what the refusal
    advises, if that is less. A size that no flag gave passes: it was measured. Raises ConfigError.
    """
    fitting = max(0, min(available_bytes, advised_bytes)) // bytes_per_block
    asked = _asked(config, bytes_per_block, fitting)
    if asked is None or asked.nbytes <= available_bytes:
        return
    least = config.blocks_per_row + 1
    if fitting >= least:
        knob = f"use {asked.fitting} or less"
    else:
        knob = (
            f"one request of {config.max_model_len} tokens takes "
            f"{format_bytes(least * bytes_per_block)}, so lower --max-model-len as well"
        )
    raise ConfigError(
        f"{asked.text}: a KV pool of {format_bytes(asked.nbytes)}, and {where} has "
        f"{format_bytes(max(0, available_bytes))} beside the weights; {knob}"
    )


def _refusal(
    config: EngineConfig,
    bytes_per_block: int,
    fits: int,
    budget: int | None,
    device: DeviceMemory | None,
) -> str:
    """Why the pool is too small, which length would fit, and what else would help."""
    least = config.blocks_per_row + 1
    length = (fits - 1) * config.block_size
    shorter = f"--max-model-len {length} would fit" if length > 0 else "no length would fit"
    asked = _asked(config, bytes_per_block, least)
    measured = f"KV pool of {format_bytes(max(0, budget or 0))}"
    whose = measured if asked is None else asked.text
    text = (
        f"{whose}: {max(0, fits)} blocks of {config.block_size} tokens, and one request of "
        f"{config.max_model_len} tokens needs {least} with the null block; {shorter}"
    )
    other = ", or " if length > 0 else ": "
    if asked is not None:
        return f"{text}{other}use {asked.fitting}"
    if device is None:
        return f"{text}{other}free host memory, {format_bytes(least * bytes_per_block)} are needed"
    text = (
        f"{text}. Of {format_bytes(device.total_bytes)} on the device, weights take "
        f"{format_bytes(device.weight_bytes)}, workspace {format_bytes(device.workspace_bytes)}, "
        f"reserve {format_bytes(device.reserve_bytes)}, others {format_bytes(device.foreign_bytes)}"
    )
    enough = utilization_for(device, least * bytes_per_block)
    if enough is not None:
        return f"{text}; --gpu-memory-utilization {enough} would boot"
    return f"{text}; no --gpu-memory-utilization would boot"
