import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import ModelConfig
from jaxserve.plan.buckets import DecodeBuckets
from jaxserve.plan.pool import kv_bytes_per_block
from jaxserve.plan.price import (
    decode_traffic,
    kv_bytes_per_token,
    num_parameters,
    prefill_traffic,
    roofline_seconds,
    step_weight_bytes,
    weight_bytes,
)


def model(vocab, d, f, layers, heads, kv_heads, head, tied, qkv_bias=False, **others):
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=d,
        intermediate_size=f,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head,
        max_position_embeddings=8192,
        tie_word_embeddings=tied,
        qkv_bias=qkv_bias,
        **others,
    )


SMOLLM2_135M = model(49152, 576, 1536, 30, 9, 3, 64, True)
LLAMA_3_2_1B = model(128256, 2048, 8192, 16, 32, 8, 64, True)
TINY = model(10, 4, 6, 2, 2, 1, 2, False)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (SMOLLM2_135M, 134_515_008),
        (LLAMA_3_2_1B, 1_235_814_400),
        (model(32000, 2048, 5632, 22, 32, 4, 64, False), 1_100_048_384),  # TinyLlama
        (model(128256, 4096, 14336, 32, 32, 8, 128, False), 8_030_261_248),  # Llama 3.1 8B
        (model(151936, 896, 4864, 24, 14, 2, 64, True, qkv_bias=True), 494_032_768),  # Qwen2 0.5B
    ],
)
def test_a_models_parameters_are_those_its_card_publishes(config, published):
    assert num_parameters(config) == published


def test_output_and_mlp_biases_are_counted():
    biased = model(10, 4, 6, 2, 2, 1, 2, False, o_bias=True, mlp_bias=True)
    assert num_parameters(biased) - num_parameters(TINY) == 2 * (4 + 6 + 6 + 4)


def test_weights_take_their_dtypes_bytes():
    assert weight_bytes(LLAMA_3_2_1B, "bfloat16") == 2 * 1_235_814_400
    assert weight_bytes(LLAMA_3_2_1B, "float32") == 4 * 1_235_814_400


def test_a_step_reads_the_output_table_whole_and_one_embedding_row_a_token():
    untied_input_table = 10 * 4
    read = weight_bytes(TINY, "float32") - 4 * untied_input_table
    assert step_weight_bytes(TINY, 3, "float32") == read + 4 * 3 * 4
    assert step_weight_bytes(SMOLLM2_135M, 1, "float32") == 4 * (134_515_008 + 576)


@given(st.sampled_from([8, 16, 64]), st.sampled_from(["float32", "bfloat16"]))
def test_a_blocks_bytes_are_its_tokens_bytes(block_size, dtype):
    per_block = kv_bytes_per_block(SMOLLM2_135M, block_size, dtype)
    assert per_block == block_size * kv_bytes_per_token(SMOLLM2_135M, dtype)


def test_a_decode_step_reads_its_cells_and_writes_a_token_a_row():
    token = 2 * 30 * 3 * 64 * 4
    traffic = decode_traffic(SMOLLM2_135M, rows=3, cells=96, dtype="float32")
    assert (traffic.kv_read_bytes, traffic.kv_write_bytes) == (96 * token, 3 * token)
    assert traffic.total_bytes == step_weight_bytes(SMOLLM2_135M, 3, "float32") + 99 * token


@given(st.integers(1, 256), st.integers(1, 8192))
def test_the_streamed_read_never_moves_more_than_the_rectangle(rows, context):
    """Holds because the tile divides the width multiple and the context."""
    sets = (DecodeBuckets(256, 8192, streamed=True, tile=32), DecodeBuckets(256, 8192))
    streamed, rectangle = (
        decode_traffic(
            SMOLLM2_135M, rows=rows, cells=s.cells_for(rows, context), dtype="float32"
        ).total_bytes
        for s in sets
    )
    assert streamed <= rectangle


def test_a_prefill_reads_every_key_once_and_writes_its_own():
    token = kv_bytes_per_token(SMOLLM2_135M, "bfloat16")
    traffic = prefill_traffic(SMOLLM2_135M, tokens=64, context=200, dtype="bfloat16")
    assert (traffic.kv_read_bytes, traffic.kv_write_bytes) == (200 * token, 64 * token)


def test_one_row_of_a_1b_model_is_half_a_millisecond_at_4_8_terabytes_a_second():
    """2.47 GB of bfloat16 weights at an H200's 4.8 TB/s."""
    traffic = decode_traffic(LLAMA_3_2_1B, rows=1, cells=32, dtype="bfloat16")
    assert roofline_seconds(traffic, 4.8e12) == pytest.approx(515e-6, rel=0.01)
