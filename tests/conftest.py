"""Strictness for every test: no silent promotion, CPU only, two hypothesis profiles."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from hypothesis import settings

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile("suite", max_examples=25, deadline=None)
settings.load_profile("suite")
