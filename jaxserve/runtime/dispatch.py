"""A schedule as calls of the device: permute, decode, prefill, in this order."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.plan.buckets import DecodeShape, PrefillBuckets
from jaxserve.runtime.flight import Flight, ModelRunner, Pending
from jaxserve.sched.masks import pack_masks
from jaxserve.sched.pack import pack_counts, pack_new_blocks, pack_permutation, pack_prefill
from jaxserve.sched.request import Request
from jaxserve.sched.scheduler import Schedule

Failed = list[tuple[Request, Exception]]
"""Requests whose mask could not be made, and why."""


class Dispatcher:
    """Packs schedules for ``runner`` and calls it; a value, all state is the runner's."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        vocab_size: int,
        *,
        decode_shape: Callable[[int, int], DecodeShape],
        prefill_buckets: PrefillBuckets,
    ) -> None:
        self._runner = runner
        self._config = config
        self._vocab_size = vocab_size
        self._decode_shape = decode_shape
        self._prefill_buckets = prefill_buckets

    def dispatch(
        self, schedule: Schedule, *, ruled: bool, weight_version: int
    ) -> tuple[Flight, Failed]:
        """One iteration, on its way. ``ruled``: some request's draws may be limited."""
        decode = prefill = shape = None
        failed: Failed = []
        masked = ruled or self._config.deterministic
        if schedule.permutation is not None:
            self._runner.permute_rows(pack_permutation(schedule.permutation))
        if schedule.num_decoding:
            shape = self._decode_shape(len(schedule.decode), schedule.width)
            new_blocks_B = pack_new_blocks(schedule.new_blocks, schedule.decode, shape.rows)
            drawing = ((b, r) for b, r in enumerate(schedule.decode) if r is not None)
            mask_BW = self._masks(drawing, shape.rows, failed) if masked else None
            decode = self._runner.decode(shape, new_blocks_B, mask_BW)
        if schedule.chunks:
            prefill = self._prefill(schedule, masked, failed)
        return Flight(schedule, shape, decode, prefill, weight_version), failed

    def _prefill(self, schedule: Schedule, masked: bool, failed: Failed) -> Pending:
        chunks, segments = schedule.chunks, self._config.max_num_seqs
        for chunk in chunks:
            if chunk.row is not None and chunk.request.penalised:
                self._runner.write_counts(chunk.row, pack_counts(chunk.request, self._vocab_size))
        drawing = ((s, chunk.request) for s, chunk in enumerate(chunks) if chunk.samples)
        batch = pack_prefill(
            chunks,
            tokens=self._prefill_buckets.token_bucket(schedule.num_prefill_tokens),
            max_num_seqs=segments,
            blocks_per_row=self._config.blocks_per_row,
            block_size=self._config.block_size,
            vocab_size=self._vocab_size,
            mask_SW=self._masks(drawing, segments, failed) if masked else None,
        )
        return self._runner.prefill(batch)

    def _masks(
        self, drawing: Iterable[tuple[int, Request]], rows: int, failed: Failed
    ) -> np.ndarray | None:
        mask_XW, failures = pack_masks(drawing, rows, self._vocab_size)
        failed += failures
        return mask_XW
