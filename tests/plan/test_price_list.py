"""The price list against figures worked out by hand."""

import json
from dataclasses import asdict, replace

import pytest

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.plan.buckets import DecodeBuckets, DecodeShape, PrefillBuckets
from jaxserve.plan.capture import plan_capture
from jaxserve.plan.compiled import CompiledFigures, KernelFigures, Key
from jaxserve.plan.pool import kv_bytes_per_block, plan_kv_pool
from jaxserve.plan.price_list import PriceList, price_list

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=10,
    hidden_size=4,
    intermediate_size=6,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    max_position_embeddings=32,
)
# Elements: a layer has qkv 4 x 8, out 4 x 4, gate, up and down 3 x 4 x 6 and two norms of 4: 128.
# Two layers, the last norm of 4 and two tables of 10 x 4 are 340.
WEIGHTS = 340 * 4
POOL = 9 * 8 * 2 * 2 * 2 * 4  # blocks, tokens, K and V, layers, head size, float32
# A row: 4 blocks, length, token, eight settings and half a key x 2; 300 biases; 10 counts.
ROW = (4 + 1 + 1 + 8 + 2) * 4
BIAS = 300 * (4 + 4)
STATE = 2 * (ROW + BIAS + 10 * 2)
MASK = 4  # 10 tokens in a word
KERNEL = KernelFigures(name="k", registers=177, spill_store_bytes=8, spill_load_bytes=4)
FIGURES = CompiledFigures(
    trace_seconds=0.5,
    backend_seconds=1.5,
    argument_bytes=3768,
    output_bytes=2500,
    alias_bytes=2400,
    temp_bytes=512,
    launches=7,
    loop_launches=3,
    branch_launches=2,
    kernels=(KERNEL,),
)


KEYS: tuple[Key, ...] = ("permute", "write_counts", DecodeShape(1, 32), DecodeShape(2, 32), 32)


def all_of(figures: CompiledFigures) -> dict[Key, CompiledFigures]:
    return dict.fromkeys(KEYS, figures)


def prices(compiled=None, target=None, streamed=True) -> PriceList:
    config = EngineConfig(
        max_model_len=32,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        block_size=8,
        num_blocks=9,
        dtype="float32",
        attention_backend="streamed" if streamed else "rectangle",
    )
    decode = DecodeBuckets(2, 32, 16, streamed=streamed, tile=16 if streamed else None)
    return price_list(
        "toy",
        MODEL,
        config,
        plan_kv_pool(config, kv_bytes_per_block(MODEL, 8, "float32")),
        plan_capture(decode, num_heads=2),
        decode,
        PrefillBuckets(32),
        bandwidth=1000.0,
        bandwidth_of="a toy",
        target=target,
        compiled=compiled,
    )


def by_name(listed: PriceList):
    return {e.name: e for e in listed.executables}


def test_the_list_is_the_two_that_move_rows_every_kept_decode_shape_and_every_prefill_bucket():
    assert list(by_name(prices())) == [
        "permute",
        "write_counts",
        "decode 1x32",
        "decode 2x32",
        "prefill 32",
    ]
    assert list(by_name(prices(streamed=False))) == [
        "permute",
        "write_counts",
        "decode 1x16",
        "decode 1x32",
        "decode 2x16",
        "decode 2x32",
        "prefill 32",
    ]


def test_a_decode_costs_what_is_worked_out_by_hand():
    decode = by_name(prices())["decode 2x32"]
    assert (decode.kind, decode.rows, decode.width, decode.tokens) == ("decode", 2, 32, None)
    assert decode.argument_bytes == WEIGHTS + POOL + STATE + 2 * 4 + 2 * MASK
    # Read: both layers, three norm-sized rows (the last norm, two embeddings), the output table,
    # and K and V of 2 x 32 tokens at 32 bytes; written: K and V of two tokens.
    read = (2 * 128 + 3 * 4 + 40) * 4 + 64 * 32
    assert decode.traffic_bytes == read + 2 * 32
    assert decode.roofline_seconds == pytest.approx((read + 64) / 1000)
    assert decode.temp_bytes == 2 * 2 * 16 * 4  # rows, heads, a tile of scores


def test_a_rectangles_workspace_grows_with_its_width():
    listed = by_name(prices(streamed=False))
    assert listed["decode 2x32"].temp_bytes == 2 * 2 * 32 * 4
    assert listed["decode 2x16"].temp_bytes == 2 * 2 * 16 * 4


def test_a_prefill_costs_what_is_worked_out_by_hand():
    prefill = by_name(prices())["prefill 32"]
    assert (prefill.kind, prefill.rows, prefill.width, prefill.tokens) == (
        "prefill",
        None,
        None,
        32,
    )
    # Three arrays of tokens, 3 offsets, and per segment what a row has but the token, and its row.
    sent = (4 * 32 + 3) * 4 + 2 * (ROW + BIAS + MASK)
    assert prefill.argument_bytes == WEIGHTS + POOL + STATE + sent
    assert prefill.traffic_bytes == (2 * 128 + 33 * 4 + 40) * 4 + 2 * 32 * 32
    assert prefill.temp_bytes is None


def test_the_permutation_reads_and_writes_the_state_alone():
    permute = by_name(prices())["permute"]
    assert permute.argument_bytes == STATE + 2 * 4
    assert permute.traffic_bytes == 2 * STATE


def test_writing_counts_takes_one_row_of_them():
    write = by_name(prices())["write_counts"]
    assert write.argument_bytes == STATE + 4 + 10 * 2
    assert write.traffic_bytes == 2 * 10 * 2


def test_the_compilers_workspace_replaces_the_model_and_sizes_the_total():
    compiled = all_of(FIGURES) | {32: replace(FIGURES, temp_bytes=4096)}
    listed = prices(compiled, target="a GPU")
    assert by_name(listed)["decode 2x32"].temp_bytes == 512
    assert listed.temp_bytes == 4096
    assert listed.compile_seconds == 5 * 2.0
    total = listed.as_dict()["total"]
    assert total["resident_bytes"] == WEIGHTS + POOL + STATE + 4096


def test_compile_seconds_are_null_without_a_compiler():
    listed = prices().as_dict()
    assert listed["total"]["compile_seconds"] is None
    assert {e["compile_seconds"] for e in listed["executables"]} == {None}


def test_an_executable_the_compiler_left_out_is_not_priced_as_if_it_had_not():
    with pytest.raises(KeyError):
        prices({"permute": FIGURES}, target="a GPU")


def test_the_json_has_the_published_keys_and_survives_a_round_trip():
    listed = prices(all_of(FIGURES), target="a GPU").as_dict()
    assert json.loads(json.dumps(listed)) == listed
    assert set(listed["capture"]) == {
        "count",
        "full_count",
        "trimmed",
        "max_rows",
        "max_width",
        "width_bound_by",
        "limit",
        "budget_bytes",
        "pool_bytes",
        "read_block",
    }
    assert listed["pool"]["full_length_requests"] == 2
    for entry in listed["executables"]:
        assert set(entry) == {
            "name",
            "kind",
            "rows",
            "width",
            "tokens",
            "compile_seconds",
            "temp_bytes",
            "argument_bytes",
            "traffic_bytes",
            "roofline_seconds",
            "compiled",
        }
        assert entry["compile_seconds"] == 2.0
        assert entry["compiled"]["launches"] == 7
        assert entry["compiled"]["kernels"] == [asdict(KERNEL)]


def test_the_output_says_which_figures_are_modelled_and_which_compiled():
    modelled, compiled = prices().basis, prices(target="a GPU").basis
    assert "--target" in modelled["compile_seconds"]
    assert modelled["temp_bytes"].startswith("modelled")
    assert compiled["temp_bytes"] == "from the compiler, for a GPU"
    assert modelled["traffic_bytes"].startswith("modelled")
    for basis in prices().basis.values():
        assert basis in prices().describe()


def test_the_text_names_the_pool_the_list_and_every_executable():
    text = prices().describe()
    assert "KV pool: 9 blocks of 8 tokens" in text
    assert "capture list: all 2 shapes" in text
    for name in by_name(prices()):
        assert name in text
    assert "total: 5 executables; " in text


def test_the_text_shows_registers_and_spills_of_hand_written_kernels_where_they_are_known():
    cases = {(KERNEL,): ["177", "12 B"], (): ["-", "-"], None: ["?", "?"]}
    for kernels, cells in cases.items():
        text = prices(all_of(replace(FIGURES, kernels=kernels)), target="a GPU").describe()
        (line,) = (x for x in text.splitlines() if "decode 2x32" in x)
        assert line.endswith("  ".join(c.rjust(w) for c, w in zip(cells, (9, 7), strict=True)))
