"""Each gate passes a sound boot and fires when exactly one thing of it is broken."""

from dataclasses import replace

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import AuditFailed, BootUnsound, CaptureTooSmall, ConfigError, NoExecutable
from jaxserve.plan.buckets import DecodeBuckets, DecodeShape
from jaxserve.plan.capture import plan_capture
from jaxserve.plan.gates import (
    DecodeRead,
    check_all_shapes_captured,
    check_boot_info,
    check_capture_limit,
    check_capture_matches_cache,
    check_capture_ready,
    check_read_matches,
    check_replays_dominate,
    check_switches,
    check_warm_before_serving,
)
from jaxserve.plan.pool import plan_kv_pool
from jaxserve.plan.report import boot_info, boot_lines

RECTANGLE = DecodeBuckets(16, 2048)
STREAMED = DecodeBuckets(16, 2048, streamed=True, tile=32)
PLAN = plan_capture(RECTANGLE, num_heads=32)
POOL = plan_kv_pool(EngineConfig(num_blocks=1025), 1024)
SWITCHES = ("bucket_decode", "persist_inputs", "capture_decode")


def switches(*on):
    return {name: name in on for name in SWITCHES}


@pytest.mark.parametrize("on", [(), SWITCHES, ("bucket_decode",), ("persist_inputs",)])
def test_none_all_or_one_of_the_harmless_switches_pass(on):
    assert check_switches(**switches(*on)) is None


@pytest.mark.parametrize("missing", SWITCHES)
def test_two_switches_out_of_three_are_refused_by_name(missing):
    on = [name for name in SWITCHES if name != missing]
    with pytest.raises(ConfigError, match=f"{on[0]} and {on[1]} without {missing}:"):
        check_switches(**switches(*on))


def test_a_capture_over_an_open_shape_set_is_refused():
    with pytest.raises(ConfigError, match="without bucket_decode and persist_inputs"):
        check_switches(**switches("capture_decode"))


@pytest.mark.parametrize(
    ("buckets", "read"), [(RECTANGLE, DecodeRead(None)), (STREAMED, DecodeRead(32))]
)
def test_buckets_of_the_read_that_runs_are_ready(buckets, read):
    check_read_matches(buckets, read)
    check_capture_ready(**switches(*SWITCHES), buckets=buckets, read=read)


@pytest.mark.parametrize(
    ("buckets", "read", "words"),
    [
        (STREAMED, DecodeRead(None), "gather 2048 keys a row.*--attention-backend streamed"),
        (RECTANGLE, DecodeRead(32), "80 shapes where 5 would do.*tile=32"),
        (STREAMED, DecodeRead(64), "tiles of 32 keys, the read walks tiles of 64"),
    ],
)
def test_buckets_of_another_read_refuse_the_boot(buckets, read, words):
    with pytest.raises(BootUnsound, match=words):
        check_read_matches(buckets, read)
    with pytest.raises(BootUnsound, match=words):
        check_capture_ready(**switches(*SWITCHES), buckets=buckets, read=read)


def test_a_capture_is_not_ready_with_a_switch_missing():
    with pytest.raises(ConfigError, match="persist_inputs"):
        check_capture_ready(
            **switches("bucket_decode", "capture_decode"),
            buckets=RECTANGLE,
            read=DecodeRead(None),
        )


def test_a_list_that_nothing_would_run_is_not_ready():
    with pytest.raises(BootUnsound, match="capture_decode off"):
        check_capture_ready(**switches(), buckets=RECTANGLE, read=DecodeRead(None))


def test_warming_is_refused_only_while_serving():
    check_warm_before_serving(serving=False)
    with pytest.raises(BootUnsound, match="warm first"):
        check_warm_before_serving(serving=True)


def test_a_list_planned_from_the_caches_buckets_matches():
    check_capture_matches_cache(PLAN, RECTANGLE)
    check_capture_matches_cache(plan_capture(STREAMED, num_heads=32), STREAMED)


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (DecodeBuckets(16, 1024), "shapes are no bucket of the cache, e.g. 1 rows x 1152"),
        (DecodeBuckets(8, 2048), "e.g. 16 rows x 128"),
        (DecodeBuckets(32, 2048), "out of 80 shapes, the cache has 96"),
        (DecodeBuckets(16, 4096), "out of 80 shapes, the cache has 160"),
    ],
)
def test_a_list_planned_for_another_cache_is_refused(cache, words):
    with pytest.raises(BootUnsound, match=words):
        check_capture_matches_cache(PLAN, cache)


def test_a_list_priced_in_another_tile_is_refused():
    other_tile = replace(plan_capture(STREAMED, num_heads=32), tile=64)
    with pytest.raises(BootUnsound, match="tile 64, the cache reads with tile 32"):
        check_capture_matches_cache(other_tile, STREAMED)


def test_a_list_of_exactly_the_limit_passes_and_one_more_is_refused():
    check_capture_limit(PLAN, PLAN.count)
    with pytest.raises(CaptureTooSmall, match="60 shapes, and the process holds 59"):
        check_capture_limit(PLAN, PLAN.count - 1)


def test_an_honest_payload_passes_warm_and_cold():
    warm = boot_info(POOL, PLAN, PLAN.shapes)
    assert warm["capture"]["warm"] is True
    check_boot_info(warm, PLAN, PLAN.shapes)
    cold = boot_info(POOL, PLAN, PLAN.shapes[1:])
    assert cold["capture"]["warm"] is False
    check_boot_info(cold, PLAN, PLAN.shapes[1:])


def test_a_payload_that_says_warm_while_one_shape_is_cold_is_refused():
    info = boot_info(POOL, PLAN, PLAN.shapes)
    with pytest.raises(BootUnsound, match=r"1 of 60 shapes are cold, e.g. 16 rows x 1536"):
        check_boot_info(info, PLAN, PLAN.shapes[:-1])


@pytest.mark.parametrize("key", list(PLAN.as_dict()))
def test_a_payload_that_tells_another_decision_is_refused(key):
    info = boot_info(POOL, PLAN, PLAN.shapes)
    info["capture"][key] = "altered"
    with pytest.raises(BootUnsound, match=f"capture.{key}='altered'"):
        check_boot_info(info, PLAN, PLAN.shapes)
    del info["capture"][key]
    with pytest.raises(BootUnsound, match=f"capture.{key}=None"):
        check_boot_info(info, PLAN, PLAN.shapes)


def test_a_payload_with_the_decision_flattened_is_refused():
    info = boot_info(POOL, PLAN, PLAN.shapes)
    flat = {"pool": info["pool"]} | info["capture"]
    with pytest.raises(BootUnsound, match="without a capture section, and 60 shapes planned"):
        check_boot_info(flat, PLAN, PLAN.shapes)


def test_one_planned_shape_without_an_executable_is_found():
    extra = DecodeShape(16, 2048)
    check_all_shapes_captured(PLAN, {*PLAN.shapes, extra})
    with pytest.raises(
        NoExecutable, match=r"1 of 60 planned shapes have no executable, e.g. 1 row"
    ):
        check_all_shapes_captured(PLAN, {*PLAN.shapes[1:], extra})


def test_replays_dominate_until_they_do_not():
    check_replays_dominate(replays=0, late_compiles=0, fall_throughs=0)
    check_replays_dominate(replays=11, late_compiles=5, fall_throughs=5)
    for late, fell in ((6, 5), (5, 6)):
        with pytest.raises(AuditFailed, match=f"11 decode steps.*{late} late compiles, {fell} "):
            check_replays_dominate(replays=11, late_compiles=late, fall_throughs=fell)


def test_a_payload_nests_both_decisions():
    info = boot_info(POOL, PLAN, PLAN.shapes[:7])
    assert set(info) == {"pool", "capture"}
    assert info["pool"] == POOL.as_dict()
    assert info["capture"] == PLAN.as_dict() | {"ready": 7, "warm": False}


def test_the_boot_prints_one_line_for_the_pool_and_one_that_names_who_bound_the_width():
    pool_line, list_line = boot_lines(POOL, PLAN)
    assert pool_line.startswith("KV pool: 1025 blocks")
    assert list_line.startswith("capture list: 60 of 80 shapes")
    assert "width bound by limit" in list_line
    assert "\n" not in pool_line + list_line


def test_the_line_of_a_streamed_list_names_the_read_and_its_tile():
    line = boot_lines(POOL, plan_capture(STREAMED, num_heads=32))[1]
    assert "all 5 shapes" in line
    assert "width bound by read), 32-key tiles" in line
