"""Packing against an oracle that walks token by token."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import SamplingParams
from jaxserve.plan.batch import prefill_batch_specs
from jaxserve.sched.pack import pack_new_blocks, pack_permutation, pack_prefill
from jaxserve.sched.scheduler import Chunk
from tests.fakes import check_specs, make_request

B, P, Z, T = 5, 6, 8, 64


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
            ),
            key=(draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2**32 - 1))),
        )
        request.output_token_ids = list(range(200, 200 + end - prompt))
        blocks = draw(st.permutations(range(1, 50)))[: -(-end // Z)]
        row = draw(st.one_of(st.none(), st.just(s)))
        chunks.append(Chunk(request, start, end, tuple(blocks), row is not None, row))
    return chunks


def pack(chunks):
    return pack_prefill(chunks, tokens=T, max_num_seqs=B, blocks_per_row=P, block_size=Z)


@given(chunk_lists())
def test_a_prefill_is_packed_as_walking_its_tokens_would(chunks):
    batch = pack(chunks)
    check_specs(batch, prefill_batch_specs(T, B, P))
    t = 0
    for s, chunk in enumerate(chunks):
        request = chunk.request
        assert batch.cu_query_lens_S1[s] == t
        for position in range(chunk.start, chunk.end):
            known = request.prompt_token_ids + request.output_token_ids
            assert batch.tokens_T[t] == known[position]
            assert batch.positions_T[t] == position
            assert batch.slots_T[t] == chunk.block_ids[position // Z] * Z + position % Z
            t += 1
        assert batch.cu_query_lens_S1[s + 1] == t
        assert batch.context_lens_S[s] == chunk.end
        assert tuple(batch.block_tables_SP[s, : len(chunk.block_ids)]) == chunk.block_ids
        assert batch.rows_S[s] == (B if chunk.row is None else chunk.row)
        sampling = batch.sampling
        assert sampling.temperature_X[s] == request.params.temperature
        assert sampling.top_k_X[s] == (3 if request.params.top_k == 3 else 0)
        assert sampling.top_p_X[s] == request.params.top_p
        assert sampling.min_p_X[s] == request.params.min_p
        assert tuple(sampling.keys_X2[s]) == request.key
    for padding in (batch.tokens_T, batch.positions_T, batch.slots_T):
        assert not padding[t:].any()
    for s in range(len(chunks), B):
        assert batch.cu_query_lens_S1[s + 1] == t
        assert (batch.context_lens_S[s], batch.rows_S[s]) == (0, B)
        assert not batch.block_tables_SP[s].any()
        assert [x[s].tolist() for x in batch.sampling] == [0, 0, 1, 0, [0, 0]]


@given(chunk_lists())
def test_two_packings_share_no_memory(chunks):
    first, second = pack(chunks), pack(chunks)
    leaves = [(*batch[:-1], *batch.sampling) for batch in (first, second)]
    assert not any(np.shares_memory(a, b) for a in leaves[0] for b in leaves[1])


def test_new_blocks_go_to_their_rows_and_the_rest_is_the_null_block():
    packed = pack_new_blocks([(0, 7), (2, 9)], 4)
    assert packed.dtype == np.int32
    assert packed.tolist() == [7, 0, 9, 0]


def test_a_permutation_is_passed_on_as_it_is():
    packed = pack_permutation([2, 0, -1])
    assert packed.dtype == np.int32
    assert packed.tolist() == [2, 0, -1]
