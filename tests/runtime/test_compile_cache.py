"""Serialised executables: the same after loading, and never loaded when they should not be."""

import errno
import json
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.model.definition import params_of
from jaxserve.plan.buckets import DecodeShape
from jaxserve.runtime import compile_cache, fingerprint
from jaxserve.runtime.compile_cache import CompileCache, entry_name
from jaxserve.runtime.compiler import StepCompiler, compile_executables
from jaxserve.runtime.executables import StepShapes
from jaxserve.runtime.fingerprint import environment_parts, source_digest
from jaxserve.runtime.runner import ModelRunner
from tests.models import TINY, module_of, pack_prefill

BLOCK, WIDTH, ROWS = 8, 64, 2
SHAPES = StepShapes(
    model=TINY,
    dtype="float32",
    backend="streamed",
    num_blocks=20,
    block_size=BLOCK,
    blocks_per_row=WIDTH // BLOCK,
    max_num_seqs=ROWS,
    decode=(DecodeShape(ROWS, WIDTH),),
    prefill_tokens=(32,),
)
PARTS = {"step": "add", "device": "1 x cpu", "source": "abc", "num_blocks": "20"}


def compiler_of(cache, **changes):
    return StepCompiler(
        shapes=SHAPES, platform="cpu", cache=cache, environment=environment_parts(""), **changes
    )


def must_not_compile(name, lower):
    raise AssertionError(f"{name} was traced")


@pytest.fixture(scope="module")
def boots(tmp_path_factory):
    """(directory, executables compiled by a first boot, those a second boot loads)."""
    directory = tmp_path_factory.mktemp("cache") / "executables"
    first = compile_executables(SHAPES, compiler=compiler_of(CompileCache(directory)), workers=2)
    CompileCache(directory).tidy()
    second = compile_executables(
        SHAPES,
        compiler=compiler_of(CompileCache(directory), recorder=must_not_compile),
        workers=2,
    )
    return directory, first, second


@pytest.fixture(scope="module")
def compiled():
    """A program that costs nothing to compile."""
    with compile_cache.keepable_compiles():
        return jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()


class Kept:
    """A cache of one entry, the lines it reported, and the entry's file."""

    def __init__(self, directory: Path, compiled):
        self.lines: list[str] = []
        self.cache = CompileCache(directory, self.lines.append)
        self.store(compiled)
        self.path = directory / entry_name("add", PARTS)

    def store(self, compiled, parts=PARTS, name="add"):
        self.cache.store(name, parts, compiled, trace_s=0.5, compile_s=1.5, temp_bytes=7)

    def load(self, parts=PARTS):
        return self.cache.load("add", parts)


@pytest.fixture
def kept(tmp_path, compiled):
    return Kept(tmp_path / "cache", compiled)


def test_a_second_boot_loads_every_executable_and_traces_nothing(boots):
    _, first, second = boots
    assert [b.cache for b in first.all] == ["miss: not compiled before"] * 4
    assert [b.cache for b in second.all] == ["hit"] * 4
    assert [b.name for b in second.all] == [b.name for b in first.all]
    assert [b.temp_bytes for b in second.all] == [b.temp_bytes for b in first.all]
    assert all(b.trace_s == b.compile_s == 0 < b.load_s for b in second.all)


def run(executables):
    """Tokens of a prefill and three decodes, and the addresses the pool had after each."""
    runner = ModelRunner(params_of(module_of(TINY)), executables, SHAPES)
    addresses = [runner.pool_addresses()]
    batch = pack_prefill(
        [([5, 6, 7], 0, [3, 4], 0), ([90, 3], 0, [5, 6], 1)],
        tokens=32,
        segments=ROWS,
        blocks_per_row=WIDTH // BLOCK,
        block_size=BLOCK,
    )
    tokens = [runner.prefill(batch).read().tolist()]
    addresses.append(runner.pool_addresses())
    for _ in range(3):
        pending = runner.decode(SHAPES.decode[0], np.zeros(ROWS, np.int32))
        tokens.append(pending.read().tolist())
        addresses.append(runner.pool_addresses())
    return tokens, addresses


def test_a_loaded_executable_draws_the_same_tokens_and_still_writes_the_pool_in_place(boots):
    _, first, second = boots
    (fresh, _), (loaded, addresses) = run(first), run(second)
    assert loaded == fresh
    assert all(a == addresses[0] for a in addresses)
    for step in (*second.decode.values(), *second.prefill.values()):
        pool_bytes = sum(s.nbytes for half in SHAPES.pool_specs() for s in half)
        assert step.compiled.memory_analysis().alias_size_in_bytes >= pool_bytes


def test_an_undonated_pool_would_be_seen_to_move():
    step = jax.jit(lambda x: x.at[0].set(1.0))
    x = jnp.zeros(1000)
    assert step(x).unsafe_buffer_pointer() != x.unsafe_buffer_pointer()


def test_a_loaded_executable_refuses_another_shape(boots):
    _, _, second = boots
    runner = ModelRunner(params_of(module_of(TINY)), second, SHAPES)
    with pytest.raises(TypeError):
        runner.decode(SHAPES.decode[0], np.ones(ROWS + 1, np.int32))


def test_the_manifest_names_every_executable_and_what_it_was_compiled_from(boots):
    directory, first, _ = boots
    entries = json.loads((directory / "manifest.json").read_text())["executables"]
    assert {e["name"] for e in entries} == {b.name for b in first.all}
    for entry in entries:
        assert (directory / entry["file"]).exists()
        assert entry["parts"]["versions"].startswith(f"jax {jax.__version__}")
        assert entry["parts"]["num_blocks"] == "20"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", replace(TINY, rope_theta=5.0)),
        ("dtype", "bfloat16"),
        ("backend", "rectangle"),
        ("num_blocks", 21),
        ("block_size", 16),
        ("blocks_per_row", 9),
        ("max_num_seqs", 3),
        ("persist_inputs", False),
    ],
)
def test_a_change_of_any_shape_or_of_the_model_is_another_executable(boots, field, value):
    directory, _, _ = boots
    changed = replace(
        compiler_of(CompileCache(directory)), shapes=replace(SHAPES, **{field: value})
    )
    key = SHAPES.decode[0]
    assert changed.cache.load("decode 2x64", changed.parts(key)) == f"changed: {field}"


@pytest.mark.parametrize("part", sorted(environment_parts("")))
def test_a_change_of_versions_flags_device_or_source_is_another_executable(boots, part):
    directory, _, _ = boots
    compiler = compiler_of(CompileCache(directory))
    compiler = replace(compiler, environment={**compiler.environment, part: "another"})
    parts = compiler.parts(SHAPES.decode[0])
    assert compiler.cache.load("decode 2x64", parts) == f"changed: {part}"


def test_the_environment_follows_the_flags_jaxs_settings_and_the_source(monkeypatch, tmp_path):
    plain = environment_parts("")
    assert environment_parts("--xla_x=1") == {**plain, "xla_flags": "--xla_x=1"}
    with jax.default_matmul_precision("highest"):
        assert environment_parts("")["jax_settings"] != plain["jax_settings"]
    source = tmp_path / "steps.py"
    source.write_text("x = 1")
    monkeypatch.setattr(fingerprint, "_SOURCES", ("steps",))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = source_digest()
    assert source_digest() == before
    source.write_text("x = 2")
    assert source_digest() != before


def test_an_entry_loads_with_what_it_cost(kept):
    loaded, info = kept.load()
    np.testing.assert_array_equal(loaded(np.zeros(3, np.float32)), np.ones(3, np.float32))
    assert (info.trace_s, info.compile_s, info.temp_bytes, info.num_blocks) == (0.5, 1.5, 7, 20)
    assert kept.lines == []


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


def plant(kept, mark: Path):
    """Replaces the payload of an entry by a bomb, under a header that is right."""
    payload = pickle.dumps(Bomb(mark))
    header = json.loads(kept.path.read_bytes().split(b"\n", 1)[0])
    header |= {
        "num_bytes": len(payload),
        "sha256": compile_cache.hashlib.sha256(payload).hexdigest(),
    }
    kept.path.write_bytes(json.dumps(header).encode() + b"\n" + payload)


def be_another_user(kept, monkeypatch):
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)


def make_a_link(kept, monkeypatch):
    target = kept.path.with_name("elsewhere")
    kept.path.rename(target)
    kept.path.symlink_to(target)


def spoil(change):
    def spoiled(kept, monkeypatch):
        kept.path.write_bytes(change(kept.path.read_bytes()))

    return spoiled


@pytest.mark.parametrize(
    ("spoiled", "why"),
    [
        (lambda kept, _: kept.path.chmod(0o620), "others may write"),
        (lambda kept, _: kept.path.chmod(0o602), "others may write"),
        (be_another_user, "belongs to user"),
        (make_a_link, "symbolic link"),
        (spoil(lambda b: b[:-1]), "truncated"),
        (spoil(lambda b: b[:40]), "header cannot be read"),
        (spoil(lambda b: b""), "header cannot be read"),
        (spoil(lambda b: b[:-1] + bytes([b[-1] ^ 1])), "digest"),
        (spoil(lambda b: b.replace(b'"abc"', b'"abd"', 1)), "another executable"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_never_unpickled(
    kept, tmp_path, monkeypatch, spoiled, why
):
    mark = tmp_path / "mark"
    plant(kept, mark)
    spoiled(kept, monkeypatch)
    assert why in kept.load()
    assert not mark.exists()
    assert len(kept.lines) == 1
    assert kept.path.name in kept.lines[0]
    assert why in kept.lines[0]


def test_the_bomb_of_the_test_above_would_go_off(kept, tmp_path):
    plant(kept, tmp_path / "mark")
    assert isinstance(kept.load(), str)  # and what it unpickles to is no executable
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "damage",
    [
        {"parts": None},
        {"parts": {"step": "add"}},
        {"parts": PARTS | {"num_blocks": "x"}},
        {"parts": PARTS | {"num_blocks": 20}},
        {"num_bytes": "7"},
        {"temp_bytes": None},
        {"more": 1},
        "[" * 200_000,
        "7",
    ],
    ids=lambda damage: str(damage)[:40],
)
def test_a_damaged_header_costs_that_entry_only(kept, damage):
    line, payload = kept.path.read_bytes().split(b"\n", 1)
    header = damage if isinstance(damage, str) else json.dumps(json.loads(line) | damage)
    kept.path.write_bytes(header.encode() + b"\n" + payload)
    assert isinstance(kept.cache.load("add", PARTS), str)
    assert kept.cache.earlier("add", PARTS | {"num_blocks": "21"}) is None
    kept.cache.tidy()


def test_a_pipe_in_an_entrys_place_is_passed_over_without_waiting_for_a_writer(kept):
    kept.path.unlink()
    os.mkfifo(kept.path, 0o600)
    assert kept.cache.load("add", PARTS) == "no plain file"


def test_a_directory_others_may_write_is_not_used(tmp_path, compiled):
    directory = tmp_path / "shared"
    kept = Kept(directory, compiled)
    directory.chmod(0o777)
    lines: list[str] = []
    cache = CompileCache(directory, lines.append)
    assert cache.load("add", PARTS) == "cache off"
    assert cache.earlier("add", PARTS) is None
    kept.path.unlink()
    cache.store("add", PARTS, compiled, trace_s=0, compile_s=0, temp_bytes=0)
    cache.tidy()
    assert list(directory.iterdir()) == []
    assert len(lines) == 1
    assert "--compile-cache-dir" in lines[0]
    assert "mode 777" in lines[0]


def test_a_directory_that_cannot_be_made_costs_only_the_cache(tmp_path, compiled):
    (tmp_path / "file").write_text("")
    lines: list[str] = []
    cache = CompileCache(tmp_path / "file" / "cache", lines.append)
    cache.store("add", PARTS, compiled, trace_s=0, compile_s=0, temp_bytes=0)
    assert cache.load("add", PARTS) == "cache off"
    assert len(lines) == 1
    assert "Not a directory" in lines[0]


def test_a_full_disk_is_one_line_and_leaves_nothing_behind(tmp_path, compiled, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    kept = Kept(tmp_path / "cache", compiled)
    kept.store(compiled)
    kept.cache.tidy()
    assert len(kept.lines) == 1
    assert "No space left" in kept.lines[0]
    assert list((tmp_path / "cache").iterdir()) == []


def test_boots_that_store_and_load_one_entry_at_once_see_it_whole_or_not_at_all(kept, compiled):
    kept.path.unlink()
    go = threading.Barrier(4)

    def boot(_):
        go.wait()
        seen = []
        for _ in range(10):
            kept.store(compiled)
            kept.cache.tidy()
            seen.append(kept.load())
        return seen

    with ThreadPoolExecutor(4) as threads:
        results = [r for seen in threads.map(boot, range(4)) for r in seen]
    assert len(results) == 40
    assert not any(isinstance(r, str) for r in results)
    assert kept.lines == []


def test_what_a_killed_boot_left_is_passed_over_and_in_time_removed(kept):
    torn = kept.path.with_name(".abc.tmp")
    torn.write_bytes(kept.path.read_bytes()[:50])
    kept.cache.tidy()
    assert torn.exists()  # it may be another boot's, being written
    assert not isinstance(kept.load(), str)
    hours_ago = time.time() - 7200
    os.utime(torn, (hours_ago, hours_ago))
    kept.cache.tidy()
    assert not torn.exists()
    assert kept.path.exists()


def test_what_was_used_longest_ago_goes_first(kept, compiled, monkeypatch):
    others = [{**PARTS, "source": name} for name in ("old", "new")]
    for age, parts in zip((3000, 1000), others, strict=True):
        kept.store(compiled, parts)
        path = kept.path.with_name(entry_name("add", parts))
        os.utime(path, (time.time() - age, time.time() - age))
    os.utime(kept.path, (time.time() - 2000, time.time() - 2000))
    assert not isinstance(kept.load(), str)  # used just now
    monkeypatch.setattr(compile_cache, "_MOST_BYTES", int(2.5 * kept.path.stat().st_size))
    kept.cache.tidy()
    assert isinstance(kept.load(others[0]), str)
    assert not isinstance(kept.load(others[1]), str)
    assert not isinstance(kept.load(), str)


def test_an_earlier_boots_pool_is_found_whatever_its_size_and_only_for_the_same_server(
    kept, compiled
):
    kept.store(compiled, {**PARTS, "source": "xyz", "num_blocks": "99"})
    found = kept.cache.earlier("add", {**PARTS, "num_blocks": "1"})
    assert found is not None
    assert (found.num_blocks, found.temp_bytes) == (20, 7)
    assert kept.cache.earlier("add", {**PARTS, "device": "2 x cpu"}) is None
    assert kept.cache.earlier("sub", PARTS) is None


def test_kept_programs_carry_no_stack_traces_and_jaxs_settings_are_put_back(boots):
    _, first, _ = boots
    step = first.decode[SHAPES.decode[0]]
    assert "source_file" not in step.compiled.as_text()
    limit = jax.config.values["jax_traceback_in_locations_limit"]
    assert limit != 0
    plain = jax.jit(lambda x: x * 2).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()
    assert "source_line" in plain.as_text() or "stack_frame_id" in plain.as_text()


def test_nothing_is_kept_that_came_out_of_jaxs_own_cache(tmp_path):
    """Such an executable serialises to bytes that fail when they run."""
    jax_dir = tmp_path / "jax"
    settings = {
        "jax_compilation_cache_dir": str(jax_dir),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    shapes = replace(SHAPES, prefill_tokens=())
    compile_cache.jax_cache.reset_cache()
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        jax.jit(lambda x: x * 5 + 3)(jnp.zeros(7)).block_until_ready()
        of_jax = sorted(jax_dir.iterdir())
        assert of_jax, "JAX's cache is not in use, so this test shows nothing"
        compile_executables(
            shapes, compiler=replace(compiler_of(CompileCache(tmp_path / "a")), shapes=shapes)
        )
        assert sorted(jax_dir.iterdir()) == of_jax
        assert jax.config.values["jax_enable_compilation_cache"]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compile_cache.jax_cache.reset_cache()
