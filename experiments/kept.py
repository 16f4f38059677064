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
        return "-".join(["kept", *Path(self.program).with_suffix("").parts, self.source.name])

    @property
    def source(self) -> Path:
        return HERE / self.folder

    @property
    def title(self) -> str:
        """What the folder is of."""
        return f"Kept results: {self.source.name}"

    @property
    def command(self) -> str:
        """What shows them."""
        words = [*self.words, "--show", "--output-dir", f"experiments/{self.folder}"]
        return " ".join(["python", f"experiments/{self.program}", *words])


# What shows folders that are not named after the preset of their runs.
WORDS = {"table5-mlp": ("--models", "mlp")}
PRESETS = ("short", "cpu", "paper")


def found() -> list[Kept]:
    """Every table and figure in the folders `results/STEM-PRESET` beside the programs; none in an
    installed package, which has no results."""
    return [
        _of(path)
        for path in sorted(HERE.glob("**/results/*/*.md"))
        if (HERE / _program(path)).is_file()
    ]


def _of(path: Path) -> Kept:
    paper, _, stem = _program(path).removesuffix(".py").rpartition("/")
    paper = paper or "dynafed"  # as Table 1 and what else lies beside the papers' folders
    is_item = stem.startswith(("table", "fig"))
    preset = path.parent.name.rpartition("-")[2]
    words = ("--preset", preset) if preset in PRESETS else WORDS.get(path.parent.name, ())
    folder = path.parent.relative_to(HERE).as_posix()
    return Kept(f"{paper}-{stem}" if is_item else paper, folder, _program(path), words)


def _program(path: Path) -> str:
    """Of what is named `table` alone the folder says which it is. Beside the folder of results, but
    for DynaFed's Table 1, which lies above its paper's."""
    stem = path.parent.name.partition("-")[0] if path.stem == "table" else path.stem
    beside = path.parents[2] / f"{stem}.py"
    program = beside if beside.is_file() else HERE / beside.name
    return program.relative_to(HERE).as_posix()


def kept_of(name: str) -> list[Kept]:
    """What is kept of a table or figure, or of a paper's other studies."""
    return [kept for kept in found() if kept.of == name]


def version_of(kept: Kept) -> str:
    """Changes with the files of the folder."""
    listing = sorted((path.name, path.stat().st_size) for path in kept.source.iterdir())
    return hashlib.sha256(repr((kept.command, listing)).encode()).hexdigest()[:16]


def show_command(kept: Kept, folder: Path) -> list[str] | None:
    """Copies the runs to `folder`: -> the command that draws them there; None where the folder has
    no runs, but what was drawn of them, which is copied."""
    runs = list(kept.source.glob("*.npz"))
    # Arrays in a folder of their own are what a program counted of its runs.
    wanted = ("*.npz", "*.json", "*/*.npy") if runs else ("*.md", "*.png")
    for path in (path for pattern in wanted for path in kept.source.glob(pattern)):
        copy = folder / path.relative_to(kept.source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    words = [*kept.words, "--show", "--pictures", "dark", "--output-dir", str(folder)]
    return [sys.executable, str(HERE / kept.program), *words] if runs else None
