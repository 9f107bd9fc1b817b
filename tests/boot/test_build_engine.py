"""A boot: what it compiles, keeps, refuses and says, on a tiny model."""

import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxserve import boot as boot_module
from jaxserve.boot import build_engine, resolve
from jaxserve.checkpoint.load import Checkpoint
from jaxserve.config import BootConfig, EngineConfig, SamplingParams
from jaxserve.errors import BootError, BootUnsound, CaptureTooSmall, ConfigError, NoExecutable
from jaxserve.plan.buckets import DecodeBuckets, DecodeShape, PrefillBuckets
from jaxserve.plan.capture import plan_capture
from jaxserve.runtime import booted as booted_module
from jaxserve.runtime import sizing, warmup
from jaxserve.runtime.compile_cache import CompileCache
from jaxserve.runtime.compiler import StepCompiler
from jaxserve.runtime.engine import Engine
from jaxserve.runtime.executables import Built, record
from jaxserve.runtime.laps import boot_seconds_line
from jaxserve.runtime.warmup import warm_engine
from tests.golden.weights import draw_tensors
from tests.models import TINY

ROOT = Path(__file__).parents[2]
MODEL = replace(TINY, eos_token_ids=(7,), max_position_embeddings=2048)


class Weights:
    """The checkpoint's tensors, all from one formula: nothing to compile, nothing to read."""

    def __init__(self):
        config = {
            "vocab_size": MODEL.vocab_size,
            "hidden_size": MODEL.hidden_size,
            "intermediate_size": MODEL.intermediate_size,
            "num_hidden_layers": MODEL.num_layers,
            "num_attention_heads": MODEL.num_heads,
            "num_key_value_heads": MODEL.num_kv_heads,
            "head_dim": MODEL.head_dim,
            "tie_word_embeddings": True,
            "architectures": ["LlamaForCausalLM"],
        }
        self._tensors = draw_tensors(config)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def get(self, name):
        return self._tensors[name]


CHECKPOINT = Checkpoint(name="tiny", config=MODEL, tokenizer=None, tensors=Weights())
CONFIG = EngineConfig(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32, block_size=8)
NAMES = ["permute", "write_counts", "decode 1x64", "decode 2x64", "prefill 32"]
MIB = 2**20
GIB = 2**30


def must_not_compile(name, lower):
    raise AssertionError(f"{name} was compiled")


class Boot:
    """One boot: the engine, its lines, and what its recorder was asked for."""

    def __init__(self, config=CONFIG, boot=None, recorder=record, **changes):
        self.lines: list[str] = []
        self.recorded: list[str] = []

        def recording(name, lower):
            self.recorded.append(name)
            return recorder(name, lower)

        start = time.perf_counter()
        self.booted = build_engine(
            CHECKPOINT,
            config,
            boot,
            capture_recorder=recording,
            report=self.lines.append,
            **changes,
        )
        self.wall_s = time.perf_counter() - start

    def answer(self, prompts, **params):
        """Every prompt's tokens."""
        engine = self.booted.engine
        settings = SamplingParams(**{"max_tokens": 6, "temperature": 0.0} | params)
        tokens = {f"r{i}": [] for i in range(len(prompts))}
        for name, prompt in zip(tokens, prompts, strict=True):
            engine.add_request(name, prompt, settings)
        while engine.has_unfinished_requests():
            for update in engine.step():
                tokens[update.request_id] += update.new_token_ids
        return list(tokens.values())

    def info(self):
        return self.booted.info(self.booted.engine.stats())


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache") / "executables"


@pytest.fixture(scope="module")
def first(cache_dir):
    return Boot(boot=BootConfig(compile_cache_dir=cache_dir))


@pytest.fixture(scope="module")
def second(first, cache_dir):
    return Boot(boot=BootConfig(compile_cache_dir=cache_dir), recorder=must_not_compile)


@pytest.fixture
def boot_again(first, cache_dir):
    """Boots out of the cache that ``first`` filled."""

    def boot(config=CONFIG, **changes):
        return Boot(config, BootConfig(compile_cache_dir=cache_dir, **changes))

    return boot


PROMPTS = [[5, 6, 7, 8], [90, 3], [11] * 20]


def test_every_step_is_compiled_and_run_before_the_first_request(first):
    assert sorted(first.recorded) == sorted(NAMES)
    assert [b.name for b in first.booted.executables.all] == NAMES
    stats = first.booted.executable_stats()
    assert (stats.planned, stats.compiles_after_ready) == (5, 0)
    assert stats.compile_seconds > 0
    assert first.info()["executables"]["ready"] == 5
    assert first.info()["capture"]["warm"] is True


def test_a_second_boot_compiles_nothing_and_answers_the_same(first, second):
    assert second.recorded == []
    assert [b.cache for b in second.booted.executables.all] == ["hit"] * 5
    assert second.answer(PROMPTS) == first.answer(PROMPTS)


def test_no_kind_of_request_compiles_anything_after_the_boot(second):
    before = second.booted.engine.stats()
    for params in (
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.5, "min_p": 0.1, "seed": 5},
        {"stop_token_ids": (1, 2, 3)},
        {"ignore_eos": True, "max_tokens": 40},
    ):
        second.answer(PROMPTS, **params)
    info = second.info()
    assert second.recorded == []
    assert info["executables"]["compiles_after_ready"] == 0
    capture = info["capture"]
    assert capture["late_compiles"] == []
    assert capture["fall_throughs"] == 0
    assert capture["checks"] == {"all_shapes_captured": "ok", "replays_dominate": "ok"}
    stats = second.booted.engine.stats()
    assert capture["replays"] == {f"{s.rows}x{s.width}": n for s, n in stats.shape_replays.items()}
    assert sum(capture["replays"].values()) > sum(before.shape_replays.values())
    assert (capture["read"], capture["read_block"]) == ("streamed", capture["read_block"])
    assert capture["padded_cells"] == stats.padded_cells > 0


def test_a_step_outside_the_list_is_refused_and_not_compiled(second):
    with pytest.raises(NoExecutable, match="decode 3x64 was not compiled; there are permute"):
        second.booted.executables.decode_for(DecodeShape(3, 64))


def test_each_executable_is_one_line_with_its_price_and_where_it_came_from(first, second):
    pattern = r"\d of 5 executables: (.+): [\d.]+ (?:us|ms|s), temp [\d.]+ [KM]?i?B, cache (.+)"
    for boot, cache in ((first, "miss: not compiled before"), (second, "hit")):
        found = [m.groups() for line in boot.lines if (m := re.fullmatch(pattern, line))]
        assert sorted(found) == sorted((name, cache) for name in NAMES)
    assert sum(line.startswith("KV pool: ") for line in first.lines) == 1
    assert sum(line.startswith("capture list: all 2 shapes") for line in first.lines) == 1


def test_a_boot_says_what_it_will_compile_and_where_the_next_one_finds_it(first, second, cache_dir):
    (said,) = [line for line in first.lines if line.startswith("compiling ")]
    assert said == (
        f"compiling 5 of 5 executables, once: the next boot loads them from {cache_dir}"
    )
    assert f"loading 5 executables from {cache_dir}" in second.lines
    assert second.lines.index(f"loading 5 executables from {cache_dir}") < min(
        i for i, line in enumerate(second.lines) if " of 5 executables: " in line
    )


def test_a_boot_that_keeps_nothing_promises_nothing(first, tmp_path):
    compiler = StepCompiler(
        shapes=sizing.step_shapes(MODEL, first.booted.config, (DecodeShape(1, 64),), 9, "cpu"),
        platform="cpu",
    )
    assert compiler.forecast() == "compiling 4 executables"
    file = tmp_path / "file"
    file.write_text("")
    unusable = replace(compiler, cache=CompileCache(file))
    assert unusable.forecast() == "compiling 4 of 4 executables"


def test_a_miss_names_what_changed(boot_again):
    boot = boot_again(replace(CONFIG, num_blocks=30))
    assert {b.cache for b in boot.booted.executables.all} == {"miss: changed: num_blocks"}


def test_every_second_of_a_boot_has_a_phase(first, second):
    for boot in (first, second):
        seconds = boot.booted.seconds
        phases = ["weights", "plan", "trace", "compile", "load", "store", "pool", "warm"]
        assert list(seconds) == phases
        # Some milliseconds lie outside: building the engine and checking its report.
        assert sum(seconds.values()) == pytest.approx(boot.wall_s, rel=0.05, abs=0.2)
    assert first.booted.seconds["compile"] > 0
    assert second.booted.seconds["trace"] == second.booted.seconds["compile"] == 0
    assert second.booted.seconds["load"] > 0
    assert boot_seconds_line({"trace": 1.5, "load": 0.25}) == (
        "booted in 1.75 s: trace 1.50 s, load 250.0 ms"
    )


def test_a_boot_killed_while_it_compiles_is_followed_by_one_that_takes_what_was_done(tmp_path):
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "kernels")!r}]
from tests.boot.test_build_engine import CHECKPOINT, CONFIG, BootConfig, Path, build_engine
boot = BootConfig(compile_cache_dir=Path({str(tmp_path / "cache")!r}))
build_engine(CHECKPOINT, CONFIG, boot, report=lambda line: print(line, flush=True))
"""

    def start():
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)

    with start() as killed:
        assert killed.stdout is not None
        for line in killed.stdout:
            if line.startswith("1 of 5 executables: "):
                killed.send_signal(signal.SIGKILL)
                break
    assert killed.returncode == -signal.SIGKILL
    with start() as again:
        assert again.stdout is not None
        lines = [line for line in again.stdout if " of 5 executables: " in line]
    assert again.returncode == 0
    assert len(lines) == 5
    assert sum(line.endswith("cache hit\n") for line in lines) >= 1


# Sizes. The recorder is a fake: what it gives is never run.


@pytest.fixture(scope="module")
def trivial():
    return jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((1,), jnp.float32)).compile()


def planned(trivial, free_bytes, cache=None, temp_bytes=1000, used=()):
    """The sizes planned on a device of 20 GiB, a tenth kept back, with so many bytes free."""
    recorded = list(used)

    def recorder(name, lower):
        recorded.append(name)
        return Built(name, trivial, 0.0, 0.0, temp_bytes)

    config = replace(CONFIG, dtype="float32", attention_backend="streamed")
    limit = int(20 * GIB * config.gpu_memory_utilization)
    compiler = StepCompiler(
        shapes=sizing.step_shapes(MODEL, config, (), 9, "cpu"),
        platform="cpu",
        cache=cache,
        recorder=recorder,
    )
    sizes = sizing.plan_sizes(
        MODEL,
        config,
        BootConfig(),
        sizing.decode_buckets(config),
        compiler,
        {"bytes_limit": limit, "bytes_in_use": limit - free_bytes},
    )
    return sizes, recorded


class Unread:
    """A checkpoint's tensors that nobody may ask for."""

    shapes = Weights().shapes

    def get(self, name):
        raise AssertionError(f"{name} was read")


@pytest.mark.parametrize(
    ("config", "boot", "said"),
    [
        ({"num_blocks": 3}, {}, r"--num-gpu-blocks-override 3: .* use --num-gpu-blocks-override 9"),
        ({"kv_cache_memory_bytes": 9}, {}, r"--kv-cache-memory-bytes 9: 0 blocks"),
        ({"num_blocks": 6 * 10**9}, {}, r"this host has .* use --num-gpu-blocks-override \d+ or"),
        ({"kv_cache_memory_bytes": 10**14}, {}, r"93132.26 GiB, and this host has .* or less"),
        ({}, {"warm_rows": 1}, "--allow-late-compile"),
    ],
)
def test_what_the_flags_alone_rule_out_is_refused_before_a_weight_is_read(config, boot, said):
    with pytest.raises(BootError, match=said) as refused:
        build_engine(
            replace(CHECKPOINT, tensors=Unread()),
            replace(CONFIG, **config),
            BootConfig(**boot),
            capture_recorder=must_not_compile,
        )
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("memory", "where"),
    [(None, "this host"), ({"bytes_limit": 9 * MIB, "bytes_in_use": MIB}, "the device")],
)
def test_weights_larger_than_the_memory_are_refused_before_one_is_read(monkeypatch, memory, where):
    monkeypatch.setattr(sizing, "physical_bytes", lambda: 8 * MIB)
    told = rf"weights and a reserve of .* do not fit the 8.00 MiB that {where} has; use a smaller"
    with pytest.raises(ConfigError, match=told):
        build_engine(
            replace(CHECKPOINT, tensors=Unread()),
            replace(CONFIG, num_blocks=9),
            capture_recorder=must_not_compile,
            memory_stats=lambda: memory,
        )


def test_weights_that_are_on_the_device_already_are_not_counted_twice():
    def check(weights_placed):
        sizing.check_asked_sizes(
            MODEL,
            resolve(CONFIG, MODEL, "cpu"),
            BootConfig(),
            sizing.decode_buckets(CONFIG),
            {"bytes_limit": 2 * sizing.RESERVE_BYTES, "bytes_in_use": sizing.RESERVE_BYTES},
            weights_placed=weights_placed,
        )

    check(weights_placed=True)
    with pytest.raises(ConfigError, match="do not fit"):
        check(weights_placed=False)


def test_a_pool_larger_than_the_device_is_refused_before_a_weight_is_read():
    with pytest.raises(ConfigError, match=r"a KV pool of 70.00 GiB, and the device has 1\d\.\d"):
        build_engine(
            replace(CHECKPOINT, tensors=Unread()),
            replace(CONFIG, kv_cache_memory_bytes=70 * GIB),
            capture_recorder=must_not_compile,
            memory_stats=lambda: {"bytes_limit": 18 * GIB, "bytes_in_use": 2 * GIB},
        )


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9\nmore"),
        MemoryError(),
    ],
)
def test_a_pool_that_cannot_be_allocated_ends_the_boot_in_one_line(boot_again, monkeypatch, error):
    def full(*given, **options):
        raise error

    monkeypatch.setattr(warmup, "ModelRunner", full)
    with pytest.raises(BootError, match=r"allocating a KV pool of .*--num-gpu-blocks") as refused:
        boot_again()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("phase", "told"),
    [
        ("place_params", r"placing .* of weights: .*; use a smaller model"),
        ("warm_engine", r"warming 5 executables beside a KV pool of .*--num-gpu-blocks"),
    ],
)
def test_a_device_that_fills_up_later_ends_the_boot_in_one_line_too(
    boot_again, monkeypatch, phase, told
):
    def full(*given, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9\nmore")

    monkeypatch.setattr(boot_module, phase, full)
    with pytest.raises(BootError, match=told) as refused:
        boot_again()
    assert "\n" not in str(refused.value)


def test_another_fault_while_the_pool_is_allocated_is_not_taken_for_a_full_memory(
    boot_again, monkeypatch
):
    def broken(*given, **options):
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    monkeypatch.setattr(warmup, "ModelRunner", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        boot_again()


def test_the_pool_is_sized_by_what_the_compiled_steps_leave(trivial):
    small, recorded = planned(trivial, 15 * GIB, temp_bytes=0)
    large, _ = planned(trivial, 15 * GIB, temp_bytes=2 * GIB)
    assert recorded == ["decode 2x64", "prefill 32"]  # the most rows and the most tokens
    assert small.pool.budget_bytes - large.pool.budget_bytes == 2 * GIB
    assert large.pool.pool_bytes + 2 * GIB + sizing.RESERVE_BYTES <= 15 * GIB
    assert large.compiler.shapes.num_blocks == large.pool.num_blocks


def test_two_boots_fifty_megabytes_apart_compile_for_one_pool(trivial, tmp_path):
    cache = CompileCache(tmp_path)
    sizes, _ = planned(trivial, 15 * GIB, cache)
    for key in (*sizes.compiler.shapes.decode, 32, "permute", "write_counts"):
        sizes.compiler.build(key)
    for apart in (-50_000_000, 50_000_000):
        again, recorded = planned(trivial, 15 * GIB + apart, cache)
        assert recorded == []  # the workspace is known too
        assert again.pool.sized_by == "previous"
        assert again.compiler.shapes == sizes.compiler.shapes
    far, _ = planned(trivial, 10 * GIB, cache)
    assert far.pool.num_blocks != sizes.pool.num_blocks


def test_executables_that_need_more_than_the_plan_left_end_the_boot(first):
    executables = first.booted.executables
    sizing.check_workspace(None, executables)
    sizing.check_workspace(executables.temp_bytes - sizing.RESERVE_BYTES, executables)
    with pytest.raises(BootUnsound, match="gpu-memory-utilization"):
        sizing.check_workspace(executables.temp_bytes - sizing.RESERVE_BYTES - 1, executables)


# Switches.

TWO_OF_THREE = [
    ("bucket_decode", "persist_inputs and capture_decode without bucket_decode"),
    ("persist_inputs", "bucket_decode and capture_decode without persist_inputs"),
    ("capture_decode", "bucket_decode and persist_inputs without capture_decode"),
]


@pytest.mark.parametrize(("off", "said"), TWO_OF_THREE)
def test_two_switches_out_of_three_are_refused_by_name_before_anything_is_loaded(off, said):
    with pytest.raises(ConfigError, match=said):
        build_engine(CHECKPOINT, replace(CONFIG, **{off: False}), capture_recorder=must_not_compile)


@pytest.mark.parametrize(("off", "said"), TWO_OF_THREE)
def test_an_engine_cannot_be_made_with_two_switches_out_of_three(first, off, said):
    with pytest.raises(ConfigError, match=said):
        Engine(
            MODEL,
            replace(CONFIG, **{off: False}),
            first.booted.runner,
            num_blocks=20,
            decode_buckets=DecodeBuckets(2, 64),
            prefill_buckets=PrefillBuckets(32),
        )


def test_without_the_switches_each_exact_shape_is_compiled_when_it_is_first_met(second):
    config = replace(
        CONFIG,
        bucket_decode=False,
        persist_inputs=False,
        capture_decode=False,
        attention_backend="rectangle",
    )
    boot = Boot(config)
    assert boot.recorded == []
    assert boot.answer([[5, 6, 7, 8]]) == second.answer([[5, 6, 7, 8]])
    assert boot.recorded == ["prefill 32", "decode 1x8", "decode 1x16"]
    late = [line for line in boot.lines if line.startswith("late compile: ")]
    assert len(late) == 3
    info = boot.info()
    assert info["switches"] == dict.fromkeys(info["switches"], False)
    assert info["executables"]["compiles_after_ready"] == 3
    assert "capture list: none, each step is compiled when it is first met" in boot.lines


def test_buckets_alone_compile_each_bucket_when_it_is_first_met():
    boot = Boot(replace(CONFIG, persist_inputs=False, capture_decode=False))
    boot.answer(PROMPTS[:1])
    assert boot.recorded == ["prefill 32", "decode 1x64"]


# The list.

RECTANGLE = replace(CONFIG, attention_backend="rectangle", max_model_len=256)


def test_a_list_that_does_not_cover_what_is_served_needs_leave_to_compile_late():
    with pytest.raises(ConfigError, match=r"2 of 4 shapes.*bound by flag.*--allow-late-compile"):
        Boot(RECTANGLE, BootConfig(warm_width=128), recorder=must_not_compile)
    with pytest.raises(ConfigError, match=r"1 of 2 shapes.*--allow-late-compile"):
        Boot(CONFIG, BootConfig(warm_rows=1), recorder=must_not_compile)


def test_a_width_flag_is_refused_on_the_streamed_read():
    with pytest.raises(ConfigError, match=r"--warm-width 64: the streamed read"):
        Boot(CONFIG, BootConfig(warm_width=64), recorder=must_not_compile)


def test_a_shape_outside_the_list_is_compiled_once_counted_told_and_then_serves_smaller_ones():
    boot = Boot(RECTANGLE, BootConfig(warm_width=128, warm_rows=1, allow_late_compile=True))
    assert sorted(boot.recorded) == ["decode 1x128", "permute", "prefill 32", "write_counts"]
    boot.recorded.clear()
    boot.answer([[1] * 30, [2] * 30], max_tokens=120, ignore_eos=True)
    assert boot.recorded == ["decode 2x128", "decode 2x256"]
    assert [line.split(":")[1] for line in boot.lines if line.startswith("late")] == [
        " decode 2x128",
        " decode 2x256",
    ]
    capture = boot.info()["capture"]
    assert capture["late_compiles"] == ["2x128", "2x256"]
    assert capture["replays"].keys() == {"1x128", "2x128", "2x256"}
    outside = capture["replays"]["2x128"] + capture["replays"]["2x256"]
    assert capture["fall_throughs"] == outside - 2
    assert "raise --warm-rows" in capture["checks"]["replays_dominate"]
    assert capture["checks"]["all_shapes_captured"] == "ok"
    boot.recorded.clear()
    boot.answer([[1] * 100], max_tokens=60, ignore_eos=True)
    assert boot.recorded == []  # 1x256 among them: 2x256 covers it
    assert boot.info()["capture"]["replays"]["2x256"] > capture["replays"]["2x256"]


def test_the_rectangles_list_is_the_posts_and_its_excess_is_refused():
    with pytest.raises(ConfigError, match=r"60 of 80 shapes, up to 16 rows x 1536 tokens"):
        build_engine(
            CHECKPOINT,
            EngineConfig(max_num_seqs=16, attention_backend="rectangle"),
            capture_recorder=must_not_compile,
        )


# Gates, each broken in one place.


def test_buckets_of_another_read_than_the_one_that_runs_end_the_boot(monkeypatch):
    monkeypatch.setattr(boot_module, "decode_buckets", lambda config: DecodeBuckets(2, 64))
    with pytest.raises(BootUnsound, match="rectangle decode buckets under the streamed read"):
        Boot(recorder=must_not_compile)


def test_a_list_of_other_buckets_ends_the_boot(monkeypatch):
    other = DecodeBuckets(4, 64, streamed=True, tile=8)
    monkeypatch.setattr(
        sizing, "plan_capture", lambda buckets, **given: plan_capture(other, **given)
    )
    with pytest.raises(BootUnsound, match="plan the list from the cache's buckets"):
        Boot(recorder=must_not_compile)


def test_a_list_longer_than_its_limit_ends_the_boot(monkeypatch):
    monkeypatch.setattr(
        sizing,
        "plan_capture",
        lambda buckets, **given: replace(plan_capture(buckets, **given), limit=1),
    )
    with pytest.raises(CaptureTooSmall, match="the process holds 1 executables"):
        Boot(recorder=must_not_compile)


def test_a_report_that_says_warm_while_a_shape_is_cold_ends_the_boot(boot_again, monkeypatch):
    assert boot_again(warm=False).info()["capture"]["warm"] is False
    true_info = booted_module.boot_info

    def lie(pool, capture, ready):
        info = true_info(pool, capture, ready)
        return info | {"capture": info["capture"] | {"warm": True}}

    monkeypatch.setattr(booted_module, "boot_info", lie)
    boot_again()
    with pytest.raises(BootUnsound, match="2 of 2 shapes are cold"):
        boot_again(warm=False)


def test_a_warm_up_beside_a_running_loop_is_refused_before_it_touches_the_state(second):
    def untouched():
        raise AssertionError("the state was written")

    class Watched:
        permute_rows = decode = prefill = lambda *given: untouched()

    shapes = sizing.step_shapes(MODEL, second.booted.config, (DecodeShape(1, 64),), 20, "cpu")
    with pytest.raises(BootUnsound, match="warm first"):
        warm_engine(Watched(), shapes, serving=True)
    with pytest.raises(AssertionError, match="the state was written"):
        warm_engine(Watched(), shapes)


def test_an_executable_missing_from_the_list_shows_in_health(second):
    booted = second.booted
    short = replace(
        booted,
        executables=type(booted.executables)(
            {k: b for k, b in booted.executables.planned.items() if k != DecodeShape(2, 64)}
        ),
    )
    said = short.info(booted.engine.stats())["capture"]["checks"]["all_shapes_captured"]
    assert said == "1 of 2 planned shapes have no executable, e.g. 2 rows x 64"
