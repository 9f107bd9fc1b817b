"""The model on the device: parameters, pool, decode state and the executables that move them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.model.attention import KVPool
from jaxserve.model.params import Params
from jaxserve.plan.batch import (
    ALL_ALLOWED,
    NO_TARGET,
    NULL_BLOCK,
    ArraySpec,
    DecodeState,
    PrefillBatch,
    Scores,
    StepOutput,
    bias_specs,
    mask_spec,
    new_blocks_spec,
    targets_spec,
)
from jaxserve.plan.buckets import DecodeShape
from jaxserve.plan.compiled import Key
from jaxserve.runtime.executables import PERMUTE, WRITE_COUNTS, Executables, StepShapes, zeros
from jaxserve.runtime.weights import (
    Fitting,
    HostParams,
    fitting_weights,
    read_params,
    updated_params,
)


@dataclass(frozen=True)
class PendingStep:
    """What a dispatched step drew, still on the device."""

    output: StepOutput

    def read(self) -> np.ndarray:
        """The tokens, int32 [X]; blocks until the step is done."""
        return np.asarray(self.output.tokens_X)

    def read_scores(self) -> Scores:
        """Their scores in numpy; blocks until the step is done."""
        return jax.device_get(self.output.scores)

    def read_prompt_scores(self) -> Scores:
        """The scores of a prefill's targets in numpy; blocks until the step is done."""
        assert self.output.prompt is not None
        return jax.device_get(self.output.prompt)


class ModelRunner:
    """Owns everything on the device; calls return before the device is done.

    The pool and the state pass donated through every call, so device work is strictly ordered.
    """

    def __init__(
        self,
        params: Params,
        executables: Executables,
        shapes: StepShapes,
        *,
        borrowed: bool = False,
    ) -> None:
        """``borrowed``: ``params`` are a caller's arrays, to be neither donated nor deleted."""
        self._shapes = shapes
        self._device = jax.tree.leaves(params)[0].sharding
        # Committed to it, as updated ones are: what updates them is then compiled once.
        self.params: Params = jax.device_put(params, self._device)
        self._borrowed = borrowed
        self._executables = executables
        self._pool: KVPool = zeros(shapes.pool_specs())
        self._state: DecodeState = zeros(shapes.state_specs())
        self._vocab_size = shapes.model.vocab_size
        # What asks for nothing is not sent: such arrays are already there.
        self._no_bias = zeros(bias_specs(shapes.max_num_seqs))
        self._neutral: dict[tuple[ArraySpec, int], jax.Array] = {}
        self._ran: set[Key] = set()

    def permute_rows(self, sources_B: np.ndarray) -> None:
        """Row b takes the state of row ``sources_B[b]``; -1 empties it. int32 [max_num_seqs]."""
        self._state = self._executables.permute_for()(self._state, sources_B)
        self._ran.add(PERMUTE)

    def write_counts(self, row: int, counts_V: np.ndarray) -> None:
        """Replace the token counts of ``row``; see ``write_counts`` of the steps. uint16 [V]."""
        step = self._executables.write_counts_for()
        self._state = step(self._state, np.int32(row), counts_V)
        self._ran.add(WRITE_COUNTS)

    def decode(
        self, shape: DecodeShape, new_blocks_B: np.ndarray, mask_BW: np.ndarray | None = None
    ) -> PendingStep:
        """One token for each of ``shape.rows`` rows; see ``decode_step``. No mask bans nothing."""
        step = self._executables.decode_for(shape)
        blocks: Any = new_blocks_B
        if not new_blocks_B.any():
            blocks = self._full(new_blocks_spec(shape.rows), NULL_BLOCK)
        mask: Any = mask_BW
        if mask is None:
            mask = self._full(mask_spec(shape.rows, self._vocab_size), ALL_ALLOWED)
        self._pool, self._state, output = step(self.params, self._pool, self._state, blocks, mask)
        self._ran.add(shape)
        return self._pending(output)

    def prefill(self, batch: PrefillBatch) -> PendingStep:
        """One chunk of packed prompts; see ``prefill_step``."""
        tokens, segments = batch.tokens_T.shape[0], batch.rows_S.shape[0]
        step = self._executables.prefill_for(tokens)
        if batch.bias is None:
            batch = batch._replace(bias=self._no_bias)
        if batch.mask_SW is None:
            mask = self._full(mask_spec(segments, self._vocab_size), ALL_ALLOWED)
            batch = batch._replace(mask_SW=mask)
        if batch.targets_T is None:
            batch = batch._replace(targets_T=self._full(targets_spec(tokens), NO_TARGET))
        self._pool, self._state, output = step(self.params, self._pool, self._state, batch)
        self._ran.add(tokens)
        return self._pending(output)

    def read_params(self, path: Path) -> HostParams:
        """A checkpoint that ``update_params`` takes; on any thread, see ``read_params``."""
        return read_params(path, self._shapes)

    def prepare_params(self, tree: Any) -> Fitting:
        """Weights in any form, checked and where they are needed; see ``fitting_weights``.

        Raises InvalidWeights. Nothing has changed yet.
        """
        return fitting_weights(tree, self._shapes, self._device)

    def update_params(self, fitting: Fitting) -> None:
        """Compute with other weights from the next call on; see ``updated_params``."""
        self.params = updated_params(self.params, fitting, self._shapes, borrowed=self._borrowed)
        self._borrowed = isinstance(fitting, Params)

    def sleep(self, *, weights: bool) -> None:
        """Give up the pool, and with ``weights`` keep those in host memory only."""
        for array in jax.tree.leaves((self._pool, self._state)):
            array.delete()
        if weights:
            kept = jax.device_get(self.params)
            for array in () if self._borrowed else jax.tree.leaves(self.params):
                array.delete()
            self.params, self._borrowed = kept, False

    def wake(self) -> None:
        """Take up an empty pool, and the weights if they are away."""
        self._pool = zeros(self._shapes.pool_specs())
        self._state = zeros(self._shapes.state_specs())
        self.params = jax.device_put(self.params, self._device)

    def context_lens(self) -> np.ndarray:
        """int32 [max_num_seqs]: tokens each row holds in the pool; waits for the device."""
        return np.asarray(self._state.context_lens_B).copy()

    def wait(self) -> None:
        """Blocks until the pool and the state are there."""
        jax.block_until_ready((self._pool, self._state))

    @property
    def ran(self) -> frozenset[Key]:
        """The executables that were called at least once: those that are warm."""
        return frozenset(self._ran)

    def pool_addresses(self) -> list[int]:
        """Where the pool's arrays lie; a step that copied one would move it."""
        return [array.unsafe_buffer_pointer() for half in self._pool for array in half]

    def _full(self, spec: ArraySpec, value: int) -> jax.Array:
        """An array of one value that was sent once."""
        if (spec, value) not in self._neutral:
            self._neutral[spec, value] = jax.device_put(np.full(spec.shape, value, spec.dtype))
        return self._neutral[spec, value]

    @staticmethod
    def _pending(output: StepOutput) -> PendingStep:
        output.tokens_X.copy_to_host_async()
        return PendingStep(output)
