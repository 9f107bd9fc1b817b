"""Which decode shapes get an executable, and what bounds that list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.errors import CaptureTooSmall, ConfigError
from jaxserve.plan.buckets import DecodeBuckets, DecodeShape
from jaxserve.plan.units import format_bytes

DEFAULT_CAPTURE_LIMIT = 64
SCORE_BYTES = 4  # scores are float32 whatever the model's dtype

WidthBound = Literal["context", "flag", "budget", "limit", "read"]


def streamed_score_cells(tile: int, width: int) -> int:
    """Scores one program of the streamed read holds: one tile, never more than the context.

    What it *walks* is whole tiles, ``round_up(width, tile)``; that is DecodeBuckets.cells_for.
    """
    return min(tile, width)


def score_bytes(shape: DecodeShape, num_heads: int, tile: int | None) -> int:
    """Bytes of the scores a shape holds at once: rows * query heads * (width or tile) * 4."""
    cells = shape.width if tile is None else streamed_score_cells(tile, shape.width)
    return shape.rows * num_heads * cells * SCORE_BYTES


def shared_pool_bytes(
    shapes: Sequence[DecodeShape], num_heads: int, tile: int | None = None
) -> int:
    """Workspace when all shapes share one arena: that of the largest."""
    return max(score_bytes(s, num_heads, tile) for s in shapes)


def private_pool_bytes(
    shapes: Sequence[DecodeShape], num_heads: int, tile: int | None = None
) -> int:
    """Workspace if every shape had an arena of its own: the sum."""
    return sum(score_bytes(s, num_heads, tile) for s in shapes)


def pool_sharing_ratio(
    shapes: Sequence[DecodeShape], num_heads: int, tile: int | None = None
) -> float:
    """How many times smaller the shared arena is than private ones, at least 1."""
    return private_pool_bytes(shapes, num_heads, tile) / shared_pool_bytes(shapes, num_heads, tile)


@dataclass(frozen=True, kw_only=True)
class CapturePlan:
    """The list of decode shapes to compile, and who set its width.

    ``full_count`` is the count without any bound, ``limit`` the executables the process will hold,
    ``budget_bytes`` what was left for their workspace (None: not asked), ``tile`` the streamed
    read's tile in keys (None: rectangle).
    """

    shapes: tuple[DecodeShape, ...]
    max_rows: int
    max_width: int
    width_bound_by: WidthBound
    full_count: int
    limit: int
    budget_bytes: int | None
    num_heads: int
    tile: int | None

    @property
    def count(self) -> int:
        """Executables in the list."""
        return len(self.shapes)

    @property
    def trimmed(self) -> int:
        """Shapes of the bucket set that the list leaves out."""
        return self.full_count - self.count

    @property
    def widest(self) -> DecodeShape:
        """The largest member, which sizes the shared workspace."""
        return DecodeShape(self.max_rows, self.max_width)

    @property
    def pool_bytes(self) -> int:
        """Modelled workspace of the whole list in one shared arena."""
        return shared_pool_bytes(self.shapes, self.num_heads, self.tile)

    def as_dict(self) -> dict[str, Any]:
        """The decision as published; ``read_block`` is the published key of the tile."""
        return {
            "count": self.count,
            "full_count": self.full_count,
            "trimmed": self.trimmed,
            "max_rows": self.max_rows,
            "max_width": self.max_width,
            "width_bound_by": self.width_bound_by,
            "limit": self.limit,
            "budget_bytes": self.budget_bytes,
            "pool_bytes": self.pool_bytes,
            "read_block": self.tile,
        }

    def describe(self) -> str:
        """One line for the boot log."""
        kept = f"{self.count} of {self.full_count}" if self.trimmed else f"all {self.count}"
        tile = "" if self.tile is None else f", {self.tile}-key tiles"
        return (
            f"capture list: {kept} shapes, up to {self.max_rows} rows x {self.max_width} tokens "
            f"(width bound by {self.width_bound_by}){tile}, "
            f"workspace {format_bytes(self.pool_bytes)}"
        )


def plan_capture(
    buckets: DecodeBuckets,
    *,
    num_heads: int,
    limit: int = DEFAULT_CAPTURE_LIMIT,
    free_bytes: int | None = None,
    reserved_bytes: int = 0,
    max_rows: int | None = None,
    max_width: int | None = None,
) -> CapturePlan:
    """Choose the shapes to compile: whole rows of the bucket set, the widths from the bottom up.

    Four ceilings bear on the width and each is snapped down to a bucket before it is compared: the
    served context, ``max_width`` (the flag --warm-width), the memory budget and ``limit``
    executables. ``width_bound_by`` names the first that is strictly lower than all before it, so a
    flag equal to the context did not bind. The top of the width axis is what gives, since a shape
    there is first met by a request that has already streamed thousands of tokens.

    On a streamed bucket set there is one width and the read bounds it: the budget only says whether
    one tile fits, ``limit`` is a bound on rows, and a ``max_width`` is refused.

    ``free_bytes`` is what the device reports free, asked after the pool was decided (None: no
    budget), and ``reserved_bytes`` what is decided but not yet allocated, so still reported free:
    the pool. ``max_rows`` (--warm-rows) is snapped down to a row bucket.

    Raises CaptureTooSmall when a bound leaves no list, ConfigError for a flag that cannot be.
    """
    rows = _row_axis(buckets, max_rows)
    budget = None if free_bytes is None else free_bytes - reserved_bytes
    if buckets.tile is None:
        width, bound_by = _rectangle_width(buckets, rows, num_heads, limit, budget, max_width)
    else:
        if max_width is not None:
            raise ConfigError(
                f"--warm-width {max_width}: the streamed read has one width, "
                f"{buckets.max_model_len}; leave the flag out or use --warm-rows"
            )
        _check_streamed_bounds(buckets, rows, num_heads, limit, budget)
        width, bound_by = buckets.max_model_len, "read"
    return CapturePlan(
        shapes=tuple(s for s in buckets.shapes if s.rows <= rows[-1] and s.width <= width),
        max_rows=rows[-1],
        max_width=width,
        width_bound_by=bound_by,
        full_count=buckets.count,
        limit=limit,
        budget_bytes=budget,
        num_heads=num_heads,
        tile=buckets.tile,
    )


def width_from_limit(limit: int, rows: Sequence[int], widths: Sequence[int]) -> int:
    """The widest bucket of a rows x widths list that has at most ``limit`` members.

    A list is a product, so a bound on its length is a bound on the width: the widths kept are
    ``limit // len(rows)``. Raises CaptureTooSmall when not even one is.
    """
    kept = limit // len(rows)
    if kept < 1:
        raise CaptureTooSmall(
            f"limit={limit} executables is under the {len(rows)} row buckets up to {rows[-1]}: "
            f"raise the limit to {len(rows)}{_fewer_rows(limit, rows, ' or set ')}"
        )
    return widths[min(kept, len(widths)) - 1]


def _row_axis(buckets: DecodeBuckets, max_rows: int | None) -> tuple[int, ...]:
    """Row buckets up to ``max_rows``."""
    if max_rows is None:
        return buckets.rows
    if max_rows < 1:
        raise ConfigError(f"--warm-rows {max_rows}: must be at least 1")
    return tuple(r for r in buckets.rows if r <= max_rows)


def _rectangle_width(
    buckets: DecodeBuckets,
    rows: Sequence[int],
    num_heads: int,
    limit: int,
    budget: int | None,
    flag: int | None,
) -> tuple[int, WidthBound]:
    """The lowest of the four ceilings, and which one it is."""
    width: int = buckets.max_model_len
    bound_by: WidthBound = "context"
    ceilings: list[tuple[int, WidthBound]] = []
    if flag is not None:
        ceilings.append((_width_from_flag(flag, buckets.widths), "flag"))
    if budget is not None:
        ceilings.append((_width_from_budget(budget, rows[-1], num_heads, buckets.widths), "budget"))
    ceilings.append((width_from_limit(limit, rows, buckets.widths), "limit"))
    for ceiling, name in ceilings:
        if ceiling < width:
            width, bound_by = ceiling, name
    return width, bound_by


def _snap(tokens: int, widths: Sequence[int]) -> int | None:
    """The widest bucket that is at most ``tokens``."""
    return max((w for w in widths if w <= tokens), default=None)


def _width_from_flag(flag: int, widths: Sequence[int]) -> int:
    width = _snap(flag, widths)
    if width is None:
        raise CaptureTooSmall(
            f"--warm-width {flag} is under the smallest width bucket: use {widths[0]} or more"
        )
    return width


def _width_from_budget(budget: int, max_rows: int, num_heads: int, widths: Sequence[int]) -> int:
    tokens = budget // (max_rows * num_heads * SCORE_BYTES)
    width = _snap(tokens, widths)
    if width is None:
        need = score_bytes(DecodeShape(max_rows, widths[0]), num_heads, None)
        raise CaptureTooSmall(
            f"{format_bytes(max(0, budget))} left for workspace buys a width of {max(0, tokens)} "
            f"at {max_rows} rows, and the smallest bucket, {widths[0]}, takes "
            f"{format_bytes(need)}: lower --warm-rows, or give the KV pool less "
            "(--gpu-memory-utilization)"
        )
    return width


def _check_streamed_bounds(
    buckets: DecodeBuckets, rows: Sequence[int], num_heads: int, limit: int, budget: int | None
) -> None:
    """Neither bound can narrow a list of one width; each is met or refused."""
    if limit < len(rows):
        raise CaptureTooSmall(
            f"limit={limit} executables is under the {len(rows)} row buckets up to {rows[-1]}, and "
            f"a streamed list has no width to give up: max_rows is the only knob"
            f"{_fewer_rows(limit, rows, ', ')}"
        )
    need = score_bytes(DecodeShape(rows[-1], buckets.max_model_len), num_heads, buckets.tile)
    if budget is not None and budget < need:
        raise CaptureTooSmall(
            f"{format_bytes(max(0, budget))} left for workspace does not hold one "
            f"{buckets.tile}-key tile at {rows[-1]} rows, {format_bytes(need)}; no width would "
            "help: lower --warm-rows, or give the KV pool less (--gpu-memory-utilization)"
        )


def _fewer_rows(limit: int, rows: Sequence[int], lead: str) -> str:
    """The --warm-rows that a limit allows, if it allows any."""
    return f"{lead}--warm-rows {rows[limit - 1]}" if limit >= 1 else ""
