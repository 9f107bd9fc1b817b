"""The launcher's flags: names operators know, and refusals of one line."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxserve
from jaxserve.config import BootConfig, EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.serve import flags
from jaxserve.serve.settings import CheckpointSettings, ServerSettings

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve.py"


def load_script():
    spec = importlib.util.spec_from_file_location("serve_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


serve = load_script()


def parse(*argv: str, **environ: str):
    return serve.parse_args(argv, environ)


def test_without_flags_the_records_own_defaults_hold():
    settings = parse()
    assert settings.engine == EngineConfig()
    assert settings.checkpoint == CheckpointSettings()
    assert settings.server == ServerSettings()
    cache_dir = Path.home() / ".cache" / "jaxserve" / "executables"
    assert settings.boot == BootConfig(compile_cache_dir=cache_dir)


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["here"], "checkpoint.model", "here"),
        (["--model", "here"], "checkpoint.model", "here"),
        (["--weights", "here"], "checkpoint.model", "here"),
        (["--model-path", "here"], "checkpoint.model", "here"),
        (["--tokenizer", "t"], "checkpoint.tokenizer", "t"),
        (["--load-format", "dummy"], "checkpoint.load_format", "dummy"),
        (
            ["--served-model-name", "a", "--model-name", "b"],
            "server.served_model_names",
            ("a", "b"),
        ),
        (["--host", "0.0.0.0"], "server.host", "0.0.0.0"),
        (["--port", "0"], "server.port", 0),
        (["--api-key", "a", "--api-key", "b"], "server.api_keys", ("a", "b")),
        (["--chat-template", "{{ messages }}"], "server.chat_template", "{{ messages }}"),
        (["--trust-request-chat-template"], "server.trust_request_chat_template", True),
        (["--max-queued-requests", "5"], "server.max_queued_requests", 5),
        (["--shutdown-grace", "2.5"], "server.shutdown_grace_s", 2.5),
        ([], "server.request_timeout_s", None),
        (["--request-timeout", "60"], "server.request_timeout_s", 60.0),
        ([], "server.allowed_origins", ()),
        (["--allowed-origins", '["*"]'], "server.allowed_origins", ("*",)),
        (
            ["--allowed-origins", '["https://a.example", "http://localhost:3000"]'],
            "server.allowed_origins",
            ("https://a.example", "http://localhost:3000"),
        ),
        ([], "server.enable_admin", False),
        (["--enable-admin"], "server.enable_admin", True),
        (["--log-format", "json"], "server.log_format", "json"),
        (["--metrics-prefix", "vllm"], "server.metrics_prefix", "vllm"),
        (["--log-level", "error"], "server.log_level", "error"),
        (["--dtype", "bfloat16"], "engine.dtype", "bfloat16"),
        (["--max-model-len", "100"], "engine.max_model_len", 100),
        (["--context-length", "100"], "engine.max_model_len", 100),
        (["--max-num-seqs", "3"], "engine.max_num_seqs", 3),
        (["--max-batch-size", "3"], "engine.max_num_seqs", 3),
        (["--max-running-requests", "3"], "engine.max_num_seqs", 3),
        (["--max-num-batched-tokens", "64"], "engine.max_num_batched_tokens", 64),
        (["--gpu-memory-utilization", "0.5"], "engine.gpu_memory_utilization", 0.5),
        (["--utilization", "0.5"], "engine.gpu_memory_utilization", 0.5),
        (["--mem-fraction-static=0.5"], "engine.gpu_memory_utilization", 0.5),
        (["--block-size", "32"], "engine.block_size", 32),
        (["--page-size", "32"], "engine.block_size", 32),
        (["--num-gpu-blocks-override", "9"], "engine.num_blocks", 9),
        (["--num-blocks", "9"], "engine.num_blocks", 9),
        (["--kv-cache-memory-bytes", "9"], "engine.kv_cache_memory_bytes", 9),
        (["--kv-cache-bytes", "9"], "engine.kv_cache_memory_bytes", 9),
        (["--attention-backend", "streamed"], "engine.attention_backend", "streamed"),
        (["--enable-prefix-caching"], "engine.enable_prefix_caching", True),
        (["--no-enable-prefix-caching"], "engine.enable_prefix_caching", False),
        (["--seed", "7"], "engine.seed", 7),
        (["--plan"], "plan.format", "text"),
        (["--plan", "--format", "json"], "plan.format", "json"),
        (["--plan", "--target", "h200"], "plan.target", "h200"),
        (["--plan", "--compile-cache-dir", "here"], "plan.build_into", Path("here")),
        (["--plan"], "plan.build_into", None),
        (["--no-warm"], "boot.warm", False),
        (["--warm-rows", "4"], "boot.warm_rows", 4),
        (["--warm-width", "256"], "boot.warm_width", 256),
        (["--allow-late-compile"], "boot.allow_late_compile", True),
        (["--compile-cache-dir", "/tmp/x"], "boot.compile_cache_dir", Path("/tmp/x")),
        (["--compile-cache-dir", "none"], "boot.compile_cache_dir", None),
    ],
)
def test_a_flag_and_its_aliases_set_one_field(argv, field, value):
    record, name = field.split(".")
    assert getattr(getattr(parse(*argv), record), name) == value


@pytest.mark.parametrize(
    ("argv", "switches"),
    [
        ([], (True, True, True)),
        (["--cuda-graphs"], (True, True, True)),
        (["--no-cuda-graphs"], (False, False, False)),
        (["--enforce-eager"], (True, False, False)),
    ],
)
def test_one_flag_sets_the_three_switches(argv, switches):
    engine = parse(*argv).engine
    assert (engine.bucket_decode, engine.persist_inputs, engine.capture_decode) == switches


def test_the_cache_follows_xdg_and_a_relative_root_is_ignored():
    found = parse(XDG_CACHE_HOME="/caches").boot.compile_cache_dir
    assert found == Path("/caches/jaxserve/executables")
    assert parse(XDG_CACHE_HOME="caches").boot == parse().boot


def test_the_environments_key_counts_unless_a_flag_gives_one():
    assert parse(JAXSERVE_API_KEY="e").server.api_keys == ("e",)
    assert parse("--api-key", "f", JAXSERVE_API_KEY="e").server.api_keys == ("f",)
    assert parse(JAXSERVE_API_KEY="").server.api_keys == ()


def test_a_chat_template_may_be_a_file(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("hello {{ x }}")
    assert parse("--chat-template", str(path)).server.chat_template == "hello {{ x }}"


def test_a_chat_template_that_does_not_parse_is_refused_with_its_file(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("a\nb {% endfor %}")
    with pytest.raises(ConfigError, match=f"^--chat-template {path}: .*line 2"):
        parse("--chat-template", str(path))


@pytest.fixture
def help_entries(capsys) -> dict[str, str]:
    """What --help says of each flag, by its first name."""
    with pytest.raises(SystemExit) as left:
        parse("--help")
    assert left.value.code == 0
    listed = capsys.readouterr().out.partition("positional arguments:\n")[2]
    entries = [" ".join(entry.split()) for entry in re.split(r"(?m)^  (?=\S)", listed)]
    return {re.split(r"[ ,]", entry)[0]: entry for entry in entries if entry}


@pytest.mark.parametrize(
    ("flag", "default"),
    [
        ("--host", "127.0.0.1"),
        ("--port", "8000"),
        ("--max-model-len", "2048"),
        ("--max-num-seqs", "8"),
        ("--max-num-batched-tokens", "512"),
        ("--shutdown-grace", "30.0"),
        ("--block-size", "16"),
        ("--gpu-memory-utilization", "0.9"),
        ("--max-queued-requests", "1024"),
        ("--seed", "0"),
        ("MODEL", "SmolLM2-135M-Instruct, downloaded once"),
    ],
)
def test_help_says_what_holds_without_a_flag(help_entries, flag, default):
    assert f"(default: {default})" in help_entries[flag]


def test_help_has_a_text_for_every_flag_and_names_the_environments_key(help_entries):
    assert len(help_entries) > 30
    for entry in help_entries.values():
        names = r"-{0,2}[\w-]+( (\{\S+\}|[A-Z_]+|\S+\|\S+))?"  # a flag and its value's name
        assert re.sub(f"^{names}(, {names})*", "", entry), entry
    assert "JAXSERVE_API_KEY" in help_entries["--api-key"]


def test_a_flag_of_one_record_is_the_only_field_of_its_name():
    names = [f.name for kind in flags.RECORDS for f in dataclasses.fields(kind)]
    assert len(names) == len(set(names))  # a flag's destination says whose default it has


def test_version_prints_the_packages_own(capsys):
    with pytest.raises(SystemExit) as left:
        parse("--version")
    assert left.value.code == 0
    assert capsys.readouterr().out == f"jaxserve {jaxserve.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "flag", "works"),
    [
        (["--port", "http"], "--port", "e.g. 8000"),
        (["--seed", "abc"], "--seed", "e.g. 0"),
        (["--num-blocks", "x"], "--num-blocks", "e.g. 4096"),
        (["--port", "70000"], "--port", "e.g. 8000"),
        (["--max-model-len", "2.5"], "--max-model-len", "e.g. 2048"),
        (["--max-num-seqs", "0"], "--max-num-seqs", "at least 1"),
        (["--gpu-memory-utilization", "90"], "--gpu-memory-utilization", "0.9"),
        (["--gpu-memory-utilization", "nan"], "--gpu-memory-utilization", "0.9"),
        (["--block-size", "12"], "--block-size", "power of two"),
        (["--dtype", "int8"], "--dtype", "bfloat16"),
        (["--load-format", "zip"], "--load-format", "safetensors"),
        (["--attention-backend", "flash"], "--attention-backend", "streamed"),
        (["--max-num-sqs", "3"], "--max-num-sqs", "--max-num-seqs"),
        (["--max-num", "3"], "--max-num", "--max-num-seqs"),
        (["a", "b"], "b", "--help"),
        (["a", "--model", "b"], "--model", "leave one out"),
        (["--port"], "--port", "needs a value, e.g. --port 8000"),
        (["--load-format"], "--load-format", "needs a value, e.g. --load-format auto"),
        (["--weights"], "--model", "needs a value, e.g. --model owner/name"),
        (["--served-model-name", ""], "--served-model-name", "give a word"),
        (["--chat-template", "a\n{% if %}"], "--chat-template", "line 2"),
        (["--api-key", ""], "--api-key", "give a word"),
        (["--chat-template", "/none/such"], "--chat-template", "jinja file"),
        (["--shutdown-grace", "inf"], "--shutdown-grace", "e.g. 30"),
        (["--request-timeout", "0"], "--request-timeout", "e.g. 600"),
        (["--request-timeout", "nan"], "--request-timeout", "e.g. 600"),
        (["--allowed-origins", "https://a.example"], "--allowed-origins", "JSON list"),
        (["--allowed-origins", '["a.example"]'], "--allowed-origins", "JSON list"),
        (["--allowed-origins", '["https://a.example/"]'], "--allowed-origins", "without a path"),
        (["--allowed-origins", "[1]"], "--allowed-origins", "JSON list"),
        (["--max-queued-requests", "-1"], "--max-queued-requests", "e.g. 1024"),
        (["--metrics-prefix", "a b"], "--metrics-prefix", "e.g. vllm"),
        (["--warm-rows", "0"], "--warm-rows", "at least 1"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size", "--help lists"),
        (["--update-weights-dir", "/"], "--update-weights-dir", "add --enable-admin"),
        (["--enable-admin", "--update-weights-dir", "/none"], "/none", "no directory"),
        (["--enforce-eager", "--cuda-graphs"], "--enforce-eager", "leave --cuda-graphs"),
    ],
)
def test_a_wrong_value_is_one_line_with_the_flag_and_a_value_that_works(argv, flag, works):
    with pytest.raises(ConfigError) as refused:
        parse(*argv)
    message = str(refused.value)
    assert flag in message
    assert works in message
    assert "\n" not in message


def test_memory_is_claimed_for_jax_unless_the_operator_already_did():
    environ: dict[str, str] = {}
    serve.claim_memory(environ, 0.8)
    assert environ == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.8"}
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        environ = {name: "x"}
        serve.claim_memory(environ, 0.8)
        assert environ == {name: "x"}


def test_a_wrong_flag_exits_2_with_one_line_before_jax_is_imported():
    code = (
        "import sys, runpy\n"
        "sys.modules['jax'] = None\n"  # importing it now raises
        f"sys.argv = ['serve.py', '--port', 'x']\nrunpy.run_path({str(SCRIPT)!r}, "
        "run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=SCRIPT.parents[1]
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "serve.py: --port: 'x' is not a whole number, e.g. 8000\n"
