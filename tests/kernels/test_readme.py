"""The example of the library's README does what the text says."""

import re
from pathlib import Path

import jax.numpy as jnp
import jaxserve_kernels
import numpy as np


def test_the_readmes_example_runs():
    text = (Path(jaxserve_kernels.__file__).parent / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec(example, names)
    prompt, token = (np.asarray(names[x].astype(jnp.float32)) for x in ("prompt", "token"))
    assert prompt.shape == (5, 8, 128)
    np.testing.assert_array_equal(prompt, 1.0)  # values that are all one average to one
    np.testing.assert_array_equal(token, np.broadcast_to([[[1.0]], [[0.0]]], (2, 8, 128)))
