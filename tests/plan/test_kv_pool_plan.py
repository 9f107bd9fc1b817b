import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.errors import ConfigError, PoolTooSmall
from jaxserve.plan.pool import (
    FREE_MEMORY_JITTER,
    DeviceMemory,
    check_asked_size,
    grid_step,
    kv_budget_bytes,
    kv_bytes_per_block,
    plan_kv_pool,
    utilization_for,
)
from jaxserve.plan.units import GIB, MIB

SMALL = EngineConfig(max_model_len=2048, max_num_seqs=8, block_size=16)  # 128 blocks a request
BLOCK_BYTES = 360 * 1024
CARD = DeviceMemory(
    total_bytes=80 * GIB,
    weight_bytes=16 * GIB,
    workspace_bytes=GIB,
    reserve_bytes=GIB // 2,
)
GQA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
)

block_bytes = st.integers(1, 4 * MIB)
steady_budgets = st.integers(2 * GIB, 200 * GIB)  # 20 * jitter + 21 * 4 MiB is below 2 GiB


def plan_on_budget(budget, bytes_per_block, previous=None, config=SMALL):
    card = DeviceMemory(total_bytes=budget, weight_bytes=0, workspace_bytes=0, reserve_bytes=0)
    return plan_kv_pool(
        replace(config, gpu_memory_utilization=1.0),
        bytes_per_block,
        device=card,
        previous_num_blocks=previous,
    )


def test_a_block_is_priced_over_kv_heads():
    keys_of_one_token = 3 * 64
    assert kv_bytes_per_block(GQA, 16, "float32") == 2 * 30 * 16 * keys_of_one_token * 4
    assert kv_bytes_per_block(GQA, 32, "bfloat16") == kv_bytes_per_block(GQA, 16, "float32")


def test_more_query_heads_do_not_make_a_block_larger():
    more = replace(GQA, num_heads=36)
    assert kv_bytes_per_block(more, 16, "bfloat16") == kv_bytes_per_block(GQA, 16, "bfloat16")


def test_the_share_covers_weights_workspace_reserve_and_pool():
    assert kv_budget_bytes(CARD, 0.5) == 40 * GIB - 16 * GIB - GIB - GIB // 2


def test_a_neighbour_lowers_the_budget_only_once_the_share_no_longer_fits_beside_it():
    neighbour_of_30 = replace(CARD, free_bytes=80 * GIB - 16 * GIB - 30 * GIB)
    assert neighbour_of_30.foreign_bytes == 30 * GIB
    assert kv_budget_bytes(neighbour_of_30, 0.5) == kv_budget_bytes(CARD, 0.5)
    assert kv_budget_bytes(neighbour_of_30, 0.9) == 34 * GIB - GIB - GIB // 2


@given(st.floats(0.05, 1.0), block_bytes)
def test_the_whole_process_keeps_to_its_share(utilization, bytes_per_block):
    config = replace(SMALL, gpu_memory_utilization=utilization)
    least = (config.blocks_per_row + 1) * bytes_per_block
    assume(kv_budget_bytes(CARD, utilization) >= least)
    plan = plan_kv_pool(config, bytes_per_block, device=CARD)
    process = CARD.weight_bytes + CARD.workspace_bytes + CARD.reserve_bytes + plan.pool_bytes
    assert process <= utilization * CARD.total_bytes
    assert plan.sized_by == "budget"


@given(st.integers(1, 100 * GIB), block_bytes)
def test_rounding_costs_a_thirtysecond_and_the_jitter_at_most(budget, bytes_per_block):
    fits = budget // bytes_per_block
    assume(fits > SMALL.blocks_per_row)
    plan = plan_on_budget(budget, bytes_per_block)
    lost = fits - plan.num_blocks
    assert 0 <= lost <= fits / 32 + FREE_MEMORY_JITTER / bytes_per_block + 1


@given(steady_budgets, block_bytes, st.integers(0, FREE_MEMORY_JITTER))
def test_more_memory_never_plans_a_smaller_pool(budget, bytes_per_block, more):
    before = plan_on_budget(budget, bytes_per_block)
    assert plan_on_budget(budget + more, bytes_per_block).num_blocks >= before.num_blocks


@given(steady_budgets, block_bytes, st.integers(-FREE_MEMORY_JITTER, FREE_MEMORY_JITTER))
def test_a_second_boot_within_the_jitter_keeps_the_first_ones_count(budget, block, drift):
    first = plan_on_budget(budget, block)
    second = plan_on_budget(budget + drift, block, previous=first.num_blocks)
    assert second.num_blocks == first.num_blocks
    assert second.sized_by == "previous"
    assert second.pool_bytes <= budget + drift


def test_two_boots_50_mb_apart_nearly_always_agree_even_without_a_previous_count():
    """Over an evenly drifting reading the miss rate is the distance over the grid, in bytes."""
    block = 128 * 1024
    readings = range(60 * GIB, 70 * GIB, 7 * MIB)
    apart = 50 * 10**6
    misses = sum(
        plan_on_budget(b, block).num_blocks != plan_on_budget(b + apart, block).num_blocks
        for b in readings
    )
    step_bytes = grid_step(60 * GIB // block) * block
    assert 0 < misses / len(readings) <= 1.5 * apart / step_bytes < 0.08


def test_a_grid_edge_between_two_readings_is_what_the_previous_count_is_for():
    block, step = MIB, grid_step(40_000)
    edge = 40 * step * block + FREE_MEMORY_JITTER
    below, above = plan_on_budget(edge - 1, block), plan_on_budget(edge, block)
    assert above.num_blocks - below.num_blocks == step
    assert plan_on_budget(edge - 1, block, previous=above.num_blocks) == replace(
        above, sized_by="previous", budget_bytes=edge - 1
    )


def test_a_previous_count_that_no_longer_fits_is_dropped():
    plan = plan_on_budget(10 * GIB, MIB, previous=10 * 1024 + 1)
    assert plan == plan_on_budget(10 * GIB, MIB)


def test_a_previous_count_that_would_waste_more_than_an_eighth_is_dropped():
    assert plan_on_budget(8 * GIB, MIB, previous=7 * 1024).num_blocks == 7 * 1024
    assert plan_on_budget(8 * GIB, MIB, previous=7 * 1024 - 1) == plan_on_budget(8 * GIB, MIB)


@pytest.mark.parametrize(("blocks", "step"), [(1, 1), (63, 1), (64, 2), (1000, 16), (4096, 128)])
def test_the_grid_is_a_power_of_two_of_at_most_a_thirtysecond(blocks, step):
    assert grid_step(blocks) == step


def test_rounding_never_refuses_what_fits():
    exactly_one_request = 129 * BLOCK_BYTES
    plan = plan_on_budget(exactly_one_request, BLOCK_BYTES)
    assert (plan.num_blocks, plan.full_length_requests) == (129, 1)


def test_a_host_plans_full_length_requests_and_the_null_block():
    plan = plan_kv_pool(SMALL, BLOCK_BYTES, host_bytes=64 * GIB)
    assert plan.num_blocks == 8 * 128 + 1
    assert plan.capacity_tokens == 8 * 2048
    assert (plan.full_length_requests, plan.sized_by) == (8, "requests")


def test_a_small_host_plans_what_it_has():
    plan = plan_kv_pool(SMALL, BLOCK_BYTES, host_bytes=300 * MIB)
    assert 129 < plan.num_blocks < 8 * 128 + 1
    assert plan.pool_bytes <= 300 * MIB
    assert plan.sized_by == "budget"


def test_a_given_count_and_given_bytes_are_taken_exactly_and_in_that_order():
    both = replace(SMALL, num_blocks=777, kv_cache_memory_bytes=GIB)
    plan = plan_kv_pool(both, BLOCK_BYTES, device=CARD)
    assert (plan.num_blocks, plan.sized_by, plan.budget_bytes) == (777, "num_blocks", None)
    plan = plan_kv_pool(replace(both, num_blocks=None), BLOCK_BYTES, device=CARD)
    assert (plan.num_blocks, plan.sized_by) == (GIB // BLOCK_BYTES, "kv_cache_memory_bytes")


def test_a_given_size_needs_no_probe_and_no_size_needs_one():
    assert plan_kv_pool(replace(SMALL, num_blocks=200), BLOCK_BYTES).num_blocks == 200
    with pytest.raises(ValueError, match="device, host_bytes or a size"):
        plan_kv_pool(SMALL, BLOCK_BYTES)


def test_the_record_and_its_line_say_what_was_decided():
    plan = plan_kv_pool(replace(SMALL, num_blocks=257), BLOCK_BYTES)
    assert plan.as_dict() == {
        "num_blocks": 257,
        "block_size": 16,
        "bytes_per_block": BLOCK_BYTES,
        "max_model_len": 2048,
        "sized_by": "num_blocks",
        "budget_bytes": None,
        "pool_bytes": 257 * BLOCK_BYTES,
        "capacity_tokens": 4096,
        "full_length_requests": 2,
    }
    line = plan.describe()
    assert "257 blocks of 16 tokens" in line
    assert "4096 tokens (2 full-length requests of 2048)" in line


def refusal(config, bytes_per_block=BLOCK_BYTES, **memory):
    with pytest.raises(PoolTooSmall) as caught:
        plan_kv_pool(config, bytes_per_block, **memory)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "knob"),
    [
        ({"num_blocks": 101}, "--num-gpu-blocks-override 129"),
        (
            {"kv_cache_memory_bytes": 101 * BLOCK_BYTES},
            f"--kv-cache-memory-bytes {129 * BLOCK_BYTES}",
        ),
    ],
)
def test_a_given_size_that_is_too_small_names_the_size_and_the_length_that_work(fields, knob):
    text = refusal(replace(SMALL, **fields))
    assert "101 blocks" in text
    assert "needs 129 with the null block" in text
    assert "--max-model-len 1600 would fit" in text
    assert knob in text
    shorter = replace(SMALL, max_model_len=1600, **fields)
    assert plan_kv_pool(shorter, BLOCK_BYTES).full_length_requests == 1


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"num_blocks": 1},
            "--num-gpu-blocks-override 1: 1 blocks of 16 tokens, and one request of 2048 tokens "
            "needs 129 with the null block; no length would fit: use --num-gpu-blocks-override 129",
        ),
        (
            {"kv_cache_memory_bytes": 1000},
            "--kv-cache-memory-bytes 1000: 0 blocks of 16 tokens, and one request of 2048 tokens "
            "needs 129 with the null block; no length would fit: use --kv-cache-memory-bytes "
            f"{129 * BLOCK_BYTES}",
        ),
    ],
)
def test_a_given_size_that_holds_no_request_at_all_reads_as_one_sentence(fields, line):
    assert refusal(replace(SMALL, **fields)) == line


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("num_blocks", "--num-gpu-blocks-override"),
        ("kv_cache_memory_bytes", "--kv-cache-memory-bytes"),
    ],
)
@pytest.mark.parametrize("value", [0, -5])
def test_a_size_below_one_is_refused_as_it_was_typed(field, flag, value):
    with pytest.raises(ConfigError, match=f"{flag} {value}: must be at least 1"):
        replace(SMALL, **{field: value})


def check_asked(config, available, advised=None):
    check_asked_size(
        config,
        BLOCK_BYTES,
        available_bytes=available,
        advised_bytes=available if advised is None else advised,
        where="this host",
    )


@given(st.integers(129, 10**6), st.integers(0, 1), st.booleans())
def test_a_given_size_passes_up_to_what_is_there_and_the_advised_one_passes(blocks, over, by_bytes):
    available = blocks * BLOCK_BYTES
    given_bytes = available + over * (1 if by_bytes else BLOCK_BYTES)
    config = (
        replace(SMALL, kv_cache_memory_bytes=given_bytes)
        if by_bytes
        else replace(SMALL, num_blocks=given_bytes // BLOCK_BYTES)
    )
    if not over:
        check_asked(config, available)
        return
    with pytest.raises(ConfigError) as refused:
        check_asked(config, available)
    named = re.search(r"use --[a-z-]+ (\d+) or less", str(refused.value))
    assert named is not None
    field = "kv_cache_memory_bytes" if by_bytes else "num_blocks"
    fitting = replace(config, **{field: int(named.group(1))})
    check_asked(fitting, available)
    assert plan_kv_pool(fitting, BLOCK_BYTES).num_blocks == blocks


def test_a_given_size_larger_than_memory_names_both_sizes_and_one_that_fits():
    with pytest.raises(ConfigError) as refused:
        check_asked(replace(SMALL, kv_cache_memory_bytes=70 * GIB), 20 * GIB, 10 * GIB)
    assert str(refused.value) == (
        f"--kv-cache-memory-bytes {70 * GIB}: a KV pool of 70.00 GiB, and this host has 20.00 GiB "
        f"beside the weights; use --kv-cache-memory-bytes {10 * GIB // BLOCK_BYTES * BLOCK_BYTES} "
        "or less"
    )


def test_a_given_size_where_no_request_fits_says_so():
    with pytest.raises(ConfigError, match=r"has 0 B beside the weights; one request of 2048 .*45"):
        check_asked(replace(SMALL, num_blocks=6_000_000_000), -GIB)


def test_a_size_that_no_flag_gave_is_not_refused():
    check_asked(SMALL, -GIB)


@given(st.integers(0, 128), st.integers(1, 100))
def test_the_length_a_refusal_names_is_the_longest_that_boots(blocks, block_size_kib):
    block = block_size_kib * 1024
    text = refusal(SMALL, block, host_bytes=blocks * block)
    named = re.search(r"--max-model-len (\d+) would fit", text)
    if named is None:
        assert blocks < 2
        assert "no length would fit" in text
        return
    length = int(named.group(1))
    fitting = replace(SMALL, max_model_len=length)
    assert plan_kv_pool(fitting, block, host_bytes=blocks * block).full_length_requests == 1
    refusal(replace(SMALL, max_model_len=length + 1), block, host_bytes=blocks * block)


@given(st.integers(18, 80), st.integers(1, 300 * MIB))
def test_the_utilization_a_refusal_names_boots_and_a_hundredth_less_does_not(total_gib, block):
    card = replace(CARD, total_bytes=total_gib * GIB)
    need = 129 * block
    enough = utilization_for(card, need)
    if enough is None:
        assert kv_budget_bytes(card, 1.0) < need
        return
    config = replace(SMALL, gpu_memory_utilization=enough)
    assert plan_kv_pool(config, block, device=card).full_length_requests >= 1
    less = replace(SMALL, gpu_memory_utilization=max(0.001, enough - 0.0101))
    assert f"--gpu-memory-utilization {enough} would boot" in refusal(less, block, device=card)


def test_a_refusal_on_a_device_says_who_holds_what():
    crowded = replace(CARD, free_bytes=GIB)
    text = refusal(SMALL, device=crowded)
    assert "no length would fit" in text
    assert "Of 80.00 GiB on the device, weights take 16.00 GiB" in text
    assert "others 63.00 GiB" in text
    assert "no --gpu-memory-utilization would boot" in text
