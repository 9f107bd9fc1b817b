"""Packing against an oracle that walks token by token."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import SamplingParams
from jaxserve.plan.batch import SIT_OUT, prefill_batch_specs
from jaxserve.sched.pack import pack_counts, pack_new_blocks, pack_permutation, pack_prefill
from jaxserve.sched.scheduler import Chunk
from tests.fakes import check_specs, make_request

B, P, Z, T, V = 5, 6, 8, 64, 300


NEUTRAL = [0, 0, 1, 0, [0, 0], 0, 0, 1, 0]


@st.composite
def chunk_lists(draw):
    chunks = []
    left = T
    for s in range(draw(st.integers(1, B))):
        start = draw(st.integers(0, 20))
        count = draw(st.integers(1, min(P * Z - start, left - (B - s))))
        left -= count
        end = start + count
        prompt = draw(st.integers(1, end))
        request = make_request(
            s,
            draw(st.lists(st.integers(0, 99), min_size=prompt, max_size=prompt)),
            params=SamplingParams(
                temperature=draw(st.sampled_from([0.0, 0.5])),
                top_k=draw(st.sampled_from([-1, 0, 3])),
                top_p=draw(st.sampled_from([0.5, 1.0])),
                min_p=draw(st.sampled_from([0.0, 0.25])),
                presence_penalty=draw(st.sampled_from([0.0, -1.5])),
                frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
                repetition_penalty=draw(st.sampled_from([1.0, 2.0])),
                logit_bias=draw(st.sampled_from([(), ((7, -3.5), (2, 0.25))])),
                logprobs=draw(st.sampled_from([None, 0, 3])),
                logprobs_mode=draw(st.sampled_from(["raw_logprobs", "processed_logprobs"])),
                prompt_logprobs=draw(st.sampled_from([None, 0, 3])),
            ),
            key=(draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2**32 - 1))),
        )
        request.output_token_ids = list(range(200, 200 + end - prompt))
        blocks = draw(st.permutations(range(1, 50)))[: -(-end // Z)]
        row = draw(st.one_of(st.none(), st.just(s)))
        chunks.append(Chunk(request, start, end, tuple(blocks), row is not None, row))
    return chunks


def pack(chunks):
    return pack_prefill(
        chunks, tokens=T, max_num_seqs=B, blocks_per_row=P, block_size=Z, vocab_size=V
    )


@given(chunk_lists())
def test_a_prefill_is_packed_as_walking_its_tokens_would(chunks):
    batch = pack(chunks)
    specs = prefill_batch_specs(T, B, P, V)
    for array, spec in zip(batch, specs, strict=True):
        if array is not None:
            check_specs(array, spec)
    assert batch.mask_SW is None
    assert (batch.bias is None) == (not any(c.request.params.logit_bias for c in chunks))
    assert (batch.targets_T is None) == (not any(c.request.scores_prompt for c in chunks))
    t = 0
    for s, chunk in enumerate(chunks):
        request = chunk.request
        assert batch.cu_query_lens_S1[s] == t
        for position in range(chunk.start, chunk.end):
            known = request.prompt_token_ids + request.output_token_ids
            assert batch.tokens_T[t] == known[position]
            assert batch.positions_T[t] == position
            if batch.targets_T is not None:
                prompt = request.prompt_token_ids
                scored = request.scores_prompt and position + 1 < len(prompt)
                assert batch.targets_T[t] == (prompt[position + 1] if scored else -1)
            assert batch.slots_T[t] == chunk.block_ids[position // Z] * Z + position % Z
            t += 1
        assert batch.cu_query_lens_S1[s + 1] == t
        assert batch.context_lens_S[s] == chunk.end
        assert tuple(batch.block_tables_SP[s, : len(chunk.block_ids)]) == chunk.block_ids
        assert batch.rows_S[s] == (B if chunk.row is None else chunk.row)
        params, sampling = request.params, batch.sampling
        if chunk.samples:
            assert sampling.temperature_X[s] == params.temperature
            assert sampling.top_k_X[s] == (3 if params.top_k == 3 else 0)
            assert sampling.top_p_X[s] == params.top_p
            assert sampling.min_p_X[s] == params.min_p
            assert tuple(sampling.keys_X2[s]) == request.key
            assert sampling.presence_X[s] == params.presence_penalty
            assert sampling.frequency_X[s] == params.frequency_penalty
            assert sampling.repetition_X[s] == params.repetition_penalty
            raw = params.logprobs_mode == "raw_logprobs"
            assert sampling.logprobs_X[s] == (params.logprobs is not None) * (1 if raw else 2)
        else:
            assert [x[s].tolist() for x in sampling] == NEUTRAL
        if batch.bias is not None:
            wanted = [*params.logit_bias] + [(0, 0.0)] * (300 - len(params.logit_bias))
            packed = zip(batch.bias.ids_XE[s], batch.bias.values_XE[s], strict=True)
            assert list(packed) == wanted
    for padding in (batch.tokens_T, batch.positions_T, batch.slots_T):
        assert not padding[t:].any()
    assert batch.targets_T is None or (batch.targets_T[t:] == -1).all()
    for s in range(len(chunks), B):
        assert batch.cu_query_lens_S1[s + 1] == t
        assert (batch.context_lens_S[s], batch.rows_S[s]) == (0, B)
        assert not batch.block_tables_SP[s].any()
        assert [x[s].tolist() for x in batch.sampling] == NEUTRAL


@given(chunk_lists())
def test_two_packings_share_no_memory(chunks):
    first, second = pack(chunks), pack(chunks)
    leaves = [
        (*batch[:7], *batch.sampling, *(batch.bias or ()), batch.targets_T)
        for batch in (first, second)
    ]
    assert not any(np.shares_memory(a, b) for a in leaves[0] for b in leaves[1] if a is not None)


def test_new_blocks_go_to_their_rows_and_the_rest_is_the_null_block():
    packed = pack_new_blocks([(0, 7), (2, 9)], [make_request(i) for i in range(3)], 4)
    assert packed.dtype == np.int32
    assert packed.tolist() == [7, 0, 9, 0]


def test_a_row_that_sits_out_says_so_and_padding_does_not():
    assert pack_new_blocks([(2, 9)], [None, make_request(1), make_request(2)], 4).tolist() == [
        SIT_OUT,
        0,
        9,
        0,
    ]


def test_counts_are_the_output_counted_and_a_bit_for_the_prompt():
    request = make_request(0, [3, 3, 5])
    request.output_token_ids = [5, 7, 7, 7] + [2] * 40_000
    counts = pack_counts(request, 9)
    assert counts.dtype == np.uint16
    assert counts.tolist() == [0, 0, 0x7FFF, 0x8000, 0, 0x8001, 0, 3, 0]


def test_a_permutation_is_passed_on_as_it_is():
    packed = pack_permutation([2, 0, -1])
    assert packed.dtype == np.int32
    assert packed.tolist() == [2, 0, -1]
