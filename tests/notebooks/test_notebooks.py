"""Every notebook runs from its first cell to its last, and is stored without outputs."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.demo_model import demo_path

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WITH_THE_DEFAULT_MODEL = {"1_quickstart"}


def read(path):
    return nbformat.read(path, as_version=4)


def marked(path):
    marks = [pytest.mark.demo] if path.stem in WITH_THE_DEFAULT_MODEL else []
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", [marked(path) for path in NOTEBOOKS])
def test_a_notebook_runs_from_its_first_cell_to_its_last(path):
    if path.stem in WITH_THE_DEFAULT_MODEL:
        demo_path()
    notebook = read(path)
    client = NotebookClient(
        notebook, timeout=500, resources={"metadata": {"path": str(path.parent)}}
    )
    found = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(found)}
    client.execute(env=environ)
    ran = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in ran] == list(range(1, len(ran) + 1))
    kinds = {kind for cell in ran for output in cell.outputs for kind in output.get("data", ())}
    assert "image/png" in kinds, "a notebook draws something"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs_and_explains_every_cell(path):
    notebook = read(path)
    nbformat.validate(notebook)
    for cell, before in zip(notebook.cells[1:], notebook.cells, strict=False):
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
            assert before.cell_type == "markdown"
            assert max(map(len, cell.source.splitlines())) <= 100


def test_there_are_six():
    assert [path.stem[0] for path in NOTEBOOKS] == list("123456")
