"""What an operator asks of a server process, as the launcher's flags say it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jaxserve.config import BootConfig, EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.serve.logs import LogFormat

LoadFormat = Literal["auto", "safetensors", "gguf", "orbax", "dummy"]


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Which weights and tokenizer: names or paths; None is the default model, or the model's."""

    model: str | None = None
    tokenizer: str | None = None
    load_format: LoadFormat = "auto"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The HTTP side. ``chat_template`` is a template's text and replaces the checkpoint's.

    ``served_model_names`` empty: the checkpoint's name. ``max_queued_requests`` may wait beside
    ``max_num_seqs`` that run. ``request_timeout_s`` is what a request may take, queued and running,
    ``shutdown_grace_s`` what running requests get to finish. ``allowed_origins`` are those of web
    pages that may call ("*": any). /update_weights reads checkpoints under
    ``update_weights_dir``.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    max_queued_requests: int = 1024
    request_timeout_s: float | None = None
    shutdown_grace_s: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    enable_admin: bool = False
    update_weights_dir: Path | None = None
    enable_prompt_tokens_details: bool = False
    trust_request_chat_template: bool = False
    metrics_prefix: str = "jaxserve"
    log_format: LogFormat = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: use 0 (any free one) to 65535, e.g. 8000")
        if self.update_weights_dir is not None:
            if not self.enable_admin:
                raise ConfigError("--update-weights-dir is for /update_weights: add --enable-admin")
            if not self.update_weights_dir.is_dir():
                raise ConfigError(f"--update-weights-dir {self.update_weights_dir}: no directory")
        if self.max_queued_requests < 0:
            raise ConfigError(
                f"--max-queued-requests {self.max_queued_requests}: must be at least 0, e.g. 1024"
            )
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ConfigError(
                f"--metrics-prefix {self.metrics_prefix!r}: letters, digits and _, e.g. vllm"
            )
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            raise ConfigError(
                f"--request-timeout {self.request_timeout_s}: seconds, more than 0, e.g. 600"
            )
        if not 0 <= self.shutdown_grace_s < float("inf"):
            raise ConfigError(
                f"--shutdown-grace {self.shutdown_grace_s}: seconds, at least 0, e.g. 30"
            )


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """How to print the price list.

    ``target`` names a GPU, or a file, to compile for, and ``build_into`` a compile cache that keeps
    what was compiled.
    """

    format: Literal["text", "json"] = "text"
    target: str | None = None
    build_into: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Everything `scripts/serve.py` was asked for; with a ``plan`` it prints that and exits."""

    engine: EngineConfig
    checkpoint: CheckpointSettings
    server: ServerSettings
    boot: BootConfig = field(default_factory=BootConfig)
    plan: PlanSettings | None = None
