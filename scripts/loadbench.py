#!/usr/bin/env python3
"""How fast weights are loaded, beside a plain read of the same files, in one run."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import jax
from tqdm import tqdm

from jaxserve.checkpoint import load_checkpoint
from jaxserve.checkpoint.demo import fetch_demo
from jaxserve.errors import JaxserveError
from jaxserve.model.params import stacks_layers
from jaxserve.plan.units import format_bytes
from jaxserve.runtime.placing import place_params

_CHUNK = 16 * 2**20


def read_plainly(path: Path) -> tuple[int, float]:
    """Bytes of all files at ``path`` and the seconds one thread takes to read them."""
    files = [path] if path.is_file() else [f for f in sorted(path.rglob("*")) if f.is_file()]
    buffer, total, start = bytearray(_CHUNK), 0, time.perf_counter()
    for name in files:
        with name.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total, time.perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    """0, or 1 after a line that says what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a directory or file; default: the default model")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args(argv)
    try:
        path = Path(args.model).expanduser() if args.model else fetch_demo()
        read_plainly(path)  # both then find the files in the page cache
        size, plain_s = read_plainly(path)
        checkpoint = load_checkpoint(str(path))
    except (JaxserveError, OSError) as error:
        print(f"loadbench.py: {error}", file=sys.stderr)
        return 1
    jax.devices()
    start = time.perf_counter()
    with tqdm(unit=" tensors", disable=None) as bar:

        def progress(what: str, done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        params = place_params(
            checkpoint.config,
            args.dtype,
            checkpoint,
            progress,
            stacked=stacks_layers(jax.default_backend()),
        )
        jax.block_until_ready(params)
    load_s = time.perf_counter() - start
    placed = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(
        f"{path.name}: {format_bytes(size)} of files, {format_bytes(placed)} of {args.dtype}"
        f"\nplain read  {plain_s:6.2f} s  {size / plain_s / 1e6:7.0f} MB/s of file"
        f"\nload        {load_s:6.2f} s  {size / load_s / 1e6:7.0f} MB/s of file, "
        f"{placed / load_s / 1e6:.0f} MB/s of weights"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
