"""The default model answers alike through every attention backend that runs here."""

from collections.abc import Sequence

import jax
import pytest

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.config import AttentionBackend, DType
from tests.demo_model import demo_path

PROMPTS = ["The capital of France is", "def fibonacci(n):\n    "]


def greedy(
    backend: AttentionBackend, prompts: Sequence[str], max_tokens: int, dtype: DType
) -> list[str]:
    config = EngineConfig(
        max_model_len=64,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=32,
        num_blocks=16,
        attention_backend=backend,
        dtype=dtype,
    )
    with LLM(demo_path(), config=config, use_tqdm=False) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return [output.outputs[0].text for output in llm.generate(prompts, params)]


@pytest.mark.demo
def test_greedy_text_is_the_same_through_every_attention_backend():
    rectangle = greedy("rectangle", PROMPTS, 24, "float32")
    assert "Paris" in rectangle[0]
    assert greedy("streamed_xla", PROMPTS, 24, "float32") == rectangle
    assert greedy("streamed_triton", PROMPTS, 24, "float32") == rectangle


@pytest.mark.demo
@pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="NOT CHECKED, the kernel needs jax 0.11.2 or newer"
)
def test_greedy_text_is_the_same_through_the_kernel_for_hopper():
    # It takes no float32, and its interpreter about ten seconds a decode step: one is run.
    rectangle = greedy("rectangle", PROMPTS[:1], 2, "bfloat16")
    assert "Paris" in rectangle[0]
    assert greedy("streamed_mosaic", PROMPTS[:1], 2, "bfloat16") == rectangle
