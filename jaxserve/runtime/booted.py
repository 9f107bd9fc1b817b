"""An engine that came up, and what is said of it while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.plan.buckets import DecodeShape
from jaxserve.plan.capture import CapturePlan
from jaxserve.plan.pool import KVPoolPlan
from jaxserve.plan.report import boot_info, loop_info
from jaxserve.runtime.engine import Engine
from jaxserve.runtime.executables import Executables
from jaxserve.runtime.runner import ModelRunner
from jaxserve.runtime.sizing import decode_read
from jaxserve.sched.outputs import EngineStats, ExecutableStats


@dataclass(frozen=True, kw_only=True)
class BootedEngine:
    """An engine with every planned shape compiled, and what was decided.

    ``capture`` is None where ``config.capture_decode`` is off: steps compile when first met.
    """

    engine: Engine
    runner: ModelRunner
    executables: Executables
    model: ModelConfig
    config: EngineConfig
    pool: KVPoolPlan
    capture: CapturePlan | None
    seconds: Mapping[str, float]

    def info(self, stats: EngineStats) -> dict[str, Any]:
        """/health: the decision, and under ``capture`` what the loop has done since."""
        late = [key for key in self.executables.late if isinstance(key, DecodeShape)]
        info: dict[str, Any] = {"pool": self.pool.as_dict(), "capture": {"count": 0}}
        if self.capture is not None:
            info = boot_info(self.pool, self.capture, self.warm_shapes)
            info["capture"] |= loop_info(
                self.capture,
                decode_read(self.config),
                captured=self.executables.decode,
                late=late,
                replays=stats.shape_replays,
                padded_rows=stats.padded_rows,
                padded_cells=stats.padded_cells,
            )
        compiled = self.executable_stats()
        return info | {
            "switches": {
                "bucket_decode": self.config.bucket_decode,
                "persist_inputs": self.config.persist_inputs,
                "capture_decode": self.config.capture_decode,
            },
            "executables": {
                "planned": compiled.planned,
                "ready": compiled.ready,
                "compiles_after_ready": compiled.compiles_after_ready,
                "workspace_bytes": self.executables.temp_bytes,
            },
            "attention_backend": self.config.attention_backend,
            "dtype": self.config.dtype,
            "boot_seconds": {k: round(v, 3) for k, v in self.seconds.items()},
        }

    @property
    def warm_shapes(self) -> frozenset[DecodeShape]:
        """Planned decode shapes whose executable has run."""
        return frozenset(self.executables.decode) & self.runner.ran

    def executable_stats(self) -> ExecutableStats:
        """The list in numbers."""
        planned, late = self.executables.planned, self.executables.late
        return ExecutableStats(
            planned=len(planned),
            ready=len(self.runner.ran & planned.keys()),
            compile_seconds=sum(
                b.trace_s + b.compile_s for b in (*planned.values(), *late.values())
            ),
            compiles_after_ready=len(late),
        )
