"""Every notebook runs from its first to its last cell, and shows outputs of this version.

Before a release, outputs may be of former versions.
"""

import base64
import os
import re

import nbformat
import pytest
from notebook_pages import make_notebook_page
from support.paths import ROOT

import fedjax_het
from notebooks.execute import RECORD, execute, lighten, small_picture, source_digest

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_BYTES, MOST_SECONDS = 400_000, 120
MOST_LINES = 12  # of text below a cell

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def pictures(notebook):
    data = [output.get("data", {}) for output in outputs_of(notebook)]
    return [each["image/png"] for each in data if "image/png" in each]


def test_notebooks_exist():
    assert len(NOTEBOOKS) >= 7


@every_notebook
def test_notebook_outputs_are_current(path):
    notebook = read(path)
    record = notebook.metadata[RECORD]
    again = f"run python notebooks/execute.py {path.stem}"
    is_release = ".dev" not in fedjax_het.__version__
    assert record["version"] == fedjax_het.__version__ or not is_release, again
    assert record["source"] == source_digest(notebook), again
    assert 0 < record["seconds"] <= MOST_SECONDS
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))  # every cell, in order


@every_notebook
def test_notebook_outputs_are_small_and_portable(path):
    notebook = read(path)
    assert pictures(notebook) and path.stat().st_size <= MOST_BYTES
    assert not any(output.output_type == "error" for output in outputs_of(notebook))
    shown = "".join(str({**output, "data": {**output.get("data", {}), "image/png": ""}})
                    for output in outputs_of(notebook))  # fmt: skip
    assert not re.search(r"/(root|home|tmp|work|Users)/", shown)


@every_notebook
def test_notebook_starts_for_colab(path):
    cells = read(path).cells
    assert "colab.research.google.com" in cells[0].source and path.name in cells[0].source
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert "except ImportError" in code[0] and "show_environment()" in code[0]
    assert any(re.search(r"\bsweep\(", source) for source in code[1:])


@every_notebook
def test_notebook_page_starts_with_link_to_colab(path):
    text, pictures = make_notebook_page(path)
    url = f"https://colab.research.google.com/github/fedjax-het/fedjax_het/blob/main/notebooks/{path.name}"
    assert text.lstrip().startswith(f"[Open in Colab]({url}){{ .md-button }}\n\n# ")
    assert all(f"({name})" in text for name in pictures)


@every_notebook
def test_notebook_uses_default_progress(path):
    notebook = read(path)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert "progress=lambda" not in code and "plt.savefig" not in code
    for cell in notebook.cells:
        lines = sum(o.get("text", "").count("\n") for o in cell.get("outputs", ()))
        assert lines <= MOST_LINES, cell.source


def test_edited_cell_makes_outputs_stale():
    notebook = read(NOTEBOOKS[0])
    before = source_digest(notebook)
    notebook.cells[1].outputs = []
    assert source_digest(notebook) == before  # outputs do not count
    notebook.cells[-1].source += " "
    assert source_digest(notebook) != before


def test_pictures_are_shrunk():
    import io

    import numpy as np
    from PIL import Image

    shades = np.linspace(0, 255, 1200).astype(np.uint8)
    wide = np.broadcast_to(shades[None, :, None], (600, 1200, 3))
    png = io.BytesIO()
    Image.fromarray(wide).save(png, "PNG")
    small = base64.b64decode(small_picture(base64.b64encode(png.getvalue()).decode()))
    actual = np.asarray(Image.open(io.BytesIO(small)).convert("RGB"), float)
    assert actual.shape == (450, 900, 3) and len(small) < len(png.getvalue())
    expected = np.linspace(0, 255, 900)
    assert np.abs(actual - expected[None, :, None]).max() < 4


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # warnings of the notebook software
@every_notebook
def test_notebook_runs(path, tmp_path, monkeypatch):
    # Notebooks train for minutes, beyond the compilation time of their programs.
    flags = os.environ["XLA_FLAGS"].replace("--xla_backend_optimization_level=0", "")
    monkeypatch.setenv("XLA_FLAGS", flags)
    # Colab's image for TPUs has no TensorFlow, and no notebook image has prepared data.
    blocked = tmp_path / "blocked" / "tensorflow.py"
    blocked.parent.mkdir()
    blocked.write_text("raise ImportError('no TensorFlow')")
    monkeypatch.setenv("PYTHONPATH", str(blocked.parent), prepend=os.pathsep)
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    folder = tmp_path / "folder"
    folder.mkdir()
    executed = execute(read(path), str(folder), timeout=300)
    lighten(executed)
    assert len(pictures(executed)) == len(pictures(read(path)))
