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
from jaxserve.plan.batch import (
    ALL_ALLOWED,
    NO_TARGET,
    NULL_BLOCK,
    SIT_OUT,
    ArraySpec,
    DecodeState,
    LogitBias,
    PrefillBatch,
    StepOutput,
    bias_specs,
    mask_spec,
    new_blocks_spec,
    permutation_spec,
    prefill_batch_specs,
    targets_spec,
)
from jaxserve.plan.buckets import DecodeBuckets, DecodeShape, PrefillBuckets
from jaxserve.plan.capture import plan_capture
from jaxserve.runtime.admission import check_tokens
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
from jaxserve.sched.pack import pack_prefill
from jaxserve.sched.request import Request, seed_key
from jaxserve.sched.scheduler import Chunk

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


# Options of a request that the engine acts on between steps; a loop by hand does so itself.
_OF_THE_ENGINE = (
    "n",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "bad_words_token_ids",
    "stop",
    "stop_token_ids",
)


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
    ) -> PrefillBatch:
        """Token ids as a batch for ``prefill``: prompt i goes into row ``rows[i]`` (i).

        ``settings``, one or one a prompt, are how each row draws from its first token on; None is
        greedy. When a row ends is the loop's. ``starts[i]`` (0) tokens of prompt i are skipped:
        they lie in its row already, so a prompt longer than a batch goes in piece by piece.
        Raises InvalidRequest for a setting that only an engine acts on, for a prompt without
        tokens to compute or without room, for ids that the vocabulary has not, and for more tokens
        than the largest batch.
        """
        if not len(prompts) or any(np.ndim(prompt) == 0 for prompt in prompts):
            raise InvalidRequest("prompts is a list of one or more lists of token ids", "prompt")
        rows = range(len(prompts)) if rows is None else rows
        most = self.shapes.max_num_seqs
        wrong = next((row for row in rows if not 0 <= row < most), None)
        if wrong is not None:
            raise InvalidRequest(f"row {wrong} of {most} rows, 0 to {most - 1}: raise max_num_seqs")
        if len(set(rows)) < len(rows):
            raise InvalidRequest(f"rows {list(rows)} name a row twice", "rows")
        starts = [0] * len(prompts) if starts is None else starts
        if settings is None or isinstance(settings, SamplingParams):
            settings = [settings or SamplingParams(temperature=0.0)] * len(prompts)
        for what, given in (("settings", settings), ("rows", rows), ("starts", starts)):
            if len(given) != len(prompts):
                raise InvalidRequest(f"{len(given)} {what} for {len(prompts)} prompts", what)
        chunks = [
            self._chunk(list(prompt), start, row, params)
            for prompt, start, row, params in zip(prompts, starts, rows, settings, strict=True)
        ]
        shapes = self.shapes
        vocab_size, rows_most = shapes.model.vocab_size, shapes.max_num_seqs
        num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
        tokens = min((t for t in shapes.prefill_tokens if t >= num_tokens), default=None)
        if tokens is None:
            raise InvalidRequest(
                f"{num_tokens} tokens in a batch of at most {shapes.prefill_tokens[-1]}: raise "
                "max_num_batched_tokens, or pack fewer prompts or pieces of them",
                "prompt",
            )
        batch = pack_prefill(
            chunks,
            tokens=tokens,
            max_num_seqs=rows_most,
            blocks_per_row=shapes.blocks_per_row,
            block_size=shapes.block_size,
            vocab_size=vocab_size,
            mask_SW=_full(mask_spec(rows_most, vocab_size), ALL_ALLOWED),
        )
        if batch.bias is None:
            batch = batch._replace(bias=LogitBias(*map(_full, bias_specs(rows_most))))
        if batch.targets_T is None:
            batch = batch._replace(targets_T=_full(targets_spec(tokens), NO_TARGET))
        return batch

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
        new_blocks_B = _full(new_blocks_spec(shape.rows), NULL_BLOCK)  # rows own theirs already
        if sits_out_B is not None:
            _check("sits_out_B", np.shape(sits_out_B), (shape.rows,), "a bool a row")
            new_blocks_B[np.asarray(sits_out_B, bool)] = SIT_OUT
        spec = mask_spec(shape.rows, self.shapes.model.vocab_size)
        if mask_BW is None:
            mask_BW = _full(spec, ALL_ALLOWED)
        _check("mask_BW", mask_BW.shape, spec.shape, "pack_mask makes it of a bool a token")
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
        _check("sources_B", sources_B.shape, (rows,), "the row that each goes on as")
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

    def _chunk(self, prompt: list[int], start: int, row: int, params: SamplingParams) -> Chunk:
        for name in _OF_THE_ENGINE:
            if getattr(params, name) != getattr(_NEUTRAL, name):
                raise InvalidRequest(
                    f"{name}={getattr(params, name)!r} is what an engine does between two steps; "
                    "so does your loop, with more rows, a mask or the state's arrays",
                    name,
                )
        if not prompt:
            raise InvalidRequest("a prompt of 0 tokens: at least one is computed", "prompt")
        check_tokens(prompt, "prompt", self.shapes.model.vocab_size)
        room = self.buckets.max_model_len
        if not 0 <= start < len(prompt) < room:
            raise InvalidRequest(
                f"a prompt of {len(prompt)} tokens from {start} on, in a row of {room}: at least "
                "one is computed and one drawn; raise max_model_len",
                "prompt",
            )
        request = Request(
            request_id=str(row),
            prompt_token_ids=prompt,
            params=params,
            max_output_tokens=room - len(prompt),
            stop_token_ids=frozenset(),
            key=seed_key(params.seed, 0, row),
            arrival=row,
            arrived_at=0.0,
        )
        blocks = tuple(self.tables_BP[row].tolist())
        return Chunk(request, start, len(prompt), blocks, samples=True, row=row)


def pack_mask(allowed_BV: np.ndarray) -> np.ndarray:
    """``mask_BW`` of a bool for each row and token: uint32 [B, ceil(V / 32)]."""
    allowed_BV = np.asarray(allowed_BV, bool)
    spare = -allowed_BV.shape[1] % 32
    bits = np.packbits(np.pad(allowed_BV, ((0, 0), (0, spare))), axis=1, bitorder="little")
    return bits.view("<u4").astype(np.uint32)


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


_NEUTRAL = SamplingParams()


def _check(what: str, given: tuple[int, ...], wanted: tuple[int, ...], hint: str) -> None:
    if given != wanted:
        raise InvalidRequest(f"{what} has shape {given}, must have {wanted}: {hint}", what)


def _full(spec: ArraySpec, value: int = 0) -> np.ndarray:
    return np.full(spec.shape, value, spec.dtype)
