"""Fakes shared by the rooms' tests."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.config import SamplingParams
from jaxserve.plan.batch import (
    NULL_BLOCK,
    ArraySpec,
    DecodeState,
    PrefillBatch,
    SamplingRows,
    decode_state_specs,
    new_blocks_spec,
    permutation_spec,
    prefill_batch_specs,
)
from jaxserve.plan.buckets import DecodeShape
from jaxserve.sched.request import Request


def make_request(arrival: int = 0, prompt: Sequence[int] = (1,), **changes: Any) -> Request:
    """A request named after its arrival number, with room for 5 tokens and no stop tokens."""
    values: dict[str, Any] = {
        "request_id": f"r{arrival}",
        "params": SamplingParams(),
        "max_output_tokens": 5,
        "stop_token_ids": frozenset(),
        "key": (0, 0),
        "arrived_at": 0.0,
    }
    return Request(arrival=arrival, prompt_token_ids=list(prompt), **values | changes)


def draw(tokens: Any, positions: Any, sampling: Sequence[Any], vocab_size: int) -> int:
    """The fake model: a checksum of the whole history and, unless greedy, of how to draw.

    ``sampling``: temperature, top_k, top_p, min_p, key.
    """
    history = np.stack([np.asarray(tokens, np.int32), np.asarray(positions, np.int32)])
    checksum = zlib.crc32(history.tobytes())
    temperature, top_k, top_p, min_p, key = sampling
    if temperature > 0:
        floats = np.array([temperature, top_p, min_p], np.float32)
        checksum = zlib.crc32(floats.tobytes() + np.int32(top_k).tobytes(), checksum)
        checksum = zlib.crc32(np.asarray(key, np.uint32).tobytes(), checksum)
    return checksum % vocab_size


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, tuple):
        return [leaf for branch in tree for leaf in _leaves(branch)]
    return [tree]


def _zeros(spec: ArraySpec) -> np.ndarray:
    return np.zeros(spec.shape, spec.dtype)


def check_specs(arrays: Any, specs: Any) -> None:
    """Every array has its spec's shape and dtype."""
    for array, spec in zip(_leaves(arrays), _leaves(specs), strict=True):
        assert isinstance(spec, ArraySpec)
        assert (array.shape, str(array.dtype)) == (spec.shape, spec.dtype), (array, spec)


@dataclass
class FakePending:
    """Drawn tokens, and the host arrays the step read, which must not change before it is done."""

    tokens: np.ndarray
    inputs: list[np.ndarray]
    copies: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.copies = [x.copy() for x in self.inputs]

    def read(self) -> np.ndarray:
        for array, copy in zip(self.inputs, self.copies, strict=True):
            assert np.array_equal(array, copy), "the host wrote to an array given to the device"
        return self.tokens


class FakeRunner:
    """A device in numpy: its own decode state, and a pool that holds (token, position) a slot.

    Every draw reads the row's whole history through its block table, so a wrong slot, table,
    permutation or length, a block given away too early or a bucket too narrow changes tokens.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        blocks_per_row: int,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.blocks_per_row = blocks_per_row
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.pool_tokens = np.full((num_blocks, block_size), -1, np.int32)
        self.pool_positions = np.full((num_blocks, block_size), -1, np.int32)
        specs = decode_state_specs(max_num_seqs, blocks_per_row)
        self.state = DecodeState(
            block_tables_BP=_zeros(specs.block_tables_BP),
            context_lens_B=_zeros(specs.context_lens_B),
            last_tokens_B=_zeros(specs.last_tokens_B),
            sampling=SamplingRows(*map(_zeros, specs.sampling)),
        )
        self.calls: list[str] = []

    def permute_rows(self, sources_B: np.ndarray) -> None:
        check_specs(sources_B, permutation_spec(self.max_num_seqs))
        self.calls.append("permute")
        for array in _leaves(self.state):
            old = array.copy()
            for b, source in enumerate(sources_B):
                array[b] = old[source] if source >= 0 else 0

    def decode(self, shape: DecodeShape, new_blocks_B: np.ndarray) -> FakePending:
        check_specs(new_blocks_B, new_blocks_spec(shape.rows))
        self.calls.append("decode")
        state = self.state
        tokens = np.full(shape.rows, -99, np.int32)
        for b in range(shape.rows):
            length = int(state.context_lens_B[b])
            if length == 0:
                continue
            column, offset = divmod(length, self.block_size)
            if new_blocks_B[b] != NULL_BLOCK:
                state.block_tables_BP[b, column] = new_blocks_B[b]
            self.write(int(state.block_tables_BP[b, column]), offset, b, length)
        for b in range(shape.rows):
            length = int(state.context_lens_B[b])
            if length == 0:
                continue
            seen = min(length + 1, shape.width)
            sampling = [x[b] for x in state.sampling]
            tokens[b] = self.read_and_draw(state.block_tables_BP[b], seen, sampling)
            state.context_lens_B[b] += 1
            state.last_tokens_B[b] = tokens[b]
        return FakePending(tokens, [new_blocks_B])

    def write(self, block: int, offset: int, row: int, position: int) -> None:
        """K/V of a decode row's last token."""
        self.pool_tokens[block, offset] = self.state.last_tokens_B[row]
        self.pool_positions[block, offset] = position

    def prefill(self, batch: PrefillBatch) -> FakePending:
        specs = prefill_batch_specs(len(batch.tokens_T), self.max_num_seqs, self.blocks_per_row)
        check_specs(batch, specs)
        self.calls.append("prefill")
        self.pool_tokens.reshape(-1)[batch.slots_T] = batch.tokens_T
        self.pool_positions.reshape(-1)[batch.slots_T] = batch.positions_T
        tokens = np.full(self.max_num_seqs, -99, np.int32)
        for s, row in enumerate(batch.rows_S):
            if batch.cu_query_lens_S1[s] == batch.cu_query_lens_S1[s + 1]:
                continue
            sampling = [x[s] for x in batch.sampling]
            length = int(batch.context_lens_S[s])
            tokens[s] = self.read_and_draw(batch.block_tables_SP[s], length, sampling)
            if row < self.max_num_seqs:
                self.state.block_tables_BP[row] = batch.block_tables_SP[s]
                self.state.context_lens_B[row] = length
                self.state.last_tokens_B[row] = tokens[s]
                for mine, given in zip(self.state.sampling, batch.sampling, strict=True):
                    mine[row] = given[s]
        return FakePending(tokens, _leaves(batch))

    def read_and_draw(self, table_P: np.ndarray, length: int, sampling: Sequence[Any]) -> int:
        """A token from the first ``length`` slots of a block table."""
        tokens = self.pool_tokens[table_P].reshape(-1)[:length]
        positions = self.pool_positions[table_P].reshape(-1)[:length]
        return draw(tokens, positions, sampling, self.vocab_size)
