"""Every supported model family against what ``transformers`` computed from the same weights."""

import jax
import numpy as np
import pytest

from jaxserve.checkpoint import load_checkpoint
from jaxserve.model.attention import attend_prefill, kv_pool_specs
from jaxserve.model.params import build_params
from jaxserve.model.transformer import forward, logits
from jaxserve.runtime.executables import zeros
from jaxserve.runtime.steps import compiler_options
from tests.golden.weights import (
    FAMILIES,
    draw_tensors,
    family_config,
    family_golden,
    weights_sha256,
    write_checkpoint,
)
from tests.models import pack_prefill

BLOCK, P = 8, 16


def all_logits(config, params, prompts, stacked):
    """Logits [T, V] of the packed prompts, computed as prefill computes them."""
    blocks = np.random.default_rng(0).permutation(np.arange(1, 1 + P * len(prompts))).tolist()
    batch = pack_prefill(
        [(prompt.tolist(), 0, blocks[P * i : P * (i + 1)], 0) for i, prompt in enumerate(prompts)],
        tokens=128,
        segments=len(prompts),
        blocks_per_row=P,
        block_size=BLOCK,
    )
    pool = zeros(kv_pool_specs(config, 1 + P * len(prompts), BLOCK, "float32", stacked=stacked))

    def run(params, pool, batch):
        def attend(first_block, q, k, v):
            return attend_prefill(
                config,
                "streamed",
                q,
                k,
                v,
                batch.block_tables_SP + first_block,
                batch.context_lens_S,
                batch.cu_query_lens_S1,
            )

        _, hidden = forward(
            config, params, pool, batch.tokens_T, batch.positions_T, batch.slots_T, attend
        )
        return logits(params, hidden)

    return np.asarray(jax.jit(run, compiler_options=compiler_options("cpu"))(params, pool, batch))


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "stacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers_to_1e_4(family, stacked, tmp_path):
    golden = family_golden(family)
    checkpoint = load_checkpoint(str(write_checkpoint(tmp_path, family)))
    assert golden["weights_sha256"] == weights_sha256(draw_tensors(family_config(family)))
    params = build_params(checkpoint.config, checkpoint.tensors.get, stacked=stacked)
    count = sum(name.startswith("prompt_") for name in golden)
    prompts = [golden[f"prompt_{i}"] for i in range(count)]
    got = all_logits(checkpoint.config, params, prompts, stacked)
    start = 0
    for i, prompt in enumerate(prompts):
        rows = got[start + golden[f"positions_{i}"]]
        np.testing.assert_allclose(rows, golden[f"logits_{i}"], rtol=0, atol=1e-4)
        start += len(prompt)
