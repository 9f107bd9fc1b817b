"""The door to the attention kernels."""

from typing import get_args

from jaxserve_kernels import IMPLEMENTATIONS

from jaxserve.config import AttentionBackend


def test_the_backends_that_may_be_asked_for_are_those_the_kernels_have():
    assert set(get_args(AttentionBackend)) == set(IMPLEMENTATIONS)
