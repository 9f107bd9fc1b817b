"""The Hopper kernel: interpreted with a look for races, refused, compiled for an absent H200."""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels import paged_attention, reference, streamed_mosaic
from jaxserve_kernels.arguments import Extras

ROOT = Path(__file__).parents[2]
WILD_ID = 2**31 - 1

needs_newer_jax = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2),
    reason=f"NOT CHECKED, the kernel needs jax 0.11.2 (Python 3.12), this is {jax.__version__}",
)
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="NOT CHECKED, the kernel is compiled with pip install -e '.[test,cross]' only",
)


@dataclass(frozen=True)
class World:
    """Queries, and pools that are poison wherever no row owns them; unused table entries are wild.

    ``sinks`` is None or one score a query head.
    """

    queries: np.ndarray
    k_pool: np.ndarray
    v_pool: np.ndarray
    tables: np.ndarray
    lengths: np.ndarray
    sinks: np.ndarray | None = None

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.queries, self.k_pool, self.v_pool, self.tables, self.lengths

    def row(self, b: int) -> "World":
        row = slice(b, b + 1)
        pools = self.k_pool, self.v_pool
        return World(self.queries[row], *pools, self.tables[row], self.lengths[row], self.sinks)


def make_world(
    lengths: list[int], group: int, kv_heads: int, head_size: int, block_size: int, dtype: str
) -> World:
    rng = np.random.default_rng(0)
    rows, width = len(lengths), -(-320 // block_size)
    num_blocks = rows * width + 1
    tables = (rng.permutation(num_blocks - 1) + 1).reshape(rows, width)
    owned = np.zeros((num_blocks, block_size), bool)
    for row, length in enumerate(lengths):
        for position in range(length):
            owned[tables[row, position // block_size], position % block_size] = True
        tables[row, -(-length // block_size) :] = WILD_ID

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))

    pools = [
        np.where(owned[:, None, :, None], pool, np.array(poison, pool.dtype))
        for poison in (np.nan, np.inf)
        for pool in [draw(num_blocks, kv_heads, block_size, head_size)]
    ]
    queries = draw(rows, group * kv_heads, head_size)
    return World(queries, *pools, tables.astype(np.int32), np.array(lengths, np.int32))


def without_races(out: jax.Array) -> np.ndarray:
    """``out`` in float32; fails if a warpgroup read what a copy might still have been writing."""
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    out.block_until_ready()  # jax 0.12 raises at a race, 0.11 notes it
    assert not get_races().races_found, "a race"
    return np.asarray(out.astype(jnp.float32))


def interpreted(world: World, **options) -> np.ndarray:
    options = {"scale": 0.125, "window": None, "soft_cap": None} | options
    extras = Extras(None if world.sinks is None else jnp.asarray(world.sinks), None, None)
    run = partial(streamed_mosaic.paged_attention, interpret=True, **options)
    return without_races(jax.jit(run)(*world.arrays, extras))


@pytest.fixture(scope="module")
def plain() -> World:
    """Rows of two splits, none, one token, and a token more than a tile; the rings go round."""
    return make_world([300, 0, 1, 65], 3, 1, 128, 16, "bfloat16")


@pytest.fixture(scope="module")
def plain_result(plain) -> np.ndarray:
    """Through the package's door, which interprets what is not traced for a GPU."""
    out = paged_attention(*plain.arrays, scale=0.125, implementation="streamed_mosaic")
    assert out.dtype == jnp.bfloat16
    return without_races(out)


@needs_newer_jax
def test_decode_equals_the_reference_at_every_edge_length(plain, plain_result):
    want = reference.paged_attention(*plain.arrays, scale=0.125)
    np.testing.assert_allclose(plain_result, want, atol=1e-2, rtol=1e-2)


@needs_newer_jax
def test_a_row_has_the_same_bits_alone_and_from_one_program(plain, plain_result, monkeypatch):
    monkeypatch.setattr(streamed_mosaic, "programs_sharing", lambda splits, pairs: 1)
    np.testing.assert_array_equal(interpreted(plain.row(0))[0], plain_result[0])


@needs_newer_jax
def test_windows_caps_sinks_and_blocks_longer_than_a_tile_equal_the_reference():
    world = make_world([256, 90], 9, 2, 64, 128, "float16")
    world = World(*world.arrays, sinks=np.linspace(-2, 4, 18, dtype=np.float32))
    options = {"scale": 0.3, "window": 100, "soft_cap": 2.0}
    want = reference.paged_attention(*world.arrays, **options, sinks=world.sinks)
    np.testing.assert_allclose(interpreted(world, **options), want, atol=3e-3, rtol=3e-3)
    for wrong in ({"window": 99}, {"soft_cap": 2.2}, {"scale": 0.32}):  # the check can fail
        told = reference.paged_attention(*world.arrays, **options | wrong, sinks=world.sinks)
        assert np.abs(told - want).max() > 1e-2


@needs_newer_jax
def test_a_wait_left_out_is_found_as_a_race(plain, monkeypatch):
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jaxserve_kernels import mosaic_decode

    wait = mosaic_decode.plgpu.barrier_wait

    def wait_but_for_queries(barrier):
        if hasattr(barrier, "transforms"):  # one of a ring's; the queries' barrier is used whole
            wait(barrier)

    monkeypatch.setattr(mosaic_decode.plgpu, "barrier_wait", wait_but_for_queries)
    with pytest.raises((jax.errors.JaxRuntimeError, AssertionError), match=r"(?i)race"):
        interpreted(plain.row(2))
    interpret_pallas_call.reset_gpu_interpret_mode_state()


# ---- what it refuses -------------------------------------------------------------------------


def trace(device_kind: str, num_heads=8, block_size=16, head_size=128, dtype="bfloat16", **other):
    """A call with 2 kv heads traced for a GPU; ``other`` may set ``pool_dtype``."""
    pool = ((9, 2, block_size, head_size), other.get("pool_dtype", dtype))
    arguments = [((2, num_heads, head_size), dtype), pool, pool, ((2, 4), "int32"), ((2,), "int32")]
    gpu = jax.sharding.AbstractDevice(device_kind=device_kind, num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=gpu)
    call = jax.jit(partial(paged_attention, scale=1.0, implementation="streamed_mosaic"))
    with jax.sharding.use_abstract_mesh(mesh):
        return call.trace(*(jax.ShapeDtypeStruct(*argument) for argument in arguments))


@needs_newer_jax
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")  # the merge
@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"])
def test_a_program_for_any_hopper_gpu_has_the_kernel_and_the_merge(kind):
    text = trace(kind).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert text.count("__gpu$xla.gpu.triton") == 1


@needs_newer_jax
@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA L40", "NVIDIA B200"])
def test_another_gpu_is_refused_by_name_before_its_compiler_would_abort(kind):
    with pytest.raises(NotImplementedError, match=f"{kind} is no Hopper GPU"):
        trace(kind)


@needs_newer_jax
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"dtype": "float32"}, "queries of float32 over a pool of float32"),
        ({"pool_dtype": "float16"}, "queries of bfloat16 over a pool of float16"),
        ({"head_size": 96}, "head size 96 is not 64, 128 or 256"),
        ({"block_size": 48}, "block size 48"),
        ({"block_size": 4}, "block size 4"),
        ({"num_heads": 66}, "33 query heads a kv head are more than 32"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_with_the_number(asked, message):
    with pytest.raises(NotImplementedError, match=message):
        trace("NVIDIA H200", **asked)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11, 2), reason="this jax is new enough")
def test_an_older_jax_is_refused_by_its_version():
    with pytest.raises(NotImplementedError, match=re.escape(f"jax {jax.__version__} is older")):
        trace("NVIDIA H200")


# ---- compiled for an absent H200 ---------------------------------------------------------------

# In a process of its own, since what Mosaic dumps it reads from the environment.
COMPILE = """
import sys
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxserve.runtime.cross_compile import absent_gpu
from jaxserve.runtime.targets import load_target
from jaxserve_kernels import streamed_mosaic
from jaxserve_kernels.arguments import Extras

size, group = map(int, sys.argv[1:])
mesh = absent_gpu(load_target("h200").text)

def spec(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

pool = spec(jnp.bfloat16, 4096, 8, 16, size)
arguments = (
    spec(jnp.bfloat16, 8, 8 * group, size), pool, pool, spec(jnp.int32, 8, 512), spec(jnp.int32, 8)
)
options = {"scale": 0.1, "window": 1000, "soft_cap": 30.0, "interpret": False}
extras = Extras(None, None, None)
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    jax.jit(
        lambda *arrays: streamed_mosaic.paged_attention(*arrays, extras, **options)
    ).lower(*arguments).compile()
"""


@needs_newer_jax
@needs_compiler
@pytest.mark.parametrize(
    ("head_size", "group", "resident"), [(64, 8, 2), (128, 8, 2), (256, 32, 1)]
)
def test_it_compiles_without_spills_and_a_multiprocessor_holds_as_many_programs(
    head_size, group, resident, tmp_path
):
    switches = {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_TO": str(tmp_path)}
    switches |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_RESOURCES": "1"}
    run = [sys.executable, "-c", COMPILE, str(head_size), str(group)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        run, env=os.environ | switches | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (figures,) = (file.read_text() for file in tmp_path.glob("*.ptxas"))
    (resources,) = (file.read_text() for file in tmp_path.glob("*.resources.txt"))
    assert "0 bytes spill stores, 0 bytes spill loads" in figures
    registers = int(re.findall(r"Used (\d+) registers", figures)[0])
    shared = int(re.findall(r"smem_scratch_bytes=(\d+)", resources)[0])
    # Of an H200's multiprocessor: 65536 registers, two warpgroups a program; 228 KiB, 1 reserved.
    fit = min(65536 // (256 * 8 * -(-registers // 8)), 228 * 1024 // (shared + 1024 + 256))
    assert fit == resident
