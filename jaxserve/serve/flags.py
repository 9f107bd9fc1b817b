"""The launcher's flags: their names, the fields they set, and their help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, get_args

from jaxserve import __version__
from jaxserve.checkpoint.demo import DEMO_NAME
from jaxserve.config import AttentionBackend, BootConfig, EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.serve.settings import CheckpointSettings, PlanSettings, ServerSettings

RECORDS = (EngineConfig, CheckpointSettings, ServerSettings, BootConfig, PlanSettings)


class FlagParser(argparse.ArgumentParser):
    """Refuses with one line that names the flag and, where it can, a value that would work.

    Flags are named as vLLM names them, other engines' spellings are aliases. A flag that is not
    given stays out of the namespace: defaults live in the records, and the help reads them there.
    """

    def __init__(self) -> None:
        super().__init__(
            prog="serve.py",
            description="Serve a model over the OpenAI API.",
            epilog="JAXSERVE_API_KEY in the environment is a key where no --api-key is given.",
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        self._record_defaults = {f.name: f.default for kind in RECORDS for f in fields(kind)}
        self._examples: dict[str, Any] = {}
        self.add_argument("--version", action="version", version=f"jaxserve {__version__}")
        self._add_checkpoint()
        self._add_server()
        self._add_engine()
        self._add_boot()
        self._add_plan()

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        message = message.removeprefix("argument ")
        flag, _, fault = message.partition(": ")
        flag = flag.partition("/")[0]
        if fault == "expected one argument" and flag in self._examples:
            raise ConfigError(f"{flag}: needs a value, e.g. {flag} {self._examples[flag]}")
        raise ConfigError(message)

    def _value(
        self,
        *flags: str,
        help: str,
        kind: type[int] | type[float] | None = None,
        example: Any = None,
        **options: Any,
    ) -> None:
        """A flag with one value; ``example`` is one that works, by default the record's."""
        action = self.add_argument(*flags, help=help, **options)
        default = self._record_defaults[action.dest]
        if default is not None and default != ():
            action.help = f"{help} (default: {default})"
        self._examples[flags[0]] = default if example is None else example
        if kind is not None:
            action.metavar = "N"
            action.type = _number(kind, self._examples[flags[0]])

    def _add_checkpoint(self) -> None:
        self.add_argument(
            "positional_model",
            metavar="MODEL",
            nargs="?",
            help=f"a Hugging Face directory, a GGUF file or a hub id (default: {DEMO_NAME}, "
            "downloaded once)",
        )
        self._value(
            "--model", "--weights", "--model-path", example="owner/name", help="MODEL, as a flag"
        )
        self._value(
            "--tokenizer",
            example="owner/name",
            help="a directory, a GGUF file or a hub id to take the tokenizer from, in place of "
            "the model's own",
        )
        self._value(
            "--load-format",
            choices=["auto", "safetensors", "gguf", "orbax", "dummy"],
            help="what the weights are read from; dummy reads a config only and makes random ones",
        )

    def _add_server(self) -> None:
        self._value(
            "--served-model-name",
            "--model-name",
            dest="served_model_names",
            metavar="NAME",
            action="append",
            example="my-model",
            help="the name requests give; may be given several times (default: the model's)",
        )
        self._value("--host", help="address to listen on; 0.0.0.0 is every one of this machine")
        self._value("--port", kind=int, help="0 takes any free port")
        self._value(
            "--api-key",
            dest="api_keys",
            metavar="KEY",
            action="append",
            example="a-secret-word",
            help="a key that requests must bear; may be given several times "
            "(default: JAXSERVE_API_KEY, or none)",
        )
        self._value(
            "--chat-template",
            example="chat.jinja",
            help="a jinja file, or the template itself (default: the model's)",
        )
        self._value(
            "--max-queued-requests", kind=int, help="requests that may wait; more get a 429"
        )
        self._value(
            "--request-timeout",
            dest="request_timeout_s",
            kind=float,
            example=600,
            help="seconds that a request may take, waiting and running (default: no limit)",
        )
        self._value(
            "--shutdown-grace",
            dest="shutdown_grace_s",
            kind=float,
            help="seconds that running requests get to finish when the server is stopped",
        )
        self._value(
            "--allowed-origins",
            metavar="JSON",
            example='["https://chat.example.org"]',
            help='a JSON list of the origins whose web pages may call; ["*"] is any '
            "(default: none)",
        )
        self.add_argument(
            "--enable-admin",
            action="store_true",
            help="add the routes /pause, /resume, /sleep, /wake_up, /update_weights, "
            "/reset_prefix_cache, /start_profile and /stop_profile, for who has an api key or, "
            "where there is none, for this machine",
        )
        self.add_argument(
            "--update-weights-dir",
            type=Path,
            metavar="DIR",
            help="where /update_weights may read checkpoints (default: nowhere)",
        )
        self.add_argument(
            "--enable-prompt-tokens-details",
            action="store_true",
            help="tell in usage.prompt_tokens_details how many prompt tokens were cached",
        )
        self.add_argument(
            "--trust-request-chat-template",
            action="store_true",
            help="let requests bring a chat template of their own; one that never ends keeps a "
            "thread busy for ever",
        )
        self._value(
            "--metrics-prefix",
            help="first word of each metric's name; with vllm, dashboards made for vLLM work",
        )
        self._value(
            "--log-level",
            choices=["debug", "info", "warning", "error"],
            help="info logs each request and, while there are any, what the engine does; debug "
            "also probes and the HTTP server's own lines",
        )
        self._value(
            "--log-format",
            choices=["text", "json"],
            help="text is key=value pairs; json makes every line an object",
        )

    def _add_engine(self) -> None:
        self._value(
            "--dtype",
            choices=["auto", "float32", "bfloat16", "float16"],
            help="of weights, activations and KV; auto is the checkpoint's, on a CPU float32",
        )
        self._value(
            "--max-model-len",
            "--context-length",
            kind=int,
            help="most tokens of a request, prompt and answer together; without the flag a model "
            "that was trained for less sets its own",
        )
        self._value(
            "--max-num-seqs",
            "--max-batch-size",
            "--max-running-requests",
            kind=int,
            help="most requests that run at once",
        )
        self._value("--max-num-batched-tokens", kind=int, help="most tokens of one step")
        self._value(
            "--gpu-memory-utilization",
            "--utilization",
            "--mem-fraction-static",
            kind=float,
            help="share of the whole device that this process may take",
        )
        self._value("--block-size", "--page-size", kind=int, help="tokens of a KV block")
        self._value(
            "--num-gpu-blocks-override",
            "--num-blocks",
            dest="num_blocks",
            kind=int,
            example=4096,
            help="KV blocks to hold (default: as many as the memory allows)",
        )
        self._value(
            "--kv-cache-memory-bytes",
            "--kv-cache-bytes",
            kind=int,
            example=2**30,
            help="bytes of the KV pool (default: what the memory allows)",
        )
        self._value(
            "--attention-backend",
            choices=get_args(AttentionBackend),
            help="how the KV cache is read: as one gathered rectangle or streamed in tiles; "
            "auto is the streamed kernel for the platform",
        )
        self.add_argument(
            "--enable-prefix-caching",
            action=argparse.BooleanOptionalAction,
            help="keep the KV blocks of earlier requests for those that begin with the same tokens "
            "(the default)",
        )
        self._value("--seed", kind=int, help="of the sampling of requests that bring none")
        self.add_argument(
            "--deterministic",
            action="store_true",
            help="give every request bit for bit what it gets alone, whoever else is served: one "
            "size of every step, slower at few requests",
        )

    def _add_boot(self) -> None:
        self.add_argument(
            "--cuda-graphs",
            action=argparse.BooleanOptionalAction,
            help="compile every step before the first request, over bucketed shapes and inputs "
            "that stay where they are (the default); --no-cuda-graphs compiles each exact shape "
            "when it is first met",
        )
        self.add_argument(
            "--enforce-eager",
            action="store_true",
            help="no ahead-of-time list: each bucket is compiled when it is first met",
        )
        self._value(
            "--compile-cache-dir",
            metavar="DIR|none",
            example="none",
            help="where compiled steps are kept for the next boot; none keeps nothing "
            "(default: in the user's cache)",
        )
        self.add_argument(
            "--no-warm",
            dest="warm",
            action="store_false",
            help="do not run each executable once before the first request",
        )
        self._value(
            "--warm-rows",
            kind=int,
            example=8,
            help="compile no decode of more rows than this ahead of time (default: all)",
        )
        self._value(
            "--warm-width",
            kind=int,
            example=1024,
            help="compile no decode over more tokens of context than this ahead of time; only "
            "where decode reads a rectangle (default: all)",
        )
        self.add_argument(
            "--allow-late-compile",
            action="store_true",
            help="compile a shape outside the list when a request meets it, instead of refusing "
            "to boot with a list that does not cover what is served",
        )

    def _add_plan(self) -> None:
        self.add_argument(
            "--plan", action="store_true", help="print what would be compiled and held, and exit"
        )
        self._value("--format", choices=["text", "json"], help="how --plan prints")
        self._value(
            "--target",
            metavar="h200|a100|l40|FILE",
            example="h200",
            help="the GPU --plan compiles for, which need not be here (default: this machine's)",
        )


def _number(kind: type[int] | type[float], example: float) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}, e.g. {example}") from None

    return convert
