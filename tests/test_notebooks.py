"""Every notebook runs from its first cell to its last, as it is in the repository."""

import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the notebook machinery, not of ours
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    )
    # These train for minutes: what their programs take to compile is not all.
    flags = os.environ["XLA_FLAGS"].replace("--xla_backend_optimization_level=0", "")
    monkeypatch.setenv("XLA_FLAGS", flags)
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    assert "colab.research.google.com" in notebook.cells[0].source
    client = NotebookClient(
        notebook,
        timeout=300,
        resources={"metadata": {"path": str(tmp_path)}},
        kernel_name="python3",
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    if output := os.environ.get("FEDJAX_HET_EXECUTED_NOTEBOOKS"):  # to look at
        nbformat.write(notebook, Path(output) / path.name)
