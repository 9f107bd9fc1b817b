#!/usr/bin/env python3
"""Convert a model between what the engine loads: Hugging Face or GGUF to Orbax, Orbax to
safetensors. Tensors pass one by one, bit for bit, so memory holds about one shard."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jaxserve.checkpoint import load_checkpoint
from jaxserve.checkpoint.export import write_about, write_safetensors
from jaxserve.checkpoint.load import Checkpoint
from jaxserve.checkpoint.orbax_files import PARAMS, find_orbax, write_orbax
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.plan.units import GIB, format_bytes


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="a Hugging Face directory, a GGUF file or a hub id")
    parser.add_argument("output", type=Path, help="a directory that does not exist yet")
    parser.add_argument(
        "--to",
        choices=["orbax", "safetensors"],
        help="default: orbax, or safetensors when the source is Orbax",
    )
    parser.add_argument(
        "--max-shard-size",
        type=float,
        default=4.0,
        metavar="GIB",
        help="a safetensors shard at most (default %(default)s GiB)",
    )
    return parser.parse_args(argv)


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    source = checkpoint.tensors
    assert source is not None  # only a dummy has none
    with tqdm(total=len(source.shapes), unit=" tensors", disable=None) as bar:
        for name in source.shapes:
            array = source.get(name)
            yield name, array
            bar.set_postfix_str(f"{name} {format_bytes(array.nbytes)}", refresh=False)
            bar.update()


def convert(args: argparse.Namespace) -> str:
    """Do it and say in a line what was written. Raises JaxserveError."""
    output: Path = args.output.expanduser().absolute()
    if output.exists():
        raise ConfigError(f"{output} exists; name a directory that does not")
    if args.max_shard_size <= 0:
        raise ConfigError(f"--max-shard-size {args.max_shard_size}: must be above 0 GiB")
    checkpoint = load_checkpoint(args.source)
    source = Path(args.source).expanduser()
    is_orbax = source.is_dir() and find_orbax(source) is not None
    to = args.to or ("safetensors" if is_orbax else "orbax")
    output.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not there: what is cut off is in the temporary directory.
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        write_about(partial, source, checkpoint.config, checkpoint.tokenizer)
        if to == "orbax":
            write_orbax(partial / PARAMS, _tensors(checkpoint))
        else:
            write_safetensors(partial, _tensors(checkpoint), int(args.max_shard_size * GIB))
        os.chmod(partial, 0o755)
        partial.rename(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    size = sum(f.stat().st_size for f in output.rglob("*") if f.is_file())
    return f"{output}: {to}, {format_bytes(size)}; serve it with scripts/serve.py {output}"


def main() -> int:
    """0, or 1 after one line that says what is wrong."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a conversion takes nobody's GPU
    try:
        print(convert(parse_args()))
    except (JaxserveError, OSError) as error:
        print(f"convert_checkpoint.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
