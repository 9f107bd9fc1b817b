"""An OpenAI-compatible LLM server from a functional JAX engine with a paged KV pool."""

__version__ = "0.1.0"
