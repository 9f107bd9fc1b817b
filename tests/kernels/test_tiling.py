"""Tiles are whole blocks and never wider than a table."""

from hypothesis import given
from hypothesis import strategies as st
from jaxserve_kernels import tiling

block_sizes = st.sampled_from([8, 16, 32, 64, 128, 256])
widths = st.integers(1, 4096)


@given(block_size=block_sizes, width=widths)
def test_a_decode_tile_is_whole_blocks_of_the_table(block_size, width):
    tile = tiling.decode_tile(block_size, width)
    assert tile % block_size == 0
    assert block_size <= tile <= block_size * width


@given(tokens=st.integers(1, 8192), block_size=block_sizes, width=widths)
def test_a_prefill_tile_is_whole_blocks_and_no_more_queries_than_tokens(tokens, block_size, width):
    tile = tiling.prefill_tile(tokens, block_size, width)
    assert tile.keys % block_size == 0
    assert block_size <= tile.keys <= block_size * width
    assert 1 <= tile.queries <= tokens
