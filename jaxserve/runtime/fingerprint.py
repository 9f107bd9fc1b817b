"""What an executable depends on besides its own shapes: versions, device, flags and source."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

import jax

# Programs are traced from these; whatever else changes leaves the executables as they are.
_SOURCES = (
    "jaxserve.config",
    "jaxserve.model",
    "jaxserve.plan.batch",
    "jaxserve.runtime.executables",
    "jaxserve.runtime.steps",
    "jaxserve_kernels",
)
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")


def _digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def source_digest() -> str:
    """Digest of the source of the steps, the model and the kernels."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        spec = util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no source of {name}")
        origin = Path(spec.origin)
        files = sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else [origin]
        for file in files:
            digest.update(f"{name}/{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _versions() -> str:
    found = []
    for name in ("jax", "jaxlib", *_PLUGINS):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def host_digest() -> str:
    """What code compiled for this host may use: its instructions and how many cores share work."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [platform.processor()]
    wanted = ("flags", "Features", "model name")
    cpu = sorted({line for line in lines if line.startswith(wanted)} or set(lines))
    affinity = getattr(os, "sched_getaffinity", None)
    cores = os.cpu_count() if affinity is None else len(affinity(0))
    return _digest("\n".join([platform.machine(), str(cores), *cpu]))


def environment_parts(xla_flags: str, devices: Sequence[Any] | None = None) -> Mapping[str, str]:
    """The part of every key that is the same for a whole process.

    ``xla_flags`` is the value of XLA_FLAGS. ``devices`` are those compiled for, which need not be
    here; None: this process's own.
    """
    devices = jax.devices() if devices is None else devices
    kind = devices[0].platform
    # Settings of JAX's own cache change no program, nor does which platforms it may look for.
    settings = {
        k: str(v) for k, v in jax.config.values.items() if "cache" not in k and k != "jax_platforms"
    }
    return {
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "platform": kind,
        "host": host_digest() if kind == "cpu" else "any",
        "versions": _versions(),  # of a GPU's plugin too, which brings its own compiler
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",  # a pickle's reader
        "xla_flags": xla_flags,
        "jax_settings": _digest(repr(sorted(settings.items()))),
        "source": source_digest(),
    }
