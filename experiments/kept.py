"""Results at paper scale, or at that of two cores, which lie beside the programs that made them."""

import hashlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Kept:
    """A folder of results, as a program shows it."""

    of: str
    """The table or figure, `dynafed-table5`; a paper, where it is none of its tables."""
    folder: str
    """Below `experiments`."""
    program: str
    """Its file, below `experiments`."""
    words: tuple[str, ...] = ()
    """Of its command line."""

    @property
    def name(self) -> str:
        stem = Path(self.program).stem
        return f"kept-{self.of}" if self.of.endswith(f"-{stem}") else f"kept-{self.of}-{stem}"

    @property
    def source(self) -> Path:
        return HERE / self.folder

    @property
    def title(self) -> str:
        """What the folder is of."""
        return f"Kept results: {Path(self.program).stem}, {self.source.name}"

    @property
    def command(self) -> str:
        """What shows them."""
        words = [*self.words, "--show", "--output-dir", f"experiments/{self.folder}"]
        return " ".join(["python", f"experiments/{self.program}", *words])


CPU = ("--preset", "cpu")
KEPT = (
    Kept("dynafed-table5", "dynafed/results/table5-mlp", "dynafed/table5.py", ("--models", "mlp")),
    Kept("dynafed", "dynafed/results/theory-cpu", "dynafed/theory.py", CPU),
    Kept("dynafed", "results/leakage-cpu", "leakage.py", CPU),
    Kept("fedaf-table1", "fedaf/results/table1-cpu", "fedaf/table1.py", CPU),
    Kept("fedaf-table7", "fedaf/results/table7", "fedaf/table7.py"),
    Kept("fedaf", "fedaf/results/privacy-cpu", "fedaf/privacy.py", CPU),
    *(
        Kept(f"fedamp-{item}", f"fedamp/results/{folder}", f"fedamp/{item}.py", CPU)
        for folder, items in (
            ("tables12-cpu", ("table1", "table2")),
            ("table3-cpu", ("table3", "fig2", "fig3")),
        )
        for item in items
    ),
    Kept("fsl-fig1", "fsl/results/fig1-cpu", "fsl/fig1.py", CPU),
)


def kept_of(name: str) -> list[Kept]:
    """What is kept of a table or figure, or of a paper's other studies; nothing in an installed
    package, which has no results."""
    return [kept for kept in KEPT if kept.of == name and kept.source.is_dir()]


def version_of(kept: Kept) -> str:
    """Changes with the files of the folder."""
    listing = sorted((path.name, path.stat().st_size) for path in kept.source.iterdir())
    return hashlib.sha256(repr((kept.command, listing)).encode()).hexdigest()[:16]


def show_command(kept: Kept, folder: Path) -> list[str] | None:
    """Copies the runs to `folder`: -> the command that draws them there; None where the folder has
    no runs, but what was drawn of them, which is copied."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = list(kept.source.glob("*.npz"))
    for path in kept.source.iterdir():
        drawn = path.suffix in (".md", ".png")
        if path.suffix in (".npz", ".json") if runs else drawn:
            shutil.copyfile(path, folder / path.name)
    words = [*kept.words, "--show", "--output-dir", str(folder)]
    return [sys.executable, str(HERE / kept.program), *words] if runs else None
