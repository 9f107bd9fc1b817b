"""Compiling for GPUs that are not here."""

import importlib.util
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import BootError, ConfigError
from jaxserve.plan.buckets import DecodeBuckets, DecodeShape, PrefillBuckets
from jaxserve.plan.capture import plan_capture
from jaxserve.plan.compiled import Key
from jaxserve.plan.pool import kv_bytes_per_block, plan_kv_pool
from jaxserve.plan.price_list import price_list, tree_nbytes
from jaxserve.runtime import targets
from jaxserve.runtime.compile_cache import entry_name
from jaxserve.runtime.compiler import StepCompiler
from jaxserve.runtime.cross_compile import Build
from jaxserve.runtime.executables import StepShapes
from jaxserve.runtime.fingerprint import environment_parts
from jaxserve.runtime.targets import compile_for_target, load_target, target_names
from tests import cross_fakes
from tests.models import TINY

# The compiler's plugin is an extra; without it nothing below that needs it is checked.
needs_plugin = pytest.mark.skipif(
    not any(importlib.util.find_spec(p) for p in ("jax_cuda13_plugin", "jax_cuda12_plugin")),
    reason="NOT CHECKED, no compiler for NVIDIA GPUs here: pip install -e '.[cross]'",
)
DECODE = DecodeShape(2, 64)
SHAPES = StepShapes(
    model=replace(TINY, num_layers=1),
    dtype="bfloat16",
    backend="streamed",
    num_blocks=9,
    block_size=16,
    blocks_per_row=4,
    max_num_seqs=2,
    decode=(DECODE,),
    prefill_tokens=(32,),
)
NO_MODEL = replace(SHAPES, decode=(), prefill_tokens=())


def test_three_targets_come_with_the_package_and_say_what_the_data_sheets_say():
    assert target_names() == ("a100", "h200", "l40")
    sheets = {
        "a100": ("NVIDIA A100-SXM4-80GB", 2.039e12, 80e9),
        "h200": ("NVIDIA H200", 4.8e12, 141e9),
        "l40": ("NVIDIA L40", 0.864e12, 48e9),
    }
    for name, (device, bandwidth, memory) in sheets.items():
        target = load_target(name)
        assert (target.device, target.bandwidth) == (device, bandwidth)
        assert target.memory_bytes == pytest.approx(memory, rel=0.08)


def test_a_target_may_be_a_file(tmp_path):
    file = tmp_path / "card.textproto"
    file.write_text(load_target("l40").text.replace("NVIDIA L40", "my card"))
    assert load_target(str(file)).device == "my card"


@pytest.mark.parametrize("content", [None, b"", b"\xff", b"device_description_str: 'x'"])
def test_what_is_no_target_is_refused_in_one_line_that_names_those_that_are(tmp_path, content):
    file = tmp_path / "card"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--target .*a100, h200, l40") as refused:
        load_target(str(file))
    assert "\n" not in str(refused.value)


def test_without_the_plugin_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(targets, "_PLUGINS", ("no_such_package.plugin",))
    with pytest.raises(ConfigError, match=re.escape("pip install -e '.[cross]'")):
        compile_for_target(load_target("h200"), NO_MODEL)


@pytest.mark.parametrize(
    ("child", "line"),
    [
        (
            cross_fakes.abort,
            "compiling for NVIDIA H200: its process ended by SIGABRT after 0 of 4 executables: "
            + cross_fakes.FATAL,
        ),
        (
            cross_fakes.refuse,
            "compiling decode 1x32 for NVIDIA H200: XlaRuntimeError: shared memory: 282624 of "
            "232448",
        ),
    ],
)
def test_a_child_that_dies_or_fails_is_one_line(monkeypatch, child, line):
    monkeypatch.setattr(targets, "_PLUGINS", ("json",))
    monkeypatch.setattr(targets, "cross_compile", child)
    with pytest.raises(BootError) as failed:
        compile_for_target(load_target("h200"), SHAPES)
    assert str(failed.value) == line


def modelled_argument_bytes() -> dict[Key, int]:
    config = EngineConfig(
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        block_size=16,
        num_blocks=9,
        dtype="bfloat16",
        attention_backend="streamed",
    )
    buckets = DecodeBuckets(2, 64, streamed=True, tile=16)
    listed = price_list(
        "tiny",
        SHAPES.model,
        config,
        plan_kv_pool(config, kv_bytes_per_block(SHAPES.model, 16, "bfloat16")),
        replace(plan_capture(buckets, num_heads=TINY.num_heads), shapes=(DECODE,)),
        buckets,
        PrefillBuckets(32),
        bandwidth=1.0,
        bandwidth_of="",
    )
    keys: tuple[Key, ...] = ("permute", "write_counts", DECODE, 32)
    return {k: e.argument_bytes for k, e in zip(keys, listed.executables, strict=True)}


@needs_plugin
@pytest.mark.parametrize("name", ["a100", "h200", "l40"])
def test_every_packaged_target_compiles(name):
    done = []
    figures = compile_for_target(load_target(name), NO_MODEL, progress=lambda *of: done.append(of))
    assert figures["permute"].launches > 0
    assert done == [(1, 2), (2, 2)]


@needs_plugin
def test_a_model_compiled_for_an_h200_updates_pool_and_state_in_place():
    figures = compile_for_target(load_target("h200"), SHAPES, workers=2)
    assert set(figures) == {"permute", "write_counts", DECODE, 32}
    state = tree_nbytes(SHAPES.state_specs())
    pool = tree_nbytes(SHAPES.pool_specs())
    assert figures["permute"].alias_bytes == figures["write_counts"].alias_bytes == state
    for key in (DECODE, 32):
        step = figures[key]
        assert step.alias_bytes == pool + state
        assert step.temp_bytes > 0
        assert step.launches > 0
        assert step.trace_seconds > 0
        assert step.backend_seconds > 0
    # The list's own arithmetic agrees with the compiler to the byte.
    assert modelled_argument_bytes() == {k: f.argument_bytes for k, f in figures.items()}


@needs_plugin
def test_what_is_built_lies_under_the_key_that_a_boot_on_that_gpu_looks_for(tmp_path):
    build = Build(tmp_path / "cache", xla_flags="--flag")
    said = []
    compile_for_target(load_target("h200"), NO_MODEL, build=build, report=said.append)
    (entry,) = build.directory.glob("permute*.jaxexe")
    header, payload = entry.read_bytes().split(b"\n", 1)
    parts = json.loads(header)["parts"]
    card = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    environment = environment_parts("--flag", [card])
    wanted = StepCompiler(shapes=NO_MODEL, platform="cuda", environment=environment)
    # Settings differ: the tests' own are stricter than a server's.
    assert parts == {**wanted.parts("permute"), "jax_settings": parts["jax_settings"]}
    assert parts["device"] == "1 x NVIDIA H200"
    assert entry.name == entry_name("permute", parts)
    assert b"jaxserve-target-" not in payload  # nothing in it asks for a dump when it runs
    assert said == []


@needs_plugin
def test_a_cache_that_cannot_be_written_is_told_and_prices_all_the_same(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    figures = compile_for_target(
        load_target("h200"),
        NO_MODEL,
        build=Build(tmp_path / "file", xla_flags=""),
        report=said.append,
    )
    assert figures["permute"].launches > 0
    assert len(said) == 1
    assert str(tmp_path / "file") in said[0]


@needs_plugin
def test_a_description_the_compiler_refuses_is_one_line():
    broken = replace(load_target("h200"), text="gpu_device_info { no_such_field: 1 }")
    with pytest.raises(BootError, match="compiling the first step for NVIDIA H200") as failed:
        compile_for_target(broken, NO_MODEL)
    assert "\n" not in str(failed.value)
