"""The model on the device: parameters, pool, decode state and the executables that move them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.model.attention import KVPool
from jaxserve.model.params import Params
from jaxserve.plan.batch import DecodeState, PrefillBatch
from jaxserve.plan.buckets import DecodeShape
from jaxserve.plan.compiled import Key
from jaxserve.runtime.executables import PERMUTE, Executables, StepShapes, zeros


@dataclass(frozen=True)
class PendingTokens:
    """Tokens of a dispatched step, still on the device."""

    tokens_X: jax.Array

    def read(self) -> np.ndarray:
        """int32 [X]; blocks until the step is done."""
        return np.asarray(self.tokens_X)


class ModelRunner:
    """Owns everything on the device; calls return before the device is done.

    The pool and the state pass donated through every call, so device work is strictly ordered.
    """

    def __init__(self, params: Params, executables: Executables, shapes: StepShapes) -> None:
        self.params = params
        self._executables = executables
        self._pool: KVPool = zeros(shapes.pool_specs())
        self._state: DecodeState = zeros(shapes.state_specs())
        # A step that opens no block is sent nothing: these zeros are already there.
        self._no_new_blocks: dict[int, jax.Array] = {}
        self._ran: set[Key] = set()

    def permute_rows(self, sources_B: np.ndarray) -> None:
        """Row b takes the state of row ``sources_B[b]``; -1 empties it. int32 [max_num_seqs]."""
        self._state = self._executables.permute_for()(self._state, sources_B)
        self._ran.add(PERMUTE)

    def decode(self, shape: DecodeShape, new_blocks_B: np.ndarray) -> PendingTokens:
        """One token for each of ``shape.rows`` rows; see ``decode_step``."""
        step = self._executables.decode_for(shape)
        blocks = new_blocks_B if new_blocks_B.any() else self._zeros(shape.rows)
        self._pool, self._state, tokens_B = step(self.params, self._pool, self._state, blocks)
        self._ran.add(shape)
        return self._pending(tokens_B)

    def prefill(self, batch: PrefillBatch) -> PendingTokens:
        """One chunk of packed prompts; see ``prefill_step``."""
        tokens = batch.tokens_T.shape[0]
        step = self._executables.prefill_for(tokens)
        self._pool, self._state, tokens_S = step(self.params, self._pool, self._state, batch)
        self._ran.add(tokens)
        return self._pending(tokens_S)

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

    def _zeros(self, rows: int) -> jax.Array:
        if rows not in self._no_new_blocks:
            self._no_new_blocks[rows] = jax.device_put(np.zeros(rows, np.int32))
        return self._no_new_blocks[rows]

    @staticmethod
    def _pending(tokens_X: jax.Array) -> PendingTokens:
        tokens_X.copy_to_host_async()
        return PendingTokens(tokens_X)
