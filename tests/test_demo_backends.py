"""The default model answers alike through every attention backend that runs here."""

import pytest

from jaxserve import LLM, EngineConfig, SamplingParams
from tests.demo_model import demo_path

PROMPTS = ["The capital of France is", "def fibonacci(n):\n    "]


@pytest.mark.demo
def test_greedy_text_is_the_same_through_every_attention_backend():
    texts = {}
    for backend in ("rectangle", "streamed_xla", "streamed_triton"):
        config = EngineConfig(
            max_model_len=64,
            max_num_seqs=2,
            max_num_batched_tokens=32,
            num_blocks=16,
            attention_backend=backend,
        )
        with LLM(demo_path(), config=config, use_tqdm=False) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            outputs = llm.generate(PROMPTS, params)
            texts[backend] = [output.outputs[0].text for output in outputs]
    assert "Paris" in texts["rectangle"][0]
    assert texts["streamed_xla"] == texts["rectangle"]
    assert texts["streamed_triton"] == texts["rectangle"]
