"""The whole server of a tiny checkpoint: what it says of itself while it is under load."""

import asyncio
import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import save_file

from jaxserve.boot import build_app
from jaxserve.config import BootConfig, EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.serve.settings import CheckpointSettings, ServerSettings, ServeSettings
from tests.golden.weights import draw_tensors
from tests.serve_fakes import byte_level_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
PHASES = [
    "import",
    "checkpoint",
    "weights",
    "plan",
    "trace",
    "compile",
    "load",
    "store",
    "pool",
    "warm",
]


@pytest.fixture(scope="module")
def booted(tmp_path_factory):
    """(the server, the lines of its boot)."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    save_file(draw_tensors(CONFIG), directory / "model.safetensors")
    lines: list[str] = []
    settings = ServeSettings(
        engine=EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, block_size=8),
        checkpoint=CheckpointSettings(model=str(directory)),
        server=ServerSettings(served_model_names=("tiny",)),
        boot=BootConfig(compile_cache_dir=tmp_path_factory.mktemp("cache") / "executables"),
    )
    serving = build_app(
        settings,
        report=lines.append,
        progress=lambda what, done, total: None,
        on_death=lambda error: None,
    )
    yield serving, lines
    asyncio.run(serving.engine.shutdown(0.0))


REQUESTS = [
    {"temperature": 0},
    {"temperature": 1.2},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 0.9, "top_k": 5, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0, "stop": ["e", "zz"]},
    {"temperature": 0, "stop_token_ids": [5], "ignore_eos": True},
    {"temperature": 0, "stream": True},
    {"temperature": 1, "prompt": "x" * 90},
]


async def test_under_load_of_every_kind_nothing_is_compiled_and_health_says_what_ran(booted):
    serving, _ = booted
    transport = httpx.ASGITransport(serving.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
        calls = [{"prompt": f"the quick {i}", "max_tokens": 12} | r for i, r in enumerate(REQUESTS)]
        replies = await asyncio.gather(
            *(client.post("/v1/completions", json=call) for call in calls * 2)
        )
        health = (await client.get("/health")).json()
        ready = await client.get("/ready")
        scraped = (await client.get("/metrics")).text
    assert {r.status_code for r in (*replies, ready)} == {200}

    capture = health["capture"]
    assert (
        capture.items()
        >= {
            "count": 3,
            "full_count": 3,
            "trimmed": 0,
            "max_rows": 4,
            "max_width": 128,
            "width_bound_by": "read",
            "ready": 3,
            "warm": True,
            "read": "streamed",
            "late_compiles": [],
            "fall_throughs": 0,
            "checks": {"all_shapes_captured": "ok", "replays_dominate": "ok"},
        }.items()
    )
    assert health["executables"]["compiles_after_ready"] == 0
    assert health["executables"]["ready"] == health["executables"]["planned"] == 7
    assert sum(health["capture"]["replays"].values()) > 12

    seen = {
        (sample.name, sample.labels.get("rows")): sample.value
        for family in text_string_to_metric_families(scraped)
        for sample in family.samples
    }
    assert seen["jaxserve:compiles_after_ready_total", None] == 0
    assert seen["jaxserve:executables_planned", None] == 7
    assert seen["jaxserve:executables_ready", None] == 7
    assert seen["jaxserve:compile_seconds_total", None] > 0
    assert seen["jaxserve:padded_rows_total", None] == capture["padded_rows"]
    for shape, steps in capture["replays"].items():
        rows = shape.split("x")[0]
        assert seen["jaxserve:executable_replays_total", rows] == steps


@pytest.mark.parametrize("kept", [False, True])
def test_a_tokenizer_that_is_missing_or_foreign_is_refused_before_a_weight_is_read(tmp_path, kept):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 100}))
    if kept:
        byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    lines: list[str] = []
    with pytest.raises(ConfigError, match="--tokenizer"):
        build_app(
            ServeSettings(
                engine=EngineConfig(),
                checkpoint=CheckpointSettings(model=str(tmp_path), load_format="dummy"),
                server=ServerSettings(),
            ),
            report=lines.append,
            progress=lambda what, done, total: None,
            on_death=lambda error: None,
        )
    assert lines == []


def test_the_boot_report_names_every_phase_from_the_start_of_the_process_to_ready(booted):
    _, lines = booted
    assert lines[-1].startswith("booted in ")
    phases = [part.split()[0] for part in lines[-1].split(": ", 1)[1].split(", ")]
    assert phases == [*PHASES, "app"]
