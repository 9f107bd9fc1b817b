"""A name or a path in; a config, a tokenizer and host tensors out."""

from jaxserve.checkpoint.demo import Progress
from jaxserve.checkpoint.load import Checkpoint, LoadFormat, load_checkpoint
from jaxserve.checkpoint.tensors import TensorSource
from jaxserve.checkpoint.tokenizer import TokenizerBundle

__all__ = [
    "Checkpoint",
    "LoadFormat",
    "Progress",
    "TensorSource",
    "TokenizerBundle",
    "load_checkpoint",
]
