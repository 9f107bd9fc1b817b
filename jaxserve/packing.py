"""Prompts and masks as the arrays of a step, for a loop by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.config import SamplingParams
from jaxserve.errors import InvalidRequest
from jaxserve.plan.batch import (
    ALL_ALLOWED,
    NO_TARGET,
    ArraySpec,
    LogitBias,
    PrefillBatch,
    bias_specs,
    mask_spec,
    targets_spec,
)
from jaxserve.runtime.admission import check_tokens
from jaxserve.runtime.executables import StepShapes
from jaxserve.sched.pack import pack_prefill
from jaxserve.sched.request import Request, seed_key
from jaxserve.sched.scheduler import Chunk

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
_NEUTRAL = SamplingParams()


def pack_prompts(
    shapes: StepShapes,
    prompts: Sequence[Sequence[int]],
    settings: SamplingParams | Sequence[SamplingParams] | None,
    *,
    rows: Sequence[int] | None,
    starts: Sequence[int] | None,
    mask_SW: np.ndarray | None,
    tables_BP: np.ndarray,
    max_model_len: int,
) -> PrefillBatch:
    """See ``CompiledSteps.pack``; row b owns the blocks ``tables_BP[b]``."""
    if not len(prompts) or any(np.ndim(prompt) == 0 for prompt in prompts):
        raise InvalidRequest("prompts is a list of one or more lists of token ids", "prompt")
    rows = range(len(prompts)) if rows is None else rows
    most, vocab_size = shapes.max_num_seqs, shapes.model.vocab_size
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
        _chunk(list(prompt), start, row, params, shapes, tables_BP[row], max_model_len)
        for prompt, start, row, params in zip(prompts, starts, rows, settings, strict=True)
    ]
    num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
    tokens = min((t for t in shapes.prefill_tokens if t >= num_tokens), default=None)
    if tokens is None:
        raise InvalidRequest(
            f"{num_tokens} tokens in a batch of at most {shapes.prefill_tokens[-1]}: raise "
            "max_num_batched_tokens, or pack fewer prompts or pieces of them",
            "prompt",
        )
    every_mask_SW = filled(mask_spec(most, vocab_size), ALL_ALLOWED)
    if mask_SW is not None:
        wanted = (len(prompts), every_mask_SW.shape[1])
        check_shape("mask_SW", np.shape(mask_SW), wanted, "pack_mask makes it of a bool a token")
        every_mask_SW[: len(prompts)] = mask_SW
    batch = pack_prefill(
        chunks,
        tokens=tokens,
        max_num_seqs=most,
        blocks_per_row=shapes.blocks_per_row,
        block_size=shapes.block_size,
        vocab_size=vocab_size,
        mask_SW=every_mask_SW,
    )
    if batch.bias is None:
        batch = batch._replace(bias=LogitBias(*map(filled, bias_specs(most))))
    if batch.targets_T is None:
        batch = batch._replace(targets_T=filled(targets_spec(tokens), NO_TARGET))
    return batch


def pack_mask(allowed_BV: np.ndarray) -> np.ndarray:
    """A mask of a bool for each row and token: uint32 [B, ceil(V / 32)].

    ``mask_SW`` of ``pack`` bans from the first token, ``mask_BW`` of ``decode`` from those after.
    """
    allowed_BV = np.asarray(allowed_BV, bool)
    spare = -allowed_BV.shape[1] % 32
    bits = np.packbits(np.pad(allowed_BV, ((0, 0), (0, spare))), axis=1, bitorder="little")
    return bits.view("<u4").astype(np.uint32)


def check_shape(what: str, given: tuple[int, ...], wanted: tuple[int, ...], hint: str) -> None:
    """Raise InvalidRequest naming ``what`` unless it has the shape wanted."""
    if given != wanted:
        raise InvalidRequest(f"{what} has shape {given}, must have {wanted}: {hint}", what)


def filled(spec: ArraySpec, value: int = 0) -> np.ndarray:
    """An array of ``spec`` with one value in every place."""
    return np.full(spec.shape, value, spec.dtype)


def _chunk(
    prompt: list[int],
    start: int,
    row: int,
    params: SamplingParams,
    shapes: StepShapes,
    blocks_P: np.ndarray,
    room: int,
) -> Chunk:
    for name in _OF_THE_ENGINE:
        if getattr(params, name) != getattr(_NEUTRAL, name):
            raise InvalidRequest(
                f"{name}={getattr(params, name)!r} is what an engine does between two steps; "
                "so does your loop, with more rows, a mask or the state's arrays",
                name,
            )
    if not prompt:
        raise InvalidRequest("a prompt of 0 tokens: at least one is computed", "prompt")
    check_tokens(prompt, "prompt", shapes.model.vocab_size)
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
    return Chunk(request, start, len(prompt), tuple(blocks_P.tolist()), samples=True, row=row)
