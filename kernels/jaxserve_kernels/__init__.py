"""Paged attention for JAX."""
