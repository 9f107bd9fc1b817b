"""Fakes shared by the rooms' tests."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.config import MAX_LOGPROBS, SamplingParams
from jaxserve.plan.batch import (
    NO_LOGPROBS,
    NO_TARGET,
    NULL_BLOCK,
    SIT_OUT,
    ArraySpec,
    DecodeState,
    LogitBias,
    PrefillBatch,
    SamplingRows,
    Scores,
    counts_spec,
    decode_state_specs,
    mask_spec,
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


def draw(
    tokens: Any,
    positions: Any,
    sampling: Sequence[Any],
    vocab_size: int,
    *,
    counts: Any = None,
    bias: Sequence[tuple[int, float]] = (),
    allowed: Callable[[int], bool] = lambda token: True,
) -> int:
    """The fake model: a checksum of the whole history and of what the row asks for.

    ``sampling`` is a row of SamplingRows. ``counts`` are (in the prompt, times drawn) a token; they
    matter only with a penalty. A token that is not allowed gives way to the next that is.
    """
    history = np.stack([np.asarray(tokens, np.int32), np.asarray(positions, np.int32)])
    checksum = zlib.crc32(history.tobytes())
    temperature, top_k, top_p, min_p, key, *penalties, _ = sampling
    if temperature > 0:
        floats = np.array([temperature, top_p, min_p], np.float32)
        checksum = zlib.crc32(floats.tobytes() + np.int32(top_k).tobytes(), checksum)
        checksum = zlib.crc32(np.asarray(key, np.uint32).tobytes(), checksum)
    if [float(x) for x in penalties] != [0.0, 0.0, 1.0]:
        checksum = zlib.crc32(np.array(penalties, np.float32).tobytes(), checksum)
        checksum = zlib.crc32(np.asarray(counts, np.int32).tobytes(), checksum)
    for token, value in sorted(bias):
        checksum = zlib.crc32(np.array([token, value], np.float32).tobytes(), checksum)
    ring = [(checksum + i) % vocab_size for i in range(vocab_size)]
    return next((token for token in ring if allowed(token)), ring[0])


def fake_scores(tokens: np.ndarray, wanted: np.ndarray, vocab_size: int) -> Scores:
    """Scores told from the token alone: -token, token + 1, and the first tokens in order."""
    likeliest = np.arange(min(MAX_LOGPROBS, vocab_size), dtype=np.int32)
    top_ids = np.where(wanted[:, None], likeliest[None], 0)
    return Scores(
        np.where(wanted, -tokens, 0).astype(np.float32),
        np.where(wanted, tokens + 1, 0).astype(np.int32),
        top_ids.astype(np.int32),
        -top_ids.astype(np.float32),
    )


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
    scores: Scores | None = None
    prompt: Scores | None = None
    copies: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.copies = [x.copy() for x in self.inputs]

    def read(self) -> np.ndarray:
        for array, copy in zip(self.inputs, self.copies, strict=True):
            assert np.array_equal(array, copy), "the host wrote to an array given to the device"
        return self.tokens

    def read_scores(self) -> Scores:
        assert self.scores is not None, "nobody asked for scores"
        return self.scores

    def read_prompt_scores(self) -> Scores:
        assert self.prompt is not None, "nobody asked for the scores of a prompt"
        return self.prompt


class FakeRunner:
    """A device in numpy: its own decode state, and a pool that holds (token, position) a slot.

    What ``weights`` number w make of token t is t + w * vocab_size. Every draw reads the row's
    whole history through its block table, so a wrong slot, table, permutation or length, a block
    given away too early or a bucket too narrow changes tokens.
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
        specs = decode_state_specs(max_num_seqs, blocks_per_row, vocab_size)
        self.state = DecodeState(
            block_tables_BP=_zeros(specs.block_tables_BP),
            context_lens_B=_zeros(specs.context_lens_B),
            last_tokens_B=_zeros(specs.last_tokens_B),
            sampling=SamplingRows(*map(_zeros, specs.sampling)),
            bias=LogitBias(*map(_zeros, specs.bias)),
            counts_BV=_zeros(specs.counts_BV),
        )
        self.weights = 0
        self.calls: list[str] = []

    def prepare_params(self, tree: Any) -> Any:
        return tree

    def update_params(self, tree: Any) -> None:
        """The next weights; ``tree`` is not looked at."""
        self.weights += 1

    def permute_rows(self, sources_B: np.ndarray) -> None:
        check_specs(sources_B, permutation_spec(self.max_num_seqs))
        self.calls.append("permute")
        for array in _leaves(self.state):
            old = array.copy()
            for b, source in enumerate(sources_B):
                array[b] = old[source] if source >= 0 else 0

    def write_counts(self, row: int, counts_V: np.ndarray) -> None:
        check_specs(counts_V, counts_spec(self.vocab_size))
        self.calls.append("write_counts")
        self.state.counts_BV[row] = counts_V

    def decode(
        self, shape: DecodeShape, new_blocks_B: np.ndarray, mask_BW: np.ndarray | None
    ) -> FakePending:
        check_specs(new_blocks_B, new_blocks_spec(shape.rows))
        if mask_BW is not None:
            check_specs(mask_BW, mask_spec(shape.rows, self.vocab_size))
        self.calls.append("decode")
        state = self.state
        tokens = np.full(shape.rows, -99, np.int32)
        active = [
            b
            for b in range(shape.rows)
            if state.context_lens_B[b] > 0 and new_blocks_B[b] != SIT_OUT
        ]
        for b in active:
            length = int(state.context_lens_B[b])
            column, offset = divmod(length, self.block_size)
            if new_blocks_B[b] != NULL_BLOCK:
                state.block_tables_BP[b, column] = new_blocks_B[b]
            self.write(int(state.block_tables_BP[b, column]), offset, b, length)
        wanted = np.zeros(shape.rows, bool)
        for b in active:
            seen = min(int(state.context_lens_B[b]) + 1, shape.width)
            mask = None if mask_BW is None else mask_BW[b]
            sampling = SamplingRows(*(x[b] for x in state.sampling))
            bias = LogitBias(*(x[b] for x in state.bias))
            counts = state.counts_BV[b]
            tokens[b] = self.read_and_draw(
                state.block_tables_BP[b], seen, sampling, bias, counts, mask
            )
            wanted[b] = sampling.logprobs_X != NO_LOGPROBS
            state.counts_BV[b, tokens[b]] += 1
            state.context_lens_B[b] += 1
            state.last_tokens_B[b] = tokens[b]
        inputs = [new_blocks_B] if mask_BW is None else [new_blocks_B, mask_BW]
        return FakePending(tokens, inputs, self._scores(tokens, wanted))

    def write(self, block: int, offset: int, row: int, position: int) -> None:
        """K/V of a decode row's last token."""
        self.pool_tokens[block, offset] = self.written(self.state.last_tokens_B[row])
        self.pool_positions[block, offset] = position

    def written(self, tokens: Any) -> Any:
        """K/V of ``tokens`` under this device's weights."""
        return tokens + self.weights * self.vocab_size

    def prefill(self, batch: PrefillBatch) -> FakePending:
        specs = prefill_batch_specs(
            len(batch.tokens_T), self.max_num_seqs, self.blocks_per_row, self.vocab_size
        )
        for array, spec in zip(batch, specs, strict=True):
            if array is not None:
                check_specs(array, spec)
        self.calls.append("prefill")
        self.pool_tokens.reshape(-1)[batch.slots_T] = self.written(batch.tokens_T)
        self.pool_positions.reshape(-1)[batch.slots_T] = batch.positions_T
        tokens = np.full(self.max_num_seqs, -99, np.int32)
        wanted = np.zeros(self.max_num_seqs, bool)
        bias = batch.bias or LogitBias(*map(_zeros, specs.bias or ()))
        for s, row in enumerate(batch.rows_S):
            if batch.cu_query_lens_S1[s] == batch.cu_query_lens_S1[s + 1]:
                continue
            sampling = SamplingRows(*(x[s] for x in batch.sampling))
            mine = LogitBias(*(x[s] for x in bias))
            length = int(batch.context_lens_S[s])
            counts = self.state.counts_BV[min(row, self.max_num_seqs - 1)]
            mask = None if batch.mask_SW is None else batch.mask_SW[s]
            tokens[s] = self.read_and_draw(
                batch.block_tables_SP[s], length, sampling, mine, counts, mask
            )
            wanted[s] = sampling.logprobs_X != NO_LOGPROBS
            if row < self.max_num_seqs:
                self.state.block_tables_BP[row] = batch.block_tables_SP[s]
                self.state.context_lens_B[row] = length
                self.state.last_tokens_B[row] = tokens[s]
                self.state.counts_BV[row, tokens[s]] += 1
                for held, given in zip(self.state.sampling, batch.sampling, strict=True):
                    held[row] = given[s]
                for held, given in zip(self.state.bias, bias, strict=True):
                    held[row] = given[s]
        prompt = None
        if batch.targets_T is not None:
            targets_T = batch.targets_T
            prompt = fake_scores(targets_T, targets_T != NO_TARGET, self.vocab_size)
        inputs = [leaf for leaf in _leaves(batch) if leaf is not None]
        return FakePending(tokens, inputs, self._scores(tokens, wanted), prompt)

    def _scores(self, tokens: np.ndarray, wanted: np.ndarray) -> Scores | None:
        return fake_scores(tokens, wanted, self.vocab_size) if wanted.any() else None

    def read_and_draw(
        self,
        table_P: np.ndarray,
        length: int,
        sampling: SamplingRows,
        bias: LogitBias,
        counts_V: np.ndarray,
        mask_W: np.ndarray | None,
    ) -> int:
        """A token from the first ``length`` slots of a block table."""
        return draw(
            self.pool_tokens[table_P].reshape(-1)[:length],
            self.pool_positions[table_P].reshape(-1)[:length],
            sampling,
            self.vocab_size,
            counts=[(int(n) >> 15, int(n) & 0x7FFF) for n in counts_V],
            bias=[(t, v) for t, v in zip(*bias, strict=True) if v != 0],
            allowed=lambda t: mask_W is None or bool(int(mask_W[t // 32]) >> (t % 32) & 1),
        )
