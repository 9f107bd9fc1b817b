"""A server that is killed comes back from its compile cache and answers as before."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.serve_fakes import byte_level_tokenizer

ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
CALL = {"prompt": "the quick", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def started(flags: Sequence[str], log: Path) -> Iterator[tuple[subprocess.Popen[str], str, list]]:
    """A process of the launcher, its URL once it is ready, and what it said until then."""
    command = [sys.executable, str(ROOT / "scripts" / "serve.py"), *flags]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            lines: list[str] = []
            for line in process.stdout:
                lines.append(line.rstrip())
                if line.startswith("ready: "):
                    break
            else:
                pytest.fail("\n".join(lines) + log.read_text())
            yield process, line.removeprefix("ready: ").removesuffix("/v1\n"), lines
        finally:
            process.kill()


@pytest.mark.timeout(540)
def test_a_server_killed_while_it_streams_serves_again_without_compiling(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    flags = [str(tmp_path), "--load-format", "dummy", "--port", "0", "--block-size", "8"]
    flags += ["--max-num-seqs", "1", "--max-num-batched-tokens", "32"]
    flags += ["--compile-cache-dir", str(tmp_path / "cache")]

    with started(flags, tmp_path / "log") as (process, url, cold):
        answer = httpx.post(f"{url}/v1/completions", json=CALL, timeout=60).json()
        endless = CALL | {"max_tokens": 100, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=endless, timeout=60) as reply:
            assert next(reply.iter_lines()).startswith("data: ")
            process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL

    with started(flags, tmp_path / "log") as (process, url, warm):
        reply = httpx.post(f"{url}/v1/completions", json=CALL, timeout=60)
        assert reply.json()["choices"] == answer["choices"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0

    def executables(lines: list[str]) -> list[str]:
        return [line for line in lines if " executables: " in line]

    assert len(executables(cold)) == len(executables(warm)) >= 3
    assert all("cache miss" in line for line in executables(cold))
    assert all(line.endswith("cache hit") for line in executables(warm))
