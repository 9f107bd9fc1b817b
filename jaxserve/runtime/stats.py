"""What the loop has done since it was built."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType

from jaxserve.plan.buckets import DecodeShape
from jaxserve.plan.units import round_up
from jaxserve.sched.outputs import EngineStats
from jaxserve.sched.scheduler import Schedule, Scheduler


@dataclass(slots=True)
class Totals:
    """Running totals of one engine; see EngineStats for what each one counts."""

    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    scheduled_tokens: int = 0
    padded_rows: int = 0
    padded_cells: int = 0
    replays: Counter[DecodeShape] = field(default_factory=Counter)
    decode_steps: dict[int, tuple[int, float]] = field(default_factory=dict)

    def count_iteration(
        self, schedule: Schedule, shape: DecodeShape | None, tile: int | None
    ) -> None:
        """Count a dispatched iteration.

        ``shape`` is that of its decode, if it had one; ``tile`` the read's, None for a rectangle.
        """
        self.num_steps += 1
        self.scheduled_tokens += schedule.num_tokens
        if shape is not None:
            rows = schedule.num_decoding
            self.replays[shape] += 1
            self.padded_rows += shape.rows - rows
            read = shape.cells if tile is None else rows * round_up(schedule.width, tile)
            self.padded_cells += read - rows * schedule.width
        for chunk in schedule.chunks:
            # A recomputed prompt comes with output behind it.
            if chunk.samples and not chunk.request.output_token_ids:
                self.prompt_tokens += len(chunk.request.prompt_token_ids)

    def count_decode_step(self, rows: int, seconds: float) -> None:
        """Count a step that only decoded, and how long after the step before it was read back."""
        steps, total = self.decode_steps.get(rows, (0, 0.0))
        self.decode_steps[rows] = (steps + 1, total + seconds)

    def snapshot(self, scheduler: Scheduler) -> EngineStats:
        """The totals beside the scheduler's gauges, frozen."""
        return EngineStats(
            num_running=len(scheduler.running) + len(scheduler.draining),
            num_waiting=len(scheduler.waiting),
            num_blocks=scheduler.pool.num_usable,
            num_free_blocks=scheduler.pool.num_free,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache.num_queries,
            prefix_cache_hits=scheduler.prefix_cache.num_hits,
            weight_version=scheduler.prefix_cache.weight_version,
            num_steps=self.num_steps,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            scheduled_tokens=self.scheduled_tokens,
            padded_rows=self.padded_rows,
            padded_cells=self.padded_cells,
            decode_replays=MappingProxyType(self._by_rows()),
            decode_step_seconds=MappingProxyType(dict(self.decode_steps)),
            shape_replays=MappingProxyType(dict(self.replays)),
        )

    def _by_rows(self) -> dict[int, int]:
        by_rows: dict[int, int] = {}
        for shape, steps in self.replays.items():
            by_rows[shape.rows] = by_rows.get(shape.rows, 0) + steps
        return by_rows
