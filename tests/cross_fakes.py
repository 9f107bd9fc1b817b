"""Stand-ins for the child that compiles for an absent GPU; a child imports them by name."""

import os
from pathlib import Path

from jaxserve.runtime.cross_compile import Failed

FATAL = "F1129 21:00:00.000000 1 kernel.cc:7] Check failed: this GPU has no such instruction"


def abort(results, target, shapes, workers, scratch, stderr, build) -> None:
    """Ends as the compiler does over a kernel that the target cannot run."""
    Path(stderr).write_text(f"I1129 a note\n{FATAL}\n    @ 0x55 some frame\n")
    os.abort()


def refuse(results, target, shapes, workers, scratch, stderr, build) -> None:
    """One step does not compile."""
    results.send(Failed("decode 1x32", "XlaRuntimeError: shared memory: 282624 of 232448"))
