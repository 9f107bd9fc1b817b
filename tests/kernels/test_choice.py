"""Which implementation a program gets is decided where it is lowered, not where it is traced."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jaxserve_kernels import paged_attention

TRITON = "__gpu$xla.gpu.triton"
B, N, K, H, Z, P = 4, 6, 2, 64, 16, 40


def an_absent_gpu():
    """A context that names the GPU lowered for; jax 0.10 takes any GPU for a Hopper by itself."""
    if jax.__version_info__ < (0, 11):
        return nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H200", None, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def lowered(implementation: str, platform: str, head_size: int = H) -> str:
    """The program's text."""
    pool = jax.ShapeDtypeStruct((32, K, Z, head_size), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((B, N, head_size), jnp.bfloat16)
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    call = jax.jit(partial(paged_attention, scale=0.125, implementation=implementation))
    traced = call.trace(q, pool, pool, ints((B, P)), ints((B,)))
    return traced.lower(lowering_platforms=(platform,)).as_text()


# jax 0.11 and later say so whenever a kernel is lowered by Triton.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")


@pytest.mark.parametrize("implementation", ["auto", "streamed", "streamed_triton"])
def test_lowered_for_cuda_on_a_machine_without_one_there_is_the_kernel(implementation):
    assert jax.default_backend() == "cpu"
    with an_absent_gpu():
        text = lowered(implementation, "cuda")
    assert text.count(TRITON) == 2  # decode and merge
    assert "stablehlo.while" not in text


@pytest.mark.parametrize("implementation", ["auto", "streamed", "streamed_triton"])
def test_lowered_for_a_cpu_there_is_none(implementation):
    text = lowered(implementation, "cpu")
    assert TRITON not in text
    assert "stablehlo.while" in text


@pytest.mark.parametrize("implementation", ["rectangle", "streamed_xla"])
def test_plain_jax_is_what_it_says_on_a_gpu_too(implementation):
    assert TRITON not in lowered(implementation, "cuda")


def test_what_the_kernel_cannot_do_is_plain_jax_on_a_gpu():
    with an_absent_gpu():
        text = lowered("auto", "cuda", head_size=72)
    assert TRITON not in text
    assert "stablehlo.while" in text
