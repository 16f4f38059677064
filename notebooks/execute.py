"""Execute notebooks and write them with their outputs: tables, text and small pictures.

python notebooks/execute.py                 every notebook, each about a minute on 2 cores
python notebooks/execute.py quickstart      named notebooks

Each notebook runs in an empty folder, with the package of this checkout. Its metadata contain the
version, the seconds and the hash of its source, so that a test finds stale outputs. Run the program
after a change of version and after an edit of a notebook.
"""

import base64
import hashlib
import io
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).resolve().parent
COLORS = 128  # of a picture: lines and text need no more
WIDTH = 900  # pixels at most
RECORD = "fedjax_het"
"""Key of the metadata."""


def source_digest(notebook: Any) -> str:
    """Return a hash of the sources of all cells, without their outputs."""
    digest = hashlib.sha256()
    for cell in notebook.cells:
        digest.update(f"{cell.cell_type}\n{cell.source}\n".encode())
    return digest.hexdigest()[:16]


def execute(notebook: Any, folder: str, timeout: float = 600) -> Any:
    """Return a copy with outputs, executed in a folder with this checkout's package."""
    executed = nbformat.from_dict(notebook)
    for cell in executed.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), before]))
    client = NotebookClient(
        executed,
        timeout=timeout,
        resources={"metadata": {"path": folder}},
        kernel_name="python3",
    )
    try:
        client.execute()
    finally:
        os.environ["PYTHONPATH"] = before
    return executed


def small_picture(png: str) -> str:
    """Return a PNG, in base64, in 128 colors and at most 900 pixels wide."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    if picture.width > WIDTH:
        picture = picture.resize((WIDTH, round(picture.height * WIDTH / picture.width)))
    kept = io.BytesIO()
    picture.quantize(COLORS).save(kept, "PNG", optimize=True)
    return base64.b64encode(kept.getvalue()).decode()


def lighten(notebook: Any) -> None:
    """Shrink pictures, and remove the times of cells, which differ between equal runs."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = small_picture(data["image/png"])


def refresh(path: Path) -> float:
    """Execute a notebook, write it with its outputs, and return the seconds."""
    import fedjax_het

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        executed = execute(notebook, folder)
        seconds = time.perf_counter() - began
    lighten(executed)
    executed.metadata[RECORD] = {
        "version": fedjax_het.__version__,
        "source": source_digest(executed),
        "seconds": round(seconds),
    }
    nbformat.write(executed, path)
    return seconds


def main(names: list[str]) -> int:
    paths = sorted(HERE.glob("*.ipynb"))
    known = [path.stem for path in paths]
    if unknown := [name for name in names if name not in known]:
        print(f"no notebook is called {unknown[0]!r}: {', '.join(known)}", file=sys.stderr)
        return 2
    for path in paths:
        if not names or path.stem in names:
            print(f"{path.stem}: {refresh(path):.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
