"""`serve.py --plan`: the price list from the command line, with neither weights nor a device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
POOL_BYTES = 1 << 30
SIZES = ("--max-num-seqs", "256", "--max-model-len", "8192", "--max-num-batched-tokens", "512")
SIZED = (*SIZES, "--kv-cache-memory-bytes", str(POOL_BYTES))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def serve(model: Path, *argv: str, **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "scripts/serve.py", str(model), "--load-format", "dummy", *argv],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"} | environ,
    )


@pytest.mark.parametrize(
    ("backend", "count", "full_count", "max_width", "bound_by", "arena"),
    [
        ("rectangle", 63, 576, 896, "limit", 28 * 2**20),
        ("streamed", 9, 9, 8192, "read", None),
    ],
)
def test_256_rows_of_8192_tokens_are_576_shapes_on_a_rectangle_and_9_streamed(
    model, backend, count, full_count, max_width, bound_by, arena
):
    done = serve(model, "--plan", "--format", "json", *SIZED, "--attention-backend", backend)
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    capture, pool = listed["capture"], listed["pool"]
    assert (capture["count"], capture["full_count"]) == (count, full_count)
    assert (capture["max_width"], capture["width_bound_by"]) == (max_width, bound_by)
    if arena is None:
        assert capture["pool_bytes"] == 256 * 32 * capture["read_block"] * 4
    else:
        assert (capture["pool_bytes"], capture["read_block"]) == (arena, None)
    assert pool["sized_by"] == "kv_cache_memory_bytes"
    assert POOL_BYTES - pool["bytes_per_block"] < pool["pool_bytes"] <= POOL_BYTES
    assert pool["full_length_requests"] == (pool["num_blocks"] - 1) // 512
    kinds = [e["kind"] for e in listed["executables"]]
    counts = [kinds.count(k) for k in ("permute", "write_counts", "decode", "prefill")]
    assert counts == [1, 1, count, 5]
    assert listed["target"] is None
    assert {e["compiled"] for e in listed["executables"]} == {None}


def test_as_text_it_is_the_boots_two_lines_a_table_and_a_total(model):
    done = serve(model, "--plan", *SIZED, "--warm-rows", "64")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("KV pool: ")
    assert lines[2].startswith("capture list: 7 of 9 shapes, up to 64 rows x 8192 tokens")
    decodes = [line.split()[1] for line in lines if line.strip().startswith("decode ")]
    assert decodes == [f"{2**i}x8192" for i in range(7)]
    assert lines[-1].startswith("total: 14 executables; ")


@pytest.mark.parametrize(
    ("argv", "code", "line"),
    [
        (["--target", "h200"], 2, "--target h200: says how --plan prints; add --plan"),
        (["--format", "json"], 2, "--format json: says how --plan prints; add --plan"),
        (
            ["--plan", "--target", "h300"],
            1,
            "--target h300: No such file or directory; use a100, h200, l40 or a GPU target file",
        ),
        (
            ["--plan", "--no-cuda-graphs"],
            1,
            "--plan: a server that compiles no list has no prices; keep --cuda-graphs",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(model, argv, code, line):
    done = serve(model, *argv)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == f"serve.py: {line}\n"


def test_a_context_the_pool_cannot_hold_is_refused_as_a_boot_refuses_it(model):
    done = serve(model, "--plan", *SIZES, "--kv-cache-memory-bytes", "1000000")
    assert done.returncode == 1
    assert "--kv-cache-memory-bytes" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_plan_of_weights_that_do_not_fit_this_host_says_that_its_boot_would_be_refused(tmp_path):
    huge = CONFIG | {"hidden_size": 2**16, "intermediate_size": 2**22, "num_hidden_layers": 64}
    (tmp_path / "config.json").write_text(json.dumps(huge))
    done = serve(tmp_path, "--plan", "--kv-cache-memory-bytes", str(POOL_BYTES * 64))
    assert done.returncode == 0, done.stderr
    assert "a boot with these flags would be refused: the model's" in done.stderr
