"""One part of gpu_check.py, in a process of its own: python gpu_parts.py PART JSON.

Prints a line of JSON for each thing measured, as soon as it is, so that a part which is ended early
has not measured in vain.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from compile_child import print_result


def probe() -> Iterator[dict[str, Any]]:
    """What there is to measure."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    yield {
        "platform": jax.default_backend(),
        "device": device.device_kind,
        "memory_bytes": stats.get("bytes_limit"),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
    }


def part(name: str, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of one part; ``given`` are the JSON's values. The imports are each part's own."""
    tiny = bool(given["tiny"])
    if name == "probe":
        yield from probe()
    elif name == "correctness":
        from gpu_correctness import check

        yield from check(tiny=tiny)
    elif name == "bandwidth":
        from kernelbench import copy_bandwidth

        yield copy_bandwidth(tiny=tiny)
    elif name == "kernelbench":
        from kernelbench import bench

        yield from (asdict(point) for point in bench(given["copy"], tiny=tiny))
    elif name == "steps":
        from gpu_steps import decode_steps

        yield from decode_steps(given["copy"], given["command_buffers"], tiny=tiny)
    elif name == "boot":
        from gpu_steps import boot

        yield boot(Path(given["cache"]), tiny=tiny)
    elif name == "build":
        from gpu_steps import build_for

        yield build_for(given["device"], Path(given["cache"]))
    else:
        raise ValueError(f"no part {name}")


def main() -> None:
    """Print the rows of the part that the command line names."""
    for row in part(sys.argv[1], json.loads(sys.argv[2])):
        print_result(row)


if __name__ == "__main__":
    main()
