"""The drawings of the docs, from the records the code plans with: python scripts/draw.py [DIR].

Writes boot_order.png, width_axis.png and picture.png. Needs matplotlib: pip install -e '.[bench]'.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bootbench
import widthbench
from drawing import BLUE, GREEN, GREY, ORANGE, PALE, RED, SOFT, save
from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
from matplotlib.patches import Rectangle  # pyright: ignore[reportMissingImports]
from picture import draw_picture

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.plan.buckets import DecodeBuckets
from jaxserve.plan.capture import CapturePlan, plan_capture
from jaxserve.plan.pool import DeviceMemory, KVPoolPlan, kv_bytes_per_block, plan_kv_pool
from jaxserve.plan.price import weight_bytes
from jaxserve.plan.units import GIB, MIB, format_bytes
from jaxserve.runtime.sizing import RESERVE_BYTES, decode_buckets

# The boot that is drawn: an 8B model in bfloat16 on a card of 24 GiB.
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
)
CONFIG = EngineConfig(
    dtype="bfloat16", max_num_seqs=64, max_model_len=8192, attention_backend="streamed"
)
DEVICE = DeviceMemory(
    total_bytes=24 * GIB,
    weight_bytes=weight_bytes(MODEL, CONFIG.dtype),
    workspace_bytes=320 * MIB,  # stated; a boot asks the compiler
    reserve_bytes=RESERVE_BYTES,
)
# The rectangle list whose ceilings are drawn, and the bounds it is put under.
SLOTS, CONTEXT, HEADS = 256, 8192, 32
WARM_WIDTH, BUDGET_BYTES = 4096, 80 * MIB


@dataclass(frozen=True)
class BootStep:
    """One phase of a boot: what it does, and the bytes that lie on the device when it ends.

    ``decided_bytes`` are spoken for and not allocated: the device reports them free.
    """

    phase: str
    does: str
    weight_bytes: int = 0
    pool_bytes: int = 0
    workspace_bytes: int = 0
    decided_bytes: int = 0


def boot_steps(
    pool: KVPoolPlan, capture: CapturePlan, device: DeviceMemory
) -> tuple[BootStep, ...]:
    """The phases of a boot report, in their order, with the bytes the two plans decided."""
    weights, blocks, work = device.weight_bytes, pool.pool_bytes, device.workspace_bytes
    planned = {"weight_bytes": weights, "decided_bytes": blocks + work}
    resident = {"weight_bytes": weights, "pool_bytes": blocks}
    shapes = f"{capture.count} decode shapes and the prefills, no pool yet"
    return (
        BootStep("import", "flags are read, then JAX is imported"),
        BootStep("checkpoint", "config, tokenizer and tensor index are opened"),
        BootStep("weights", "tensors are placed, one at a time", weights),
        BootStep("plan", "free memory is read once: the pool, then the list", **planned),
        BootStep("trace", "every shape is lowered from specs", **planned),
        BootStep("compile", shapes, **planned),
        BootStep("load", "what the cache has is not compiled", **planned),
        BootStep("store", "what was compiled is kept for the next boot", **planned),
        BootStep("pool", "allocated once, donated ever after", **resident, decided_bytes=work),
        BootStep("warm", "each executable runs on empty rows", **resident, workspace_bytes=work),
        BootStep("app", "the loop's thread, then the routes", **resident, workspace_bytes=work),
    )


def ceilings() -> tuple[tuple[str, CapturePlan], ...]:
    """The list of SLOTS x CONTEXT under each of the four bounds alone, and under all of them."""
    buckets = DecodeBuckets(SLOTS, CONTEXT)
    free: dict[str, Any] = {"limit": buckets.count}
    bounds: dict[str, dict[str, Any]] = {
        "served context": free,
        f"--warm-width {WARM_WIDTH}": free | {"max_width": WARM_WIDTH},
        f"{format_bytes(BUDGET_BYTES)} of workspace": free | {"free_bytes": BUDGET_BYTES},
        "64 executables": {},
        "all four": {"max_width": WARM_WIDTH, "free_bytes": BUDGET_BYTES},
    }
    return tuple(
        (name, plan_capture(buckets, num_heads=HEADS, **bound)) for name, bound in bounds.items()
    )


def draw_boot_order() -> Any:
    """The boot top to bottom with what is resident, the four ceilings, and wanted against kept."""
    pool = plan_kv_pool(
        CONFIG, kv_bytes_per_block(MODEL, CONFIG.block_size, CONFIG.dtype), device=DEVICE
    )
    capture = plan_capture(decode_buckets(CONFIG), num_heads=MODEL.num_heads)
    figure = Figure(figsize=(15, 8.2), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.35, 1), wspace=0.06, hspace=0.09)
    _resident(figure.add_subplot(grid[:, 0]), pool, capture)
    _ceilings(figure.add_subplot(grid[0, 1]))
    _wanted(figure.add_subplot(grid[1, 1]))
    return figure


def _resident(axes: Any, pool: KVPoolPlan, capture: CapturePlan) -> None:
    steps = boot_steps(pool, capture, DEVICE)
    for y, step in enumerate(steps):
        left = 0.0
        for size, look in (
            (step.weight_bytes, {"color": BLUE}),
            (step.pool_bytes, {"color": GREEN}),
            (step.workspace_bytes, {"color": ORANGE}),
            (step.decided_bytes, {"facecolor": "white", "edgecolor": GREEN, "hatch": "////"}),
        ):
            if not size:
                continue
            axes.barh(y, size / GIB, left=left, height=0.5, **look)
            left += size / GIB
        axes.text(0.12, y - 0.38, step.does, fontsize=9, color=SOFT, va="center")
    reserve = DEVICE.reserve_bytes / GIB
    share = CONFIG.gpu_memory_utilization * DEVICE.total_bytes / GIB
    axes.axvspan(share - reserve, share, color=PALE, zorder=0)
    axes.axvline(share, color=RED, linewidth=1.4)
    axes.text(
        share - 0.7, -0.72, f"--gpu-memory-utilization {share:.1f} GiB", color=RED, ha="right"
    )
    names = [step.phase for step in steps]
    axes.annotate(
        "free memory\nis read here",
        xy=(DEVICE.weight_bytes / GIB, names.index("plan") - 0.26),
        xytext=(DEVICE.weight_bytes / GIB + 0.8, names.index("checkpoint") + 0.3),
        arrowprops={"arrowstyle": "-|>", "color": RED},
        color=RED,
    )
    handles = [
        Rectangle((0, 0), 1, 1, color=BLUE),
        Rectangle((0, 0), 1, 1, facecolor="white", edgecolor=GREEN, hatch="////"),
        Rectangle((0, 0), 1, 1, color=GREEN),
        Rectangle((0, 0), 1, 1, color=ORANGE),
        Rectangle((0, 0), 1, 1, color=PALE),
    ]
    labels = [
        f"weights, {format_bytes(DEVICE.weight_bytes)}",
        "decided, not yet spent: the device calls it free",
        f"pool, {pool.num_blocks} blocks, {format_bytes(pool.pool_bytes)}",
        f"workspace while an executable runs, {format_bytes(DEVICE.workspace_bytes)}",
        f"reserve, {format_bytes(DEVICE.reserve_bytes)}",
    ]
    axes.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=2)
    axes.set_yticks(range(len(steps)), names, fontsize=11)
    axes.set_ylim(len(steps) - 0.5, -1.0)
    axes.set_xlim(0, DEVICE.total_bytes / GIB)
    axes.set_xlabel("GiB on the device when the phase ends")
    axes.set_title(f"The boot, and what lies on a device of {format_bytes(DEVICE.total_bytes)}")


def _ceilings(axes: Any) -> None:
    plans = ceilings()
    for y, (name, plan) in enumerate(plans):
        last = name == "all four"
        axes.barh(y, plan.max_width, height=0.55, color=BLUE if last else PALE)
        who = f", width_bound_by = {plan.width_bound_by}" if last else ""
        weight = "bold" if last else "normal"
        axes.text(plan.max_width + 90, y, f"{plan.max_width}{who}", va="center", fontweight=weight)
    width = plans[-1][1].max_width
    axes.axvline(width, color=BLUE, linewidth=1, linestyle="--", zorder=0)
    axes.set_yticks(range(len(plans)), [name for name, _ in plans])
    axes.invert_yaxis()
    axes.set_xlim(0, CONTEXT * 1.12)
    axes.set_xlabel("tokens of context")
    axes.set_title(f"Four ceilings, one width ({SLOTS} slots of {CONTEXT}, rectangle read)")


def _wanted(axes: Any) -> None:
    deployments = [bootbench.price(*d) for d in bootbench.DEPLOYMENTS]
    limit = bootbench.DEFAULT_CAPTURE_LIMIT
    for y, d in enumerate(deployments):
        axes.barh(y, d.wanted, height=0.6, color=PALE)
        axes.barh(y, d.kept, height=0.6, color=BLUE)
        moved = f"  saves {d.saved_startup_seconds:.2f} s of boot, " if d.over else "  fits"
        late = f"moves {d.client_latency_seconds:.2f} s to clients" if d.over else ""
        axes.text(d.wanted, y, moved + late, va="center", fontsize=9, color=SOFT)
    axes.axvline(limit, color=RED, linewidth=1.2)
    axes.text(limit + 6, -0.85, f"limit {limit}", color=RED, fontsize=9)
    axes.set_yticks(range(len(deployments)), [f"{d.slots} x {d.context}" for d in deployments])
    axes.set_ylim(len(deployments) - 0.4, -1.2)
    axes.set_xlim(0, 960)
    axes.set_xlabel("decode shapes: wanted (pale), kept (blue)")
    axes.set_title(f"The trim in both currencies, at {bootbench.MILLISECONDS_PER_SHAPE} ms a shape")


def draw_width_axis() -> Any:
    """The rectangle's list, the streamed one, the three ratios, and what each read touches."""
    rectangle = DecodeBuckets(SLOTS, CONTEXT)
    streamed = DecodeBuckets(SLOTS, CONTEXT, streamed=True, tile=widthbench.TILE)
    figure = Figure(figsize=(15, 8), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.7, 1), wspace=0.05, hspace=0.1)
    _shape_grid(figure.add_subplot(grid[0, 0]), rectangle, plan_capture(rectangle, num_heads=HEADS))
    _shape_grid(figure.add_subplot(grid[1, 0]), streamed, plan_capture(streamed, num_heads=HEADS))
    _ratios(figure.add_subplot(grid[0, 1]))
    _touched(figure.add_subplot(grid[1, 1]), rectangle, streamed)
    return figure


def _shape_grid(axes: Any, buckets: DecodeBuckets, plan: CapturePlan) -> None:
    kept = set(plan.shapes)
    edges = (0, *buckets.widths)
    for y, rows in enumerate(buckets.rows):
        for left, width in zip(edges, buckets.widths, strict=False):
            colour = BLUE if (rows, width) in kept else PALE
            box = Rectangle((left, y), width - left, 1, facecolor=colour, edgecolor="white")
            axes.add_patch(box)
    axes.set_xlim(0, CONTEXT)
    axes.set_ylim(0, len(buckets.rows))
    axes.set_yticks([y + 0.5 for y in range(len(buckets.rows))], [str(r) for r in buckets.rows])
    axes.set_xticks(range(0, CONTEXT + 1, 1024))
    axes.set_xlabel("width bucket, tokens of context")
    axes.set_ylabel("row bucket")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    read = "rectangle" if plan.tile is None else f"streamed, {plan.tile}-key tiles"
    trim = f", {plan.count} kept under a limit of {plan.limit}" if plan.trimmed else ", all kept"
    axes.set_title(
        f"{read}: {len(buckets.rows)} x {len(buckets.widths)} = {plan.full_count} shapes{trim}; "
        f"width bound by {plan.width_bound_by}"
    )


def _ratios(axes: Any) -> None:
    lists = [widthbench.price(SLOTS, CONTEXT, tile) for tile in (None, widthbench.TILE)]
    ratios = widthbench.ratios(*lists)
    rows = (
        ("shapes", ratios.shapes, *(str(c.shapes) for c in lists)),
        ("startup", ratios.startup, *(f"{c.startup_seconds:.1f} s" for c in lists)),
        ("arena", ratios.arena, *(format_bytes(c.arena_bytes) for c in lists)),
    )
    for y, (_, ratio, before, after) in enumerate(rows):
        axes.barh(y, ratio, height=0.5, color=(BLUE, ORANGE, GREEN)[y])
        axes.text(ratio * 1.12, y - 0.09, f"{ratio:.0f}x", fontsize=13, fontweight="bold")
        axes.text(ratio * 1.12, y + 0.2, f"{before} to {after}", fontsize=9, color=SOFT)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, 4096)
    axes.set_xticks([1, 4, 16, 64, 256], ["1x", "4x", "16x", "64x", "256x"])
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows], fontsize=11)
    axes.invert_yaxis()
    axes.set_title(f"Three ratios, kept apart ({SLOTS} slots of {CONTEXT}, modelled)")


_HATCHED = {"facecolor": "white", "edgecolor": ORANGE, "hatch": "////"}


def _touched(axes: Any, rectangle: DecodeBuckets, streamed: DecodeBuckets) -> None:
    """What a step of three requests computes: (row, key) pairs asked for and padding."""
    rows, context = 3, 300
    top = 0.0
    for name, buckets in (("rectangle", rectangle), ("streamed", streamed)):
        drawn = buckets.row_bucket(rows)
        touched = buckets.cells_for(rows, context)
        waste = buckets.waste(rows, context)
        says = f"{name}: {touched} cells for {rows * context}, {waste:.1%} waste"
        axes.text(0, top - 0.75, says, fontweight="bold")
        for y in range(drawn):
            used = context if y < rows else 0
            if not used and buckets.tile is not None:
                nothing = "a row without a context walks no tile"
                axes.text(4, top + y, nothing, va="center", color=GREY)
                continue
            width = touched // (drawn if buckets.tile is None else rows)
            axes.barh(top + y, used, height=0.8, color=BLUE)
            axes.barh(top + y, width - used, left=used, height=0.8, **_HATCHED)
        top += drawn + 1.6
    axes.set_ylim(top - 1.4, -1.3)
    axes.set_xlim(0, 400)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("keys read: asked for (blue), padding (hatched)")
    axes.set_title(f"A step of {rows} requests at {context} tokens, in each read's currency")


DRAWINGS = {
    "boot_order.png": draw_boot_order,
    "width_axis.png": draw_width_axis,
    "picture.png": draw_picture,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Draw them all; returns the exit code."""
    parser = argparse.ArgumentParser(prog="draw.py", description="Draw the docs' pictures.")
    parser.add_argument("directory", nargs="?", type=Path, default=Path("docs"))
    directory = parser.parse_args(argv).directory
    directory.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        save(draw, directory / name)
        print(directory / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
