"""Models by hub id, through huggingface_hub and its cache."""

from __future__ import annotations

import re
from pathlib import Path

from jaxserve.errors import CheckpointError

_DESCRIPTION = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


def is_hub_id(name: str) -> bool:
    """True for ``owner/name`` as the hub spells it."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) is not None


def fetch_from_hub(repo_id: str, *, weights: bool) -> Path:
    """A local directory with the files this engine reads; cached ones are not fetched again.

    The library draws its own progress bars and reads its own settings (HF_TOKEN, HF_HOME,
    HF_HUB_OFFLINE). Raises CheckpointError.
    """
    from huggingface_hub import snapshot_download  # slow to import, and rarely needed

    patterns = [*_DESCRIPTION, *(_WEIGHTS if weights else ())]
    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns))
    # The library's own errors, its HTTP client's and the system's share no base; the reason is
    # their first line.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{repo_id}: no such local path, and the hub gave no copy ({reason}); pass a "
            "directory or a GGUF file, or check the name, HF_TOKEN and the connection"
        ) from error
