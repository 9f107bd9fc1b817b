"""From weights and executables to a warm runner: the pool allocated, every executable run once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np

from jaxserve.errors import BootError
from jaxserve.model.params import Params
from jaxserve.plan.batch import ArraySpec, PrefillBatch, counts_spec, prefill_batch_specs
from jaxserve.plan.gates import check_warm_before_serving
from jaxserve.plan.pool import KVPoolPlan
from jaxserve.plan.units import format_bytes
from jaxserve.runtime.executables import Executables, StepShapes
from jaxserve.runtime.runner import ModelRunner


@contextlib.contextmanager
def memory_or_refusal(doing: str, knob: str) -> Iterator[None]:
    """Turns a device or a host without memory inside into a BootError that names ``knob``."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        why = (str(error).splitlines() or ["out of memory"])[0][:200]
        raise BootError(f"{doing}: {why}; use {knob}") from error


def allocate(
    params: Params,
    executables: Executables,
    shapes: StepShapes,
    pool: KVPoolPlan,
    *,
    borrowed: bool = False,
) -> ModelRunner:
    """The runner with its pool in memory. Raises BootError where there is not enough."""
    doing = f"allocating a KV pool of {format_bytes(pool.pool_bytes)} (sized by {pool.sized_by})"
    with memory_or_refusal(doing, f"--num-gpu-blocks-override with less than {pool.num_blocks}"):
        runner = ModelRunner(params, executables, shapes, borrowed=borrowed)
        runner.wait()
    return runner


def warm_decode(runner: ModelRunner, shapes: StepShapes) -> None:
    """Run every decode shape once, on empty rows."""
    for shape in shapes.decode:
        runner.decode(shape, np.zeros(shape.rows, np.int32)).read()


def warm_engine(runner: ModelRunner, shapes: StepShapes, *, serving: bool = False) -> None:
    """Run every executable once, on empty rows, so that no request pays for a first call.

    The donated pool and state go through each. ``serving``: the loop runs already, which is
    refused with BootUnsound.
    """

    def zeros_of(spec: ArraySpec) -> np.ndarray:
        return np.zeros(spec.shape, spec.dtype)

    check_warm_before_serving(serving=serving)
    runner.permute_rows(np.full(shapes.max_num_seqs, -1, np.int32))
    vocab_size = shapes.model.vocab_size
    runner.write_counts(0, zeros_of(counts_spec(vocab_size)))
    warm_decode(runner, shapes)
    for tokens in shapes.prefill_tokens:
        batch: PrefillBatch = jax.tree.map(
            zeros_of,
            prefill_batch_specs(tokens, shapes.max_num_seqs, shapes.blocks_per_row, vocab_size),
        )
        no_row = np.full(shapes.max_num_seqs, shapes.max_num_seqs, np.int32)
        batch = batch._replace(rows_S=no_row, bias=None, mask_SW=None, targets_T=None)
        runner.prefill(batch).read()
