"""Arithmetic: numbers in, a frozen record or a refusal out. Standard library only."""
