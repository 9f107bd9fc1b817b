"""The rounded sizes a step may have, and what the rounding costs."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxserve.errors import ConfigError
from jaxserve.plan.units import round_up

DEFAULT_WIDTH_MULTIPLE = 128
SMALLEST_TOKEN_BUCKET = 32


class DecodeShape(NamedTuple):
    """A decode program's size: ``rows`` batch lanes by ``width`` tokens of context."""

    rows: int
    width: int

    @property
    def cells(self) -> int:
        """(row, key) pairs of the rectangle."""
        return self.rows * self.width


def _powers_of_two(first: int, last: int) -> tuple[int, ...]:
    """first, 2 * first, ... below ``last``, then ``last`` itself whether or not it is a power."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= 2
    return (*sizes, last)


def _bucket(buckets: tuple[int, ...], size: int, what: str, knob: str) -> int:
    """The smallest of ascending ``buckets`` that covers ``size``."""
    if not 1 <= size <= buckets[-1]:
        raise ValueError(f"{size} {what}, outside 1 to {buckets[-1]} ({knob})")
    return buckets[bisect_left(buckets, size)]


@dataclass(frozen=True)
class DecodeBuckets:
    """The shapes decode is compiled at.

    The row axis belongs to the scheduler: 1, 2, 4, ... and ``max_num_seqs``. The width axis belongs
    to the read. A rectangle read gathers rows x width keys, so its width is rounded up to
    ``width_multiple`` and every width is a program of its own. A streamed read walks
    cdiv(context, ``tile``) tiles of each row by itself, so it has one width, ``max_model_len``.
    Widths, lengths and ``tile`` are tokens. ``pinned`` leaves one row bucket, ``max_num_seqs``: a
    row is then always computed by the same program.
    """

    max_num_seqs: int
    max_model_len: int
    width_multiple: int = DEFAULT_WIDTH_MULTIPLE
    streamed: bool = False
    tile: int | None = None
    pinned: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "width_multiple"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}, must be at least 1")
        if self.streamed and (self.tile is None or self.tile < 1):
            raise ConfigError(f"streamed buckets with tile={self.tile}; name the read's tile")
        if not self.streamed and self.tile is not None:
            raise ConfigError(
                f"rectangle buckets with tile={self.tile}; only a streamed read has one"
            )

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Row buckets, ascending; the last is ``max_num_seqs``."""
        return (self.max_num_seqs,) if self.pinned else _powers_of_two(1, self.max_num_seqs)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Width buckets, ascending; the last is ``max_model_len``, multiple or not."""
        if self.streamed:
            return (self.max_model_len,)
        below = range(self.width_multiple, self.max_model_len, self.width_multiple)
        return (*below, self.max_model_len)

    @cached_property
    def shapes(self) -> tuple[DecodeShape, ...]:
        """Every shape, by rows and then by width."""
        return tuple(DecodeShape(r, w) for r in self.rows for w in self.widths)

    @property
    def count(self) -> int:
        """How many shapes there are."""
        return len(self.rows) * len(self.widths)

    def row_bucket(self, rows: int) -> int:
        """The smallest row bucket that holds ``rows`` active rows."""
        return _bucket(self.rows, rows, "rows", "--max-num-seqs")

    def width_bucket(self, width: int) -> int:
        """The smallest width bucket that holds a context of ``width`` tokens."""
        return _bucket(self.widths, width, "tokens of context", "--max-model-len")

    def shape_for(self, rows: int, width: int) -> DecodeShape:
        """The shape that serves ``rows`` rows whose longest context is ``width`` tokens."""
        return DecodeShape(self.row_bucket(rows), self.width_bucket(width))

    def cells_for(self, rows: int, width: int) -> int:
        """(row, key) pairs the read touches for ``rows`` rows of ``width`` tokens each.

        A rectangle computes its whole bucket. A streamed read walks whole tiles, the last one
        masked, and a padded row has no context and walks none.
        """
        shape = self.shape_for(rows, width)
        if self.tile is None:
            return shape.cells
        return rows * round_up(width, self.tile)

    def padded_cells(self, rows: int, width: int) -> int:
        """The cells among ``cells_for`` that no request asked for."""
        return self.cells_for(rows, width) - rows * width

    def waste(self, rows: int, width: int) -> float:
        """``padded_cells`` as a share of ``cells_for``, in [0, 1)."""
        return self.padded_cells(rows, width) / self.cells_for(rows, width)


@dataclass(frozen=True)
class PrefillBuckets:
    """The token counts prefill is compiled at: 32, 64, ... and ``max_num_batched_tokens``.

    ``pinned`` leaves the last.
    """

    max_num_batched_tokens: int
    pinned: bool = False

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 1:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens}: must be at least 1"
            )

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Token buckets, ascending; the last is ``max_num_batched_tokens``."""
        most = self.max_num_batched_tokens
        return (most,) if self.pinned else _powers_of_two(SMALLEST_TOKEN_BUCKET, most)

    def token_bucket(self, tokens: int) -> int:
        """The smallest bucket that holds ``tokens`` tokens."""
        return _bucket(self.tokens, tokens, "prefill tokens", "--max-num-batched-tokens")
