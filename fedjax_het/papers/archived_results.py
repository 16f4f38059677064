"""Archived results in `experiments/`, at the papers' scale or at a scale for two cores.

Each folder of results has its runs in one archive, `runs.zip`, which all functions that load
results read like files. Tables and figures are files beside it.
"""

import hashlib
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from fedjax_het.papers.programs import (
    PAPERS_FOLDER,
    ProgramModule,
    find_programs,
    make_config_program,
)
from fedjax_het.runtime.result_store import list_run_files
from fedjax_het.utils.errors import require
from fedjax_het.utils.io import ARCHIVE_NAME, write_archive

# The archived results lie in the checkout; an installed package has none.
EXPERIMENTS_FOLDER = Path(__file__).resolve().parents[2] / "experiments"


@dataclass(frozen=True)
class ArchivedResults:
    """A folder of results and the program that shows it."""

    owner: str
    """Table or figure, such as `dynafed-table5`; for other studies the paper."""
    folder: str
    """Path of the folder below `experiments`."""
    program: str
    """Path of the program below `experiments`."""
    arguments: tuple[str, ...] = ()
    """Command line of the program."""

    @property
    def name(self) -> str:
        """Name of the program and the folder, unique among all archives."""
        return "-".join(["kept", *Path(self.program).with_suffix("").parts, self.source.name])

    @property
    def source(self) -> Path:
        """Path of the folder."""
        return EXPERIMENTS_FOLDER / self.folder

    @property
    def title(self) -> str:
        """Title of a section of a report; a study beside the tables has its program's."""
        title = f"Kept results: {self.source.name}"
        if "-" in self.owner:
            return title
        name = self.program.removesuffix(".py").replace("/", ".")
        default = ProgramModule("", PAPERS_FOLDER / self.program)
        return f"{find_programs().get(name, default).description} {title}"

    @property
    def show_command(self) -> str:
        """Command that shows the results in place."""
        arguments = [*self.arguments, "--show", "--output-dir", f"experiments/{self.folder}"]
        return shlex.join(["python", f"experiments/{self.program}", *arguments])


# Command lines by program and folder, where the folder's preset is not all that the runs need.
_WIDTH16 = (
    "--preset cpu --rounds 100 --width 16 --datasets fashion_mnist --alphas 0.01 --seeds 0 "
    """--methods fedavg 'dynafed(preset="code")' """
    """'dynafed(preset="code", synthetic="untrained")' 'dynafed(preset="code", synthetic="real")'"""
)
_FASHION_MNIST = "--preset cpu --datasets fashion_mnist"
COMMAND_LINES = {
    ("dynafed/table5.py", "table5-mlp"): "--models mlp",
    ("dynafed/fig5.py", "table5-mlp"): "--preset cpu --seeds 0 1 2",
    ("table1.py", "table1-width16"): _WIDTH16,
    ("dynafed/ablation.py", "ablation-convnet"): "--preset convnet",
    ("dynafed/ablation.py", "ablation-settings"): "--preset settings --seeds 1 2 3",
    ("fedaf/table1.py", "table1-cpu"): "--preset cpu --rounds 10",
    ("fedamp/table1.py", "tables-cpu"): _FASHION_MNIST,
    ("fedamp/table2.py", "tables-cpu"): _FASHION_MNIST,
    ("fedamp/robustness.py", "robustness-digits"): "--seeds 1 2 3 4 5",
    ("niid_bench/table3.py", "table3-chance"): "--preset chance",
    ("pfllib/table.py", "table-tuning"): "--preset tuning",
    ("leaderboard/noise.py", "noise-validation-cpu"): (
        "--preset cpu --validation 0.1 --methods fedavg fedprox scaffold fedavgm fedadam fedyogi "
        "fedcm feddyn fedsam mofedsam qfedavg fedadagrad fsl ccvr"
    ),
}
PRESETS = ("short", "cpu", "paper")


def find_archives() -> list[ArchivedResults]:
    """Find the archived tables and figures in the folders `experiments/**/results/STEM-PRESET`.

    Returns:
      Archives by folder; none in an installed package.
    """
    archives = {}
    for path in sorted(EXPERIMENTS_FOLDER.glob("**/results/*/*.md")):
        program, name = _program_path(path), path.parent.name
        if (EXPERIMENTS_FOLDER / program).is_file():
            paper, _, stem = program.removesuffix(".py").rpartition("/")
            paper = paper or "dynafed"  # Table 1 and studies beside the papers' folders
            owner = f"{paper}-{stem}" if stem.startswith(("table", "fig")) else paper
            preset = name.rpartition("-")[2]
            default = f"--preset {preset}" if preset in PRESETS else ""
            arguments = tuple(shlex.split(COMMAND_LINES.get((program, name), default)))
            folder = path.parent.relative_to(EXPERIMENTS_FOLDER).as_posix()
            archives[folder, program] = ArchivedResults(owner, folder, program, arguments)
    return [*archives.values()]


def _program_path(path: Path) -> str:
    """Return the program of a table's file, below `experiments`.

    The file or the folder has the program's name. The program is beside the folder of results, or
    one level above for DynaFed's Table 1.
    """
    folder_stem = path.parent.name.partition("-")[0]
    file_stem = path.stem.partition("_")[0]  # a program may write several tables: fig5_length
    stems = [folder_stem] if path.stem == "table" else [file_stem, folder_stem]
    folders = (path.parents[2], EXPERIMENTS_FOLDER)
    programs = [folder / f"{stem}.py" for stem in stems for folder in folders]
    found = next((program for program in programs if program.is_file()), programs[0])
    return found.relative_to(EXPERIMENTS_FOLDER).as_posix()


def archives_of(name: str) -> list[ArchivedResults]:
    """List the archives of a table or figure, or of a paper's studies beside its tables.

    Args:
      name: name of the table or figure, for example `dynafed-table5`, or of the paper.

    Returns:
      The archives.
    """
    return [archive for archive in find_archives() if archive.owner == name]


def archive_version(archive: ArchivedResults) -> str:
    """Return a hash of the names and sizes of the files in an archive's folder."""
    listing = sorted((path.name, path.stat().st_size) for path in archive.source.iterdir())
    return hashlib.sha256(repr((archive.show_command, listing)).encode()).hexdigest()[:16]


def prepare_show_command(archive: ArchivedResults, folder: Path) -> list[str] | None:
    """Copy an archive to a folder, where a program can draw its tables and figures again.

    Args:
      archive: the archived results.
      folder: folder of the copy.

    Returns:
      The command that shows the runs in the copy. None if there are no runs; in that case the
      tables and figures are copied.
    """
    has_runs = bool(list_run_files(archive.source))
    # The archive of a subfolder has arrays that a program computed from the runs.
    patterns = ("*.zip", "*.npz", "*.json", "*/*.zip", "*/*.npy") if has_runs else ("*.md", "*.png")
    for path in (path for pattern in patterns for path in archive.source.glob(pattern)):
        copy_path = folder / path.relative_to(archive.source)
        copy_path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy_path)
    program = str(EXPERIMENTS_FOLDER / archive.program)
    words = [sys.executable, program, *archive.arguments, "--show", "--output-dir", str(folder)]
    return words if has_runs else None


_ARCHIVED_FILE = re.compile(r"[0-9a-f]{16}\.(json|npz|npy)")


def archive_runs(directory: Path) -> int:
    """Move the runs of a folder and of each subfolder into an archive `runs.zip` in that folder.

    Args:
      directory: a folder of results. Files of settings (`.yaml`), which the results contain, are
        removed.

    Returns:
      Number of files that were moved.

    Raises:
      ConfigError: if the folder does not exist.
    """
    require(directory.is_dir(), "folder", str(directory), "a folder of results, which must exist")
    count = 0
    for folder in [directory, *sorted(path for path in directory.rglob("*") if path.is_dir())]:
        names = [path.name for path in folder.iterdir() if _ARCHIVED_FILE.fullmatch(path.name)]
        if names:
            write_archive(folder, names)
        for name in names:
            (folder / name).with_suffix(".yaml").unlink(missing_ok=True)
        count += len(names)
    return count


@dataclass
class ArchiveArguments:
    """The command line of `experiments/archive_runs.py`."""

    folders: tuple[Path, ...]
    """Folders of results whose runs are moved into archives."""


def _archive_folders(arguments: ArchiveArguments) -> int:
    for folder in arguments.folders:
        print(f"{folder}: {archive_runs(folder)} files moved into {ARCHIVE_NAME}")
    return 0


archive_runs_main = make_config_program(
    ArchiveArguments, _archive_folders, "Move runs into archives."
)
