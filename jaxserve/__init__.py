"""An OpenAI-compatible LLM server from a functional JAX engine with a paged KV pool.

The library's front door is ``LLM``; its names are imported when first used, so that asking for the
version loads no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.config import BootConfig, EngineConfig, ModelConfig, SamplingParams
    from jaxserve.llm import LLM
    from jaxserve.outputs import CompletionOutput, RequestOutput

__version__ = "0.1.0"

_HOMES = {
    "BootConfig": "jaxserve.config",
    "CompletionOutput": "jaxserve.outputs",
    "EngineConfig": "jaxserve.config",
    "LLM": "jaxserve.llm",
    "ModelConfig": "jaxserve.config",
    "RequestOutput": "jaxserve.outputs",
    "SamplingParams": "jaxserve.config",
}

__all__ = [
    "LLM",
    "BootConfig",
    "CompletionOutput",
    "EngineConfig",
    "ModelConfig",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
