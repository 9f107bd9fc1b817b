"""What a compiler says of one executable."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from jaxserve.plan.buckets import DecodeShape

Key = Literal["permute", "write_counts"] | DecodeShape | int
"""An executable: one of the two that move rows, a decode shape, or a prefill's token bucket."""


@dataclass(frozen=True, kw_only=True)
class KernelFigures:
    """What the assembler says of one hand-written kernel: registers a thread, bytes spilled.

    ``static_shared_bytes`` is shared memory fixed by the code; a launch may add to it.
    """

    name: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class CompiledFigures:
    """What the compiler says of one executable.

    ``trace_seconds`` is tracing and lowering, ``backend_seconds`` the compiler proper.
    ``temp_bytes`` is its workspace and ``alias_bytes`` what it updates in place. ``launches`` are
    kernels and copies started once a step, ``loop_launches`` those inside loops, started on every
    turn, and ``branch_launches`` those inside conditionals, of which one side is taken.
    ``kernels`` are the hand-written ones; None: there are some and no assembler to ask.
    """

    trace_seconds: float
    backend_seconds: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    launches: int
    loop_launches: int
    branch_launches: int
    kernels: tuple[KernelFigures, ...] | None

    @property
    def compile_seconds(self) -> float:
        """All of it."""
        return self.trace_seconds + self.backend_seconds

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        kernels = None if self.kernels is None else [asdict(k) for k in self.kernels]
        return asdict(self) | {"kernels": kernels}
