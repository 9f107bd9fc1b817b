"""Serve a model over the OpenAI API: `python scripts/serve.py [MODEL] [flags]`.

With --plan it prints what such a server would compile and hold, and exits.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from jaxserve.config import BootConfig, EngineConfig
from jaxserve.errors import BootError, CheckpointError, ConfigError
from jaxserve.serve.flags import FlagParser
from jaxserve.serve.launch import (
    BuildApp,
    OnDeath,
    OnPhase,
    OnProgress,
    Serving,
    bind,
    run_server,
)
from jaxserve.serve.logs import Log, LogWriter, log_line, no_log
from jaxserve.serve.settings import (
    CheckpointSettings,
    PlanSettings,
    ServerSettings,
    ServeSettings,
)
from jaxserve.serve.text import compile_template

_BAR_DELAY_S = 0.5  # what is over sooner flashes no bar
_LINE_EVERY_S = 10.0  # in a log, which is no terminal
_LAST_LINES_S = 1.0  # for the log to be written when the process ends


def parse_args(argv: Sequence[str], environ: Mapping[str, str]) -> ServeSettings:
    """The settings asked for. Raises ConfigError in one line, and SystemExit after --help."""
    parser = FlagParser()
    space, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1, cutoff=0.75)
        hint = f"; did you mean {near[0]}?" if near else "; --help lists the flags"
        raise ConfigError(f"unknown argument {unknown[0]}{hint}")
    given = vars(space)
    positional = given.pop("positional_model", None)
    if positional is not None and given.setdefault("model", positional) != positional:
        raise ConfigError(f"--model {given['model']}: {positional} was given too; leave one out")
    given["api_keys"] = tuple(given.get("api_keys", ())) or tuple(
        key for key in [environ.get("JAXSERVE_API_KEY", "")] if key
    )
    if not all(given["api_keys"]):
        raise ConfigError("--api-key: an empty key would admit nobody; give a word, or no flag")
    given["served_model_names"] = tuple(given.get("served_model_names", ()))
    if not all(given["served_model_names"]):
        raise ConfigError("--served-model-name: a name is empty; give a word, or no flag")
    if "allowed_origins" in given:
        given["allowed_origins"] = _origins(given["allowed_origins"])
    if "chat_template" in given:
        given["chat_template"] = _chat_template(given["chat_template"])

    given |= _switches(given.pop("cuda_graphs", None), given.pop("enforce_eager", False))
    named_cache = "compile_cache_dir" in given
    given["compile_cache_dir"] = _cache_dir(given.get("compile_cache_dir"), environ)

    def of(record: type[Any]) -> Any:
        return record(**{f.name: given[f.name] for f in fields(record) if f.name in given})

    if named_cache:  # a plan fills no cache that was not named
        given["build_into"] = given["compile_cache_dir"]
    for name in ("format", "target"):
        if name in given and "plan" not in given:
            raise ConfigError(f"--{name} {given[name]}: says how --plan prints; add --plan")
    return ServeSettings(
        engine=of(EngineConfig),
        checkpoint=of(CheckpointSettings),
        server=of(ServerSettings),
        boot=of(BootConfig),
        plan=of(PlanSettings) if "plan" in given else None,
    )


def _origins(value: str) -> tuple[str, ...]:
    try:
        origins = json.loads(value)
    except ValueError:
        origins = None
    if not isinstance(origins, list) or not all(
        isinstance(origin, str) and re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/]+", origin)
        for origin in origins
    ):
        raise ConfigError(
            f"--allowed-origins {value}: give a JSON list of origins, without a path, e.g. "
            """'["https://chat.example.org"]' or '["*"]'"""
        )
    return tuple(origins)


def _switches(cuda_graphs: bool | None, enforce_eager: bool) -> dict[str, bool]:
    """The engine's three switches; the engine itself refuses two out of three."""
    if enforce_eager:
        if cuda_graphs is not None:
            raise ConfigError("--enforce-eager: leave --cuda-graphs and --no-cuda-graphs out")
        return {"bucket_decode": True, "persist_inputs": False, "capture_decode": False}
    names = ("bucket_decode", "persist_inputs", "capture_decode")
    return dict.fromkeys(names, cuda_graphs is not False)


def _cache_dir(given: str | None, environ: Mapping[str, str]) -> Path | None:
    if given == "none":
        return None
    if given:
        return Path(given)
    root = Path(environ.get("XDG_CACHE_HOME", ""))
    return (root if root.is_absolute() else Path.home() / ".cache") / "jaxserve" / "executables"


def _chat_template(value: str) -> str:
    """The template's text, checked here: a fault in it would end the boot at its very end."""
    source, named = value, "--chat-template"
    if "{{" not in value and "{%" not in value:
        named = f"--chat-template {value}"
        try:
            source = Path(value).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{named}: {error}; give a jinja file, or a text with {{{{ }}}}"
            ) from error
    try:
        compile_template(source)
    except CheckpointError as error:
        raise ConfigError(f"{named}: {error}") from error
    return source


def claim_memory(environ: Any, share: float) -> None:
    """Tells JAX, before it is imported, to take ``share`` of the device unless told otherwise."""
    if not {"XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & set(environ):
        environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(share)


def _print_plan(settings: ServeSettings, plan: PlanSettings) -> int:
    # A server may run on this machine's device; what a plan compiles takes little of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jaxserve.checkpoint.load import load_checkpoint
    from jaxserve.pricing import price_deployment
    from jaxserve.runtime.cross_compile import Build
    from jaxserve.runtime.targets import load_target

    build = None
    if plan.build_into is not None:
        build = Build(plan.build_into, os.environ.get("XLA_FLAGS", ""))
    try:
        target = None if plan.target is None else load_target(plan.target)
        checkpoint = load_checkpoint(  # no weights are read
            settings.checkpoint.model, load_format="dummy", progress=Progress()
        )
        prices = price_deployment(
            checkpoint,
            settings.engine,
            settings.boot,
            target,
            build=build,
            progress=Progress(),
            report=lambda line: print(line, file=sys.stderr),
        )
    except BootError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 1
    print(json.dumps(prices.as_dict(), indent=2) if plan.format == "json" else prices.describe())
    return 0


def _say(line: str) -> None:
    tqdm.write(line)  # above a progress bar, where there is one
    sys.stdout.flush()


def _say_json(line: str) -> None:
    print(log_line("json", time.time(), "server", {"message": line}), flush=True)


def _say_death(error: BaseException, log: Log | None) -> None:
    """Why the engine ended, with its traceback."""
    if log is not None:
        log("death", {"traceback": "".join(traceback.format_exception(error))})
        return
    print("serve.py: the engine ended", file=sys.stderr)
    traceback.print_exception(error)


def no_progress(what: str, done: int, total: int) -> None:
    """For logs that only machines read; /ready tells it as well."""


class Progress:
    """Of one thing at a time: a bar on a terminal's stderr, elsewhere a line now and then.

    What counts more than 100,000 is counted in bytes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bar: tqdm | None = None
        self._last: tuple[str, int, int] | None = None
        self._said_at = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        begins = self._last is None or (what, total) != self._last[::2] or done < self._last[1]
        self._last = None if done >= total else (what, done, total)
        if sys.stderr.isatty():
            self._draw(what, done, total, begins)
        elif begins or (done < total and self._clock() - self._said_at >= _LINE_EVERY_S):
            self._said_at = self._clock()
            print(f"{what}: {100 * done // total}%", file=sys.stderr, flush=True)

    def _draw(self, what: str, done: int, total: int, begins: bool) -> None:
        if begins and self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._bar is None:
            in_bytes = total > 100_000
            self._bar = tqdm(
                desc=what,
                total=total,
                leave=False,
                unit="B" if in_bytes else "it",
                unit_scale=in_bytes,
                delay=_BAR_DELAY_S,
            )
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
            self._bar = None


def _builder(settings: ServeSettings, log: Log) -> BuildApp:
    def build(on_phase: OnPhase, on_progress: OnProgress, on_death: OnDeath) -> Serving:
        from jaxserve.boot import build_app  # imports JAX, which reads its environment then

        return build_app(
            settings,
            report=on_phase,
            progress=on_progress,
            on_death=on_death,
            log=log,
            xla_flags=os.environ.get("XLA_FLAGS", ""),
        )

    return build


def main(
    argv: Sequence[str] | None = None,
    builder: Callable[[ServeSettings, Log], BuildApp] = _builder,
) -> int:
    """Returns the exit code: 0 stopped, 1 did not boot or the engine died, 2 a wrong flag."""
    try:
        settings = parse_args(sys.argv[1:] if argv is None else argv, os.environ)
    except ConfigError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 2
    server = settings.server
    claim_memory(os.environ, settings.engine.gpu_memory_utilization)
    if settings.plan is not None:
        return _print_plan(settings, settings.plan)

    in_json = server.log_format == "json"
    say = _say_json if in_json else _say
    writer = LogWriter(sys.stderr, server.log_format)
    log: Log = writer if server.log_level in ("debug", "info") else no_log
    bar = no_progress if in_json else Progress()

    def build(on_phase: OnPhase, on_progress: OnProgress, on_death: OnDeath) -> Serving:
        def tell_all(error: BaseException) -> None:
            _say_death(error, writer if in_json else None)
            on_death(error)

        def show(what: str, done: int, total: int) -> None:
            bar(what, done, total)
            on_progress(what, done, total)

        return builder(settings, log)(on_phase, show, tell_all)

    try:
        listener = bind(server.host, server.port)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        say(f"listening on {url}, starting")
        return asyncio.run(
            run_server(
                listener,
                build,
                grace_s=server.shutdown_grace_s,
                log_level=server.log_level,
                on_ready=lambda: say(f"ready: {url}/v1"),
                on_phase=say,
                log=log,
            )
        )
    except BootError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 1
    finally:
        writer.close(_LAST_LINES_S)


def _leave(code: int) -> NoReturn:
    """Exits without waiting for a thread inside the compiler or on a device that hangs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
