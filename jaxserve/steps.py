"""The compiled steps by hand: a decoding loop of your own over the engine's programs.

    steps = compile_steps(checkpoint.config, EngineConfig(max_num_seqs=4, max_model_len=256))
    params = steps.place(checkpoint)
    pool, state = steps.allocate()
    pool, state, drawn = steps.prefill(params, pool, state, steps.pack(prompts, settings))
    pool, state, drawn = steps.decode(params, pool, state)

Every call gives back the pool and the state that it was given, changed; those passed in are
donated and must not be used again. Row b owns P blocks of the pool, 1 + b * P and on, so a loop
has no blocks to allocate. What happens between two steps is the loop's: when a row ends, which
row goes on as a copy of which, what a row may draw.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxserve.boot import resolve
from jaxserve.checkpoint import Checkpoint, load_checkpoint
from jaxserve.config import BootConfig, EngineConfig, ModelConfig, SamplingParams
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.model.attention import KVPool
from jaxserve.model.params import Params
from jaxserve.packing import check_shape, filled, pack_mask, pack_prompts
from jaxserve.plan.batch import (
    ALL_ALLOWED,
    NULL_BLOCK,
    SIT_OUT,
    DecodeState,
    PrefillBatch,
    StepOutput,
    mask_spec,
    new_blocks_spec,
    permutation_spec,
    prefill_batch_specs,
)
from jaxserve.plan.buckets import DecodeBuckets, DecodeShape, PrefillBuckets
from jaxserve.plan.capture import plan_capture
from jaxserve.runtime.booted import BootedEngine
from jaxserve.runtime.compile_cache import CompileCache
from jaxserve.runtime.compiler import StepCompiler, compile_executables
from jaxserve.runtime.executables import Built, Executables, StepShapes, shape_structs, zeros
from jaxserve.runtime.fingerprint import environment_parts
from jaxserve.runtime.placing import place_params
from jaxserve.runtime.sizing import decode_buckets, step_shapes
from jaxserve.runtime.steps import (
    decode_step,
    jit_decode,
    jit_prefill,
    permute_rows,
    prefill_step,
)
from jaxserve.runtime.weights import first_params

__all__ = [
    "ALL_ALLOWED",
    "NULL_BLOCK",
    "SIT_OUT",
    "CompiledSteps",
    "DecodeBuckets",
    "DecodeShape",
    "DecodeState",
    "Executables",
    "KVPool",
    "Params",
    "PrefillBatch",
    "PrefillBuckets",
    "StepOutput",
    "StepShapes",
    "compile_executables",
    "compile_steps",
    "decode_step",
    "fork_rows",
    "jit_decode",
    "jit_prefill",
    "load_checkpoint",
    "mask_spec",
    "pack_mask",
    "permute_rows",
    "plan_capture",
    "prefill_batch_specs",
    "prefill_step",
    "shape_structs",
    "steps_of",
]


def fork_rows(
    pool: KVPool,
    state: DecodeState,
    sources_B: jax.Array,
    own_tables_BP: jax.Array,
    *,
    num_blocks: int,
) -> tuple[KVPool, DecodeState]:
    """Row b goes on as a copy of row ``sources_B[b]``, K/V included; -1 empties it.

    Row b ends up in the blocks ``own_tables_BP[b]``, which no other row may own; all P blocks of
    every row are copied. ``num_blocks``: C. Pure; pool and state may be donated.
    """
    blocks_BP = state.block_tables_BP[jnp.maximum(sources_B, 0)]

    def copy(array: jax.Array) -> jax.Array:
        by_layer = array.reshape(-1, num_blocks, *array.shape[1:])  # layers may lie in one array
        taken = by_layer.at[:, blocks_BP].get(mode="clip")
        return by_layer.at[:, own_tables_BP].set(taken).reshape(array.shape)

    moved = permute_rows(state, sources_B)
    return jax.tree.map(copy, pool), moved._replace(block_tables_BP=own_tables_BP)


@dataclass(frozen=True, kw_only=True)
class CompiledSteps:
    """The executables of one ``StepShapes``, each called as a function; nothing is kept.

    ``shapes`` describes every array (``shapes.pool_specs()``, ``shapes.state_specs()``), and
    ``buckets`` the decode shapes there are. A row holds ``buckets.max_model_len`` tokens at most;
    that a loop ends before is not checked on the device.
    """

    shapes: StepShapes
    buckets: DecodeBuckets
    executables: Executables

    @property
    def tables_BP(self) -> np.ndarray:
        """int32 [B, P]: the blocks that each row owns."""
        rows, blocks = self.shapes.max_num_seqs, self.shapes.blocks_per_row
        owned = np.arange(rows * blocks, dtype=np.int32) + np.int32(NULL_BLOCK + 1)
        return owned.reshape(rows, blocks)

    def place(self, weights: Checkpoint | Any) -> Params:
        """Weights on the device as the steps take them.

        ``weights``: a checkpoint, an nnx module or its state, arrays by Hugging Face's names, or
        ``Params``. Raises InvalidWeights naming the tensor.
        """
        shapes = self.shapes
        if isinstance(weights, Checkpoint):
            return place_params(
                shapes.model, shapes.dtype, weights, lambda *_: None, stacked=shapes.stacked
            )
        return first_params(weights, shapes.model, shapes.dtype, stacked=shapes.stacked)

    def allocate(self) -> tuple[KVPool, DecodeState]:
        """An empty pool and a state whose rows are empty."""
        return zeros(self.shapes.pool_specs()), zeros(self.shapes.state_specs())

    def pack(
        self,
        prompts: Sequence[Sequence[int]],
        settings: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        rows: Sequence[int] | None = None,
        starts: Sequence[int] | None = None,
        mask_SW: np.ndarray | None = None,
    ) -> PrefillBatch:
        """Token ids as a batch for ``prefill``: prompt i goes into row ``rows[i]`` (i).

        ``settings``, one or one a prompt, are how each row draws from its first token on; None is
        greedy. When a row ends is the loop's. ``starts[i]`` (0) tokens of prompt i are skipped:
        they lie in its row already, so a prompt longer than a batch goes in piece by piece.
        ``mask_SW`` uint32: what the first token of each prompt may be, as ``decode`` takes it.
        Raises InvalidRequest for a setting that only an engine acts on, for a prompt without
        tokens to compute or without room, for ids that the vocabulary has not, and for more tokens
        than the largest batch.
        """
        return pack_prompts(
            self.shapes,
            prompts,
            settings,
            rows=rows,
            starts=starts,
            mask_SW=mask_SW,
            tables_BP=self.tables_BP,
            max_model_len=self.buckets.max_model_len,
        )

    def prefill(
        self, params: Params, pool: KVPool, state: DecodeState, batch: PrefillBatch
    ) -> tuple[KVPool, DecodeState, StepOutput]:
        """Compute a packed batch; its rows decode from then on. See ``prefill_step``.

        Entry i of the output is what prompt i drew: its first token.
        """
        step = self.executables.prefill_for(batch.tokens_T.shape[0])
        return step(params, pool, state, batch)

    def decode(
        self,
        params: Params,
        pool: KVPool,
        state: DecodeState,
        *,
        sits_out_B: np.ndarray | None = None,
        mask_BW: np.ndarray | jax.Array | None = None,
        shape: DecodeShape | None = None,
    ) -> tuple[KVPool, DecodeState, StepOutput]:
        """One token for each of the first ``shape.rows`` rows (all). See ``decode_step``.

        ``sits_out_B`` bool: rows that stay as they are, and draw nonsense; None: no row does.
        ``mask_BW`` uint32: the tokens each may draw, token t in bit t % 32 of word t // 32 (see
        ``pack_mask``); None bans nothing. Raises InvalidRequest for one of another shape.
        """
        shape = shape or self.buckets.shapes[-1]
        new_blocks_B = filled(new_blocks_spec(shape.rows), NULL_BLOCK)  # rows own theirs already
        if sits_out_B is not None:
            check_shape("sits_out_B", np.shape(sits_out_B), (shape.rows,), "a bool a row")
            new_blocks_B[np.asarray(sits_out_B, bool)] = SIT_OUT
        spec = mask_spec(shape.rows, self.shapes.model.vocab_size)
        if mask_BW is None:
            mask_BW = filled(spec, ALL_ALLOWED)
        check_shape("mask_BW", mask_BW.shape, spec.shape, "pack_mask makes it of a bool a token")
        step = self.executables.decode_for(shape)
        return step(params, pool, state, new_blocks_B, mask_BW)

    def fork(
        self, pool: KVPool, state: DecodeState, sources_B: Sequence[int] | np.ndarray
    ) -> tuple[KVPool, DecodeState]:
        """Row b goes on as a copy of row ``sources_B[b]``; -1 empties it. See ``fork_rows``.

        A copy draws as its source does, by the same seed. Compiled at its first call.
        """
        rows = self.shapes.max_num_seqs
        sources_B = np.asarray(sources_B)
        check_shape("sources_B", sources_B.shape, (rows,), "the row that each goes on as")
        if not np.isin(sources_B, np.arange(-1, rows)).all():
            raise InvalidRequest(
                f"sources_B {sources_B.tolist()}: rows are 0 to {rows - 1}, -1 for none",
                "sources_B",
            )
        spec = permutation_spec(rows)
        return self._fork(pool, state, sources_B.astype(spec.dtype), self.tables_BP)

    @cached_property
    def _fork(self) -> jax.stages.Wrapped:
        step = partial(fork_rows, num_blocks=self.shapes.num_blocks)
        return jax.jit(step, donate_argnums=(0, 1))


def compile_steps(
    model: ModelConfig,
    config: EngineConfig | None = None,
    boot: BootConfig | None = None,
    *,
    use_tqdm: bool = True,
) -> CompiledSteps:
    """Compile every step that ``config`` asks for, from specs: no weight and no pool exists yet.

    ``max_num_seqs`` rows of ``max_model_len`` tokens; batches of ``max_num_batched_tokens``. The
    pool has a block for each of them. ``boot`` may name a directory that keeps executables for the
    next time. Raises ConfigError.
    """
    platform = jax.default_backend()
    config = resolve(config or EngineConfig(), model, platform)
    buckets = decode_buckets(config)
    num_blocks = config.max_num_seqs * config.blocks_per_row + 1
    shapes = step_shapes(model, config, buckets.shapes, num_blocks, platform)
    directory = None if boot is None else boot.compile_cache_dir
    compiler = StepCompiler(
        shapes=shapes,
        platform=platform,
        cache=None if directory is None else CompileCache(directory),
        environment={} if directory is None else environment_parts(""),
    )
    with tqdm(desc="executables", disable=not use_tqdm, leave=False) as bar:

        def progress(built: Built, done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        executables = compile_executables(
            shapes, compiler=compiler, workers=os.cpu_count() or 1, progress=progress
        )
    return CompiledSteps(shapes=shapes, buckets=buckets, executables=executables)


def steps_of(booted: BootedEngine) -> CompiledSteps:
    """The steps of an engine (``llm.engine``), compiled by it already; its pool is not touched.

    ``booted.runner.params`` are its weights. ``allocate`` makes a pool of the same size beside the
    engine's: put that to sleep first where memory is short. Raises ConfigError where the pool has
    no block for every token of every row.
    """
    config, capture = booted.config, booted.capture
    least = config.max_num_seqs * config.blocks_per_row + 1
    if booted.pool.num_blocks < least:
        raise ConfigError(
            f"a pool of {booted.pool.num_blocks} blocks, and {config.max_num_seqs} rows of "
            f"{config.max_model_len} tokens own {least}: raise num_blocks, or lower max_num_seqs"
        )
    shapes = step_shapes(
        booted.model,
        config,
        () if capture is None else capture.shapes,
        booted.pool.num_blocks,
        jax.default_backend(),
    )
    buckets = decode_buckets(config)
    return CompiledSteps(shapes=shapes, buckets=buckets, executables=booted.executables)
