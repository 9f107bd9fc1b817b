"""Compile a deployment's steps for a GPU that this machine does not have."""

from __future__ import annotations

import re
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources, util
from multiprocessing import get_context
from pathlib import Path

from jaxserve.errors import BootError, ConfigError
from jaxserve.plan.compiled import CompiledFigures, Key
from jaxserve.runtime.cross_compile import Build, CrossCompiled, Failed, Note, cross_compile
from jaxserve.runtime.executables import StepShapes, planned_keys

_SUFFIX = ".textproto"
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


@dataclass(frozen=True)
class GpuTarget:
    """A GPU as XLA's ``GpuTargetConfigProto`` describes it in ``text``.

    ``device`` is its own name, ``memory_bytes`` what it has and ``bandwidth`` bytes a second.
    """

    device: str
    memory_bytes: int
    bandwidth: int
    text: str


def target_names() -> tuple[str, ...]:
    """The targets that come with the package."""
    files = (resources.files("jaxserve.runtime") / "gpu_targets").iterdir()
    return tuple(sorted(f.name.removesuffix(_SUFFIX) for f in files if f.name.endswith(_SUFFIX)))


def load_target(name_or_file: str) -> GpuTarget:
    """A target by name, or from a file in the format of the package's own; raises ConfigError."""
    names = target_names()
    if name_or_file in names:
        file = resources.files("jaxserve.runtime") / "gpu_targets" / f"{name_or_file}{_SUFFIX}"
        text = file.read_text(encoding="utf-8")
    else:
        try:
            text = Path(name_or_file).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: an unknown ~user
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"--target {name_or_file}: {why}; use {', '.join(names)} or a GPU target file"
            ) from error

    def field(name: str, pattern: str) -> str:
        found = re.search(rf"^\s*{name}:\s*{pattern}", text, re.MULTILINE)
        if found is None:
            raise ConfigError(
                f"--target {name_or_file}: no {name} in it; use {', '.join(names)} or a file with "
                "the fields that those have"
            )
        return found[1]

    return GpuTarget(
        device=field("device_description_str", '"([^"]+)"'),
        memory_bytes=int(field("device_memory_size", r"(\d+)")),
        bandwidth=int(field("memory_bandwidth", r"(\d+)")),
        text=text,
    )


def compile_for_target(
    target: GpuTarget,
    shapes: StepShapes,
    *,
    workers: int = 1,
    build: Build | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    report: Callable[[str], None] = lambda line: None,
) -> Mapping[Key, CompiledFigures]:
    """Compile the whole list for ``target`` in a process of its own.

    A process of its own because the compiler ends one over a kernel that its target cannot run, and
    because it must see no GPU of this machine. With a ``build`` each is kept as well, for a boot on
    that GPU. ``progress(done, total)`` is told of each, ``report`` of what cannot be kept. Raises
    ConfigError without the compiler's plugin and BootError, in a line, when a step does not
    compile.
    """
    if not any(_installed(plugin) for plugin in _PLUGINS):
        raise ConfigError(
            "--target needs XLA's compiler for NVIDIA GPUs: pip install -e '.[cross]'"
        )
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    figures: dict[Key, CompiledFigures] = {}
    total = len(planned_keys(shapes))
    with tempfile.TemporaryDirectory(prefix="jaxserve-target-") as scratch:
        said = Path(scratch) / "stderr"
        process = context.Process(
            target=cross_compile,
            args=(sender, target.text, shapes, workers, scratch, str(said), build),
            daemon=True,  # an interrupted parent takes it along
        )
        process.start()
        sender.close()  # the child's copy is now the only one, so its end is the end of the pipe
        try:
            while len(figures) < total:
                message: CrossCompiled | Failed | Note = receiver.recv()
                if isinstance(message, Note):
                    report(message.text)
                    continue
                if isinstance(message, Failed):
                    raise BootError(f"compiling {message.name} for {target.device}: {message.why}")
                figures[message.key] = message.figures
                progress(len(figures), total)
        except EOFError:
            process.join()
            raise BootError(
                f"compiling for {target.device}: its process ended {_exit(process.exitcode)} after "
                f"{len(figures)} of {total} executables: {_last_words(said)}"
            ) from None
        except BaseException:
            process.terminate()
            raise
        finally:
            process.join()
    return figures


def _installed(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is not there
        return False


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"


def _last_words(log: Path) -> str:
    """The line that says what went wrong: the log's fatal one, else its last."""
    try:
        lines = [x for x in log.read_text(errors="replace").splitlines() if x.strip()]
    except OSError:
        lines = []
    fatal = [x for x in lines if re.match(r"F\d{4} ", x)]
    return (fatal or lines or ["it said nothing"])[-1].strip()[:300]
