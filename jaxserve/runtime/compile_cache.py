"""Compiled steps kept on disk, so that a next boot neither traces, lowers nor compiles.

An entry is one file: a line of JSON (what the executable was compiled from and what it cost), then
a pickle. Unpickling runs code, so a file is opened only when it is this user's own, nobody else may
write it and its digest is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache as jax_cache

_SUFFIX = ".jaxexe"
_MANIFEST = "manifest.json"
# What no boot has used for longest goes when the directory holds more. A list takes 10 to 100 MB.
_MOST_BYTES = 2 * 1024**3
_ABANDONED_S = 3600.0  # a temporary file this old was left by a boot that was killed
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# The pool's size is the one part of a key that two boots of one server may disagree on.
_NUM_BLOCKS = "num_blocks"


class _Unusable(Exception):
    """A file that is not loaded; the message says why."""


@dataclass(frozen=True, kw_only=True)
class EntryInfo:
    """An entry's first line. ``parts`` is all that fixes the executable; seconds, bytes."""

    name: str
    parts: Mapping[str, str]
    trace_s: float
    compile_s: float
    temp_bytes: int
    num_bytes: int
    sha256: str

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool it was compiled for."""
        return int(self.parts[_NUM_BLOCKS])


def entry_name(name: str, parts: Mapping[str, str]) -> str:
    """The file of an executable: its name for people, then a digest of ``parts``."""
    key = hashlib.sha256(json.dumps(dict(parts), sort_keys=True).encode()).hexdigest()
    return f"{name.replace(' ', '-')}-{key[:24]}{_SUFFIX}"


@contextlib.contextmanager
def keepable_compiles() -> Iterator[None]:
    """Compiles inside give executables that may be kept, and that load fast.

    They are real ones: what comes out of JAX's own persistent cache serialises to bytes that fail
    when they run. They carry no Python stack traces, which take most of the time of a trace and
    nearly half of a load.
    """
    wanted = {"jax_enable_compilation_cache": False, "jax_traceback_in_locations_limit": 0}
    before = {name: jax.config.values[name] for name in wanted}

    def update(values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            jax.config.update(name, value)
        jax_cache.reset_cache()  # whether it is enabled is remembered from the first compile

    update(wanted)
    try:
        yield
    finally:
        update(before)


class CompileCache:
    """Serialised executables in one directory of this user's; any number of boots may share it.

    Nothing here ends a boot: what cannot be read is compiled, what cannot be written is not kept,
    and ``report`` gets the reason in a line.
    """

    def __init__(self, directory: Path, report: Callable[[str], None] = lambda line: None) -> None:
        self.directory = directory
        self._report = report
        self._writable = True
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_owner(directory.stat(), directory.name)
        except (OSError, _Unusable) as error:
            self._writable = False
            self._report(
                f"compile cache off: {directory}: {_reason(error)}; name another directory "
                "with --compile-cache-dir"
            )
            self._usable = False
        else:
            self._usable = True

    @property
    def keeps(self) -> bool:
        """False once nothing more can be written."""
        return self._usable and self._writable

    def holds(self, name: str, parts: Mapping[str, str]) -> bool:
        """Whether there is a file for exactly ``parts``; ``load`` may still find it unfit."""
        return self._usable and (self.directory / entry_name(name, parts)).is_file()

    def load(
        self, name: str, parts: Mapping[str, str]
    ) -> tuple[jax.stages.Compiled, EntryInfo] | str:
        """The executable compiled from exactly ``parts``, or why there is none."""
        if not self._usable:
            return "cache off"
        path = self.directory / entry_name(name, parts)
        try:
            info, payload = self._read(path)
            if dict(info.parts) != dict(parts):
                raise _Unusable("its header is another executable's")
            compiled = serialize_executable.deserialize_and_load(*pickle.loads(payload))
        except FileNotFoundError:
            return self._why_absent(name, parts)
        except Exception as error:  # unpickling and the runtime raise anything
            self._report(f"compile cache: {path.name} is not used: {_reason(error)}")
            return _reason(error)
        with contextlib.suppress(OSError):
            os.utime(path)  # used now: the last to be dropped
        return compiled, info

    def store(
        self,
        name: str,
        parts: Mapping[str, str],
        compiled: jax.stages.Compiled,
        *,
        trace_s: float,
        compile_s: float,
        temp_bytes: int,
    ) -> None:
        """Keep an executable that was compiled in this process."""
        if not self._writable:
            return
        temporary: str | None = None
        try:
            payload = pickle.dumps(serialize_executable.serialize(compiled))
            info = EntryInfo(
                name=name,
                parts=parts,
                trace_s=trace_s,
                compile_s=compile_s,
                temp_bytes=temp_bytes,
                num_bytes=len(payload),
                sha256=hashlib.sha256(payload).hexdigest(),
            )
            # mkstemp makes it ours alone; the rename is whole or does not happen.
            handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self.directory)
            with open(handle, "wb") as file:
                file.write(json.dumps(asdict(info)).encode() + b"\n" + payload)
            os.replace(temporary, self.directory / entry_name(name, parts))
        except Exception as error:  # a backend that cannot serialise, a full disk
            self._writable = False
            self._report(f"compile cache: nothing more is kept: {name}: {_reason(error)}")
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)

    def earlier(self, name: str, parts: Mapping[str, str]) -> EntryInfo | None:
        """The entry last used that differs from ``parts`` in nothing but the pool's size."""
        wanted = {k: v for k, v in parts.items() if k != _NUM_BLOCKS}
        for info in self._named(name):
            if {k: v for k, v in info.parts.items() if k != _NUM_BLOCKS} == wanted:
                return info
        return None

    def tidy(self) -> None:
        """Drop what was used longest ago past the most bytes kept, and write the manifest.

        The manifest is for people: nothing reads it back, so boots need not agree on it.
        """
        if not self._writable:
            return
        room = _MOST_BYTES
        kept = []
        try:
            for path, status in self._files():
                room -= status.st_size
                if room < 0:
                    path.unlink(missing_ok=True)
                    continue
                with contextlib.suppress(OSError, _Unusable):
                    kept.append({"file": path.name, **asdict(self._header(path))})
            for path in self.directory.glob(".*.tmp"):
                with contextlib.suppress(FileNotFoundError):  # another boot's, renamed by now
                    if path.lstat().st_mtime < time.time() - _ABANDONED_S:
                        path.unlink()
            handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self.directory)
            with open(handle, "w", encoding="utf-8") as file:
                json.dump({"executables": kept}, file, indent=1)
            os.replace(temporary, self.directory / _MANIFEST)
        except OSError as error:
            self._report(f"compile cache: no manifest: {_reason(error)}")

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """Entries and their status, the last used first."""
        found = []
        for path in self.directory.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another boot's tidying
                found.append((path, path.lstat()))
        return sorted(found, key=lambda f: f[1].st_mtime, reverse=True)

    def _named(self, name: str) -> Iterator[EntryInfo]:
        """Entries of one step, the last used first; what may not be read is passed over."""
        if not self._usable:
            return
        prefix = name.replace(" ", "-") + "-"
        for path, _ in self._files():
            if path.name.startswith(prefix):
                with contextlib.suppress(OSError, _Unusable):
                    info = self._header(path)
                    if info.name == name:
                        yield info

    def _why_absent(self, name: str, parts: Mapping[str, str]) -> str:
        """What the closest entry of this step was compiled from instead."""
        changes = [
            [k for k in sorted(parts) if info.parts.get(k) != parts[k]]
            for info in self._named(name)
        ]
        if not changes:
            return "not compiled before"
        return f"changed: {', '.join(min(changes, key=len))}"

    @contextlib.contextmanager
    def _open(self, path: Path) -> Iterator[Any]:
        """The file, once it is known to be nobody else's; checked on what was opened.

        Without O_NONBLOCK, opening a FIFO would wait for a writer.
        """
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _Unusable("no plain file")
            self._check_owner(status, path.name)
            yield file

    @staticmethod
    def _check_owner(status: os.stat_result, name: str) -> None:
        if status.st_uid != os.getuid():
            raise _Unusable(
                f"{name} belongs to user {status.st_uid}, this process is user {os.getuid()}"
            )
        if status.st_mode & _WRITABLE_BY_OTHERS:
            raise _Unusable(
                f"others may write {name} (mode {stat.S_IMODE(status.st_mode):o}, 700 would do)"
            )

    def _header(self, path: Path) -> EntryInfo:
        with self._open(path) as file:
            return _parse(file.readline())

    def _read(self, path: Path) -> tuple[EntryInfo, bytes]:
        with self._open(path) as file:
            info = _parse(file.readline())
            payload = file.read()
        if len(payload) != info.num_bytes:
            raise _Unusable(f"truncated: {len(payload)} of {info.num_bytes} bytes")
        if hashlib.sha256(payload).hexdigest() != info.sha256:
            raise _Unusable("its digest is wrong")
        return info, payload


def _parse(line: bytes) -> EntryInfo:
    """The header in ``line``, every value of the type it should have; _Unusable otherwise."""
    try:
        info = EntryInfo(**json.loads(line))
        sound = (
            all(isinstance(text, str) for item in info.parts.items() for text in item)
            and all(isinstance(text, str) for text in (info.name, info.sha256))
            and all(isinstance(n, int) for n in (info.temp_bytes, info.num_bytes, info.num_blocks))
            and all(isinstance(s, int | float) for s in (info.trace_s, info.compile_s))
        )
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise _Unusable("its header cannot be read") from error
    if not sound:
        raise _Unusable("its header cannot be read")
    return info


def _reason(error: BaseException) -> str:
    """One line."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, _Unusable):
        return str(error)
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
