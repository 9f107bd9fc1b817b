"""Serve a model over the OpenAI API: `python scripts/serve.py [MODEL] [flags]`.

With --plan it prints what such a server would compile and hold, and exits.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from jaxserve.config import BootConfig, EngineConfig
from jaxserve.errors import BootError, ConfigError
from jaxserve.serve.launch import BuildApp, Serving, bind, run_server
from jaxserve.serve.settings import (
    CheckpointSettings,
    PlanSettings,
    ServerSettings,
    ServeSettings,
)

_EXAMPLES = {int: "8", float: "0.9"}


class _Parser(argparse.ArgumentParser):
    """Refuses with one line that names the flag and, where it can, a value that would work."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def _number(kind: type[int] | type[float]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(
                f"{text!r} is not {wanted}, e.g. {_EXAMPLES[kind]}"
            ) from None

    return convert


_INT, _FLOAT = _number(int), _number(float)


def _parser() -> _Parser:
    """Flags are named as vLLM names them, other engines' spellings are aliases.

    A flag that is not given stays out of the namespace: defaults live in the records.
    """
    parser = _Parser(
        prog="serve.py",
        description="Serve a model over the OpenAI API.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("positional_model", metavar="MODEL", nargs="?", help="a directory, GGUF file or hub id")
    add("--model", "--weights", "--model-path", help="the same as a flag")
    add("--tokenizer", help="directory or hub id of another tokenizer")
    add("--load-format", choices=["auto", "safetensors", "gguf", "dummy"])
    add("--served-model-name", "--model-name", dest="served_model_names", action="append")
    add("--host")
    add("--port", type=_INT, help="0 takes any free port")
    add("--api-key", dest="api_keys", action="append", help="may be given several times")
    add("--chat-template", help="a jinja file, or the template itself")
    add("--max-queued-requests", type=_INT, help="requests that may wait; more get a 429")
    add("--shutdown-grace", dest="shutdown_grace_s", type=_FLOAT, help="seconds")
    add("--metrics-prefix", help="vllm makes an existing board work")
    add("--log-level", choices=["debug", "info", "warning", "error"])
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"])
    add("--max-model-len", "--context-length", type=_INT, help="tokens")
    add("--max-num-seqs", "--max-batch-size", "--max-running-requests", type=_INT)
    add("--max-num-batched-tokens", type=_INT, help="tokens of one step")
    add(
        "--gpu-memory-utilization",
        "--utilization",
        "--mem-fraction-static",
        type=_FLOAT,
        help="share of the whole device that this process may take",
    )
    add("--block-size", "--page-size", type=_INT, help="tokens of a KV block")
    add("--num-gpu-blocks-override", "--num-blocks", dest="num_blocks", type=_INT)
    add("--kv-cache-memory-bytes", "--kv-cache-bytes", type=_INT)
    add("--attention-backend", choices=["auto", "rectangle", "streamed"])
    add("--seed", type=_INT)
    add(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        help="compile every step before the first request, over bucketed shapes and inputs that "
        "stay where they are; --no-cuda-graphs compiles each exact shape when it is first met",
    )
    add(
        "--enforce-eager",
        action="store_true",
        help="no ahead-of-time list: each bucket is compiled when it is first met",
    )
    add(
        "--compile-cache-dir",
        metavar="DIR|none",
        help="where compiled steps are kept for the next boot, by default the user's cache; "
        "none keeps nothing",
    )
    add("--no-warm", dest="warm", action="store_false", help="do not run each executable once")
    add("--warm-rows", type=_INT, help="compile no decode of more rows ahead of time")
    add("--warm-width", type=_INT, help="nor of more tokens of context (rectangle read)")
    add(
        "--allow-late-compile",
        action="store_true",
        help="compile a shape outside the list when a request meets it, instead of refusing to "
        "boot with a list that does not cover what is served",
    )
    add("--plan", action="store_true", help="print the price list and exit")
    add("--format", choices=["text", "json"], help="of --plan")
    add("--target", metavar="h200|a100|l40|FILE", help="compile --plan for a GPU that is not here")
    return parser


def parse_args(argv: Sequence[str], environ: Mapping[str, str]) -> ServeSettings:
    """The settings asked for. Raises ConfigError in one line; SystemExit 0 after --help."""
    parser = _parser()
    space, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1)
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
    if "{{" in value or "{%" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {value}: {error}; give a jinja file, or a text with {{{{ }}}}"
        ) from error


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
            settings.checkpoint.model, load_format="dummy", progress=_ProgressBar()
        )
        prices = price_deployment(
            checkpoint,
            settings.engine,
            settings.boot,
            target,
            build=build,
            progress=_ProgressBar(),
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


class _ProgressBar:
    """One bar at a time on a terminal's stderr, nothing elsewhere."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._bar is not None and (self._bar.total != total or done < self._bar.n):
            self._bar.close()
            self._bar = None
        if self._bar is None:
            self._bar = tqdm(total=total, leave=False, disable=None, unit_scale=total > 100_000)
        self._bar.set_description(what, refresh=False)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
            self._bar = None


def _builder(settings: ServeSettings) -> BuildApp:
    def build(
        on_phase: Callable[[str], None], on_death: Callable[[BaseException], None]
    ) -> Serving:
        from jaxserve.boot import build_app  # imports JAX, which reads its environment then

        return build_app(
            settings,
            report=on_phase,
            progress=_ProgressBar(),
            on_death=on_death,
            xla_flags=os.environ.get("XLA_FLAGS", ""),
        )

    return build


def main(
    argv: Sequence[str] | None = None,
    builder: Callable[[ServeSettings], BuildApp] = _builder,
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

    def on_death(error: BaseException) -> None:
        print("serve.py: the engine ended", file=sys.stderr)
        traceback.print_exception(error)

    def build(
        on_phase: Callable[[str], None], tell_server: Callable[[BaseException], None]
    ) -> Serving:
        def both(error: BaseException) -> None:
            on_death(error)
            tell_server(error)

        return builder(settings)(on_phase, both)

    try:
        listener = bind(server.host, server.port)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        _say(f"listening on {url}, starting")
        return asyncio.run(
            run_server(
                listener,
                build,
                grace_s=server.shutdown_grace_s,
                log_level=server.log_level,
                on_ready=lambda: _say(f"ready: {url}/v1"),
                on_phase=_say,
            )
        )
    except BootError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 1


def _leave(code: int) -> NoReturn:
    """Exits without waiting for a thread inside the compiler or on a device that hangs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
