"""The price list of a deployment: every executable, its bytes and its least time, and the total."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.plan.batch import (
    ArraySpec,
    counts_spec,
    decode_state_specs,
    mask_spec,
    new_blocks_spec,
    permutation_spec,
    prefill_batch_specs,
    row_spec,
)
from jaxserve.plan.buckets import DecodeBuckets, DecodeShape, PrefillBuckets
from jaxserve.plan.capture import CapturePlan, score_bytes
from jaxserve.plan.compiled import CompiledFigures, Key
from jaxserve.plan.pool import KVPoolPlan
from jaxserve.plan.price import decode_traffic, prefill_traffic, roofline_seconds, weight_bytes
from jaxserve.plan.report import boot_lines, format_table
from jaxserve.plan.units import format_bytes, format_seconds

Kind = Literal["permute", "write_counts", "decode", "prefill"]


@dataclass(frozen=True, kw_only=True)
class ExecutablePrice:
    """One executable; ``rows`` x ``width`` of a decode, ``tokens`` of a prefill, else None.

    ``argument_bytes``, ``traffic_bytes`` and ``roofline_seconds`` are arithmetic. So is
    ``modelled_temp_bytes``, the scores of a decode; None where there is no model. ``compiled`` is
    None where nothing was compiled.
    """

    name: str
    kind: Kind
    rows: int | None = None
    width: int | None = None
    tokens: int | None = None
    argument_bytes: int
    traffic_bytes: int
    roofline_seconds: float
    modelled_temp_bytes: int | None = None
    compiled: CompiledFigures | None

    @property
    def temp_bytes(self) -> int | None:
        """The compiler's figure where there is one, else the model's."""
        return self.modelled_temp_bytes if self.compiled is None else self.compiled.temp_bytes

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; what was not compiled is null."""
        made = self.compiled
        return {
            "name": self.name,
            "kind": self.kind,
            "rows": self.rows,
            "width": self.width,
            "tokens": self.tokens,
            "compile_seconds": made and made.compile_seconds,
            "temp_bytes": self.temp_bytes,
            "argument_bytes": self.argument_bytes,
            "traffic_bytes": self.traffic_bytes,
            "roofline_seconds": self.roofline_seconds,
            "compiled": made and made.as_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class PriceList:
    """What a deployment would decide, compile and hold; see ``price_list``.

    ``bandwidth`` is bytes a second of the memory of ``bandwidth_of``; ``target`` the GPU compiled
    for, None: nothing was compiled.
    """

    model_name: str
    dtype: str
    attention_backend: str
    target: str | None
    bandwidth: float
    bandwidth_of: str
    weight_bytes: int
    state_bytes: int
    pool: KVPoolPlan
    capture: CapturePlan
    executables: tuple[ExecutablePrice, ...]

    @property
    def temp_bytes(self) -> int:
        """Workspace of the largest executable: they run one at a time and share one allocator."""
        return max(e.temp_bytes or 0 for e in self.executables)

    @property
    def compile_seconds(self) -> float | None:
        """Tracing and compiling, summed over the list as if one at a time; None: not compiled."""
        made = [e.compiled for e in self.executables if e.compiled is not None]
        return sum(m.compile_seconds for m in made) if made else None

    @property
    def basis(self) -> dict[str, str]:
        """Where each figure of the list comes from."""
        if self.target is None:
            compiled = "not compiled; --target compiles"
            temp = "modelled: float32 scores of a decode; unknown for the others"
        else:
            compiled = f"measured on this machine, several at once, compiling for {self.target}"
            temp = f"from the compiler, for {self.target}"
        return {
            "compile_seconds": compiled,
            "temp_bytes": temp,
            "argument_bytes": "exact: weights, pool, decode state and the host's arrays",
            "traffic_bytes": "modelled: weights read once, K/V read and written; decode rows all "
            "at the shape's width, prefill as one prompt from its start",
            "roofline_seconds": f"modelled: traffic at the {self.bandwidth / 1e9:.0f} GB/s of "
            f"{self.bandwidth_of}; no step is faster",
        }

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "model": self.model_name,
            "dtype": self.dtype,
            "attention_backend": self.attention_backend,
            "target": self.target,
            "pool": self.pool.as_dict(),
            "capture": self.capture.as_dict(),
            "executables": [e.as_dict() for e in self.executables],
            "bandwidth_bytes_per_second": self.bandwidth,
            "bandwidth_of": self.bandwidth_of,
            "basis": self.basis,
            "total": {
                "executables": len(self.executables),
                "compile_seconds": self.compile_seconds,
                "weight_bytes": self.weight_bytes,
                "state_bytes": self.state_bytes,
                "pool_bytes": self.pool.pool_bytes,
                "temp_bytes": self.temp_bytes,
                "resident_bytes": self._resident_bytes,
            },
        }

    def describe(self) -> str:
        """The list as text: the two decisions, a table, where the figures come from, the total."""
        where = "" if self.target is None else f", compiled for {self.target}"
        lines = [
            f"{self.model_name}, {self.dtype}, {self.attention_backend} attention{where}",
            *boot_lines(self.pool, self.capture),
            "",
            self._table(),
            "",
            *(f"{name.replace('_', ' ')}: {basis}" for name, basis in self.basis.items()),
            "",
            f"total: {len(self.executables)} executables{self._compile_total()}; "
            f"{format_bytes(self._resident_bytes)} resident: weights "
            f"{format_bytes(self.weight_bytes)}, pool {format_bytes(self.pool.pool_bytes)}, state "
            f"{format_bytes(self.state_bytes)}, largest workspace {format_bytes(self.temp_bytes)}",
        ]
        return "\n".join(lines)

    @property
    def _resident_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes + self.pool.pool_bytes + self.temp_bytes

    def _compile_total(self) -> str:
        seconds = self.compile_seconds
        return "" if seconds is None else f", {format_seconds(seconds)} of compiling"

    def _table(self) -> str:
        header = ["executable", "temp", "arguments", "traffic", "at least"]
        rows = []
        for e in self.executables:
            temp = "-" if e.temp_bytes is None else format_bytes(e.temp_bytes)
            row = [e.name, temp, format_bytes(e.argument_bytes), format_bytes(e.traffic_bytes)]
            row.append(format_seconds(e.roofline_seconds))
            if e.compiled is not None:
                row += _compiled_cells(e.compiled)
            rows.append(row)
        if self.target is not None:
            header += ["compile", "launches", "in loops", "in branches", "registers", "spilled"]
        return format_table(header, rows)


def _compiled_cells(made: CompiledFigures) -> list[str]:
    cells = [format_seconds(made.compile_seconds)]
    cells += [str(made.launches), str(made.loop_launches), str(made.branch_launches)]
    if not made.kernels:
        return [*cells, *(["-", "-"] if made.kernels is not None else ["?", "?"])]
    spilled = sum(k.spill_store_bytes + k.spill_load_bytes for k in made.kernels)
    return [*cells, str(max(k.registers for k in made.kernels)), format_bytes(spilled)]


def tree_nbytes(specs: Any) -> int:
    """Bytes of all arrays in nested tuples of ArraySpec."""
    if isinstance(specs, ArraySpec):
        return specs.nbytes
    return sum(tree_nbytes(s) for s in specs)


def price_list(
    model_name: str,
    model: ModelConfig,
    config: EngineConfig,
    pool: KVPoolPlan,
    capture: CapturePlan,
    decode: DecodeBuckets,
    prefill: PrefillBuckets,
    *,
    bandwidth: float,
    bandwidth_of: str,
    target: str | None = None,
    compiled: Mapping[Key, CompiledFigures] | None = None,
) -> PriceList:
    """Price every executable of a plan.

    ``config`` has no "auto" left. ``bandwidth`` is bytes a second. ``compiled`` is what the
    compiler said of each for ``target``; give both or neither.
    """

    def figures(key: Key) -> CompiledFigures | None:
        return None if compiled is None else compiled[key]

    weights = weight_bytes(model, config.dtype)
    vocab_size = model.vocab_size
    state = tree_nbytes(decode_state_specs(config.max_num_seqs, config.blocks_per_row, vocab_size))
    resident = weights + pool.pool_bytes + state

    def price_permute() -> ExecutablePrice:
        traffic = 2 * state  # read and written
        return ExecutablePrice(
            name="permute",
            kind="permute",
            argument_bytes=state + permutation_spec(config.max_num_seqs).nbytes,
            traffic_bytes=traffic,
            roofline_seconds=traffic / bandwidth,
            compiled=figures("permute"),
        )

    def price_write_counts() -> ExecutablePrice:
        counts = counts_spec(vocab_size).nbytes
        return ExecutablePrice(
            name="write_counts",
            kind="write_counts",
            argument_bytes=state + row_spec().nbytes + counts,
            traffic_bytes=2 * counts,  # the host's read, the row written
            roofline_seconds=2 * counts / bandwidth,
            compiled=figures("write_counts"),
        )

    def price_decode(shape: DecodeShape) -> ExecutablePrice:
        cells = decode.cells_for(*shape)
        traffic = decode_traffic(model, rows=shape.rows, cells=cells, dtype=config.dtype)
        return ExecutablePrice(
            name=f"decode {shape.rows}x{shape.width}",
            kind="decode",
            rows=shape.rows,
            width=shape.width,
            argument_bytes=resident
            + new_blocks_spec(shape.rows).nbytes
            + mask_spec(shape.rows, vocab_size).nbytes,
            traffic_bytes=traffic.total_bytes,
            roofline_seconds=roofline_seconds(traffic, bandwidth),
            modelled_temp_bytes=score_bytes(shape, model.num_heads, capture.tile),
            compiled=figures(shape),
        )

    def price_prefill(tokens: int) -> ExecutablePrice:
        sent = prefill_batch_specs(tokens, config.max_num_seqs, config.blocks_per_row, vocab_size)
        traffic = prefill_traffic(model, tokens=tokens, context=tokens, dtype=config.dtype)
        return ExecutablePrice(
            name=f"prefill {tokens}",
            kind="prefill",
            tokens=tokens,
            argument_bytes=resident + tree_nbytes(sent),
            traffic_bytes=traffic.total_bytes,
            roofline_seconds=roofline_seconds(traffic, bandwidth),
            compiled=figures(tokens),
        )

    return PriceList(
        model_name=model_name,
        dtype=config.dtype,
        attention_backend=config.attention_backend,
        target=target,
        bandwidth=bandwidth,
        bandwidth_of=bandwidth_of,
        weight_bytes=weights,
        state_bytes=state,
        pool=pool,
        capture=capture,
        executables=(
            price_permute(),
            price_write_counts(),
            *map(price_decode, capture.shapes),
            *map(price_prefill, prefill.tokens),
        ),
    )
