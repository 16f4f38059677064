"""Every table and figure of every paper, one after the other, and one report of them.

python experiments/all.py --preset quick                      on the embedded digits
python experiments/all.py --preset quick --only fsl dynafed   of these papers alone
python experiments/all.py --list

Writes two files to `results/all-PRESET`: `report.md` has links to the figures, `report.html`
contains them. In a checkout, `report.html` has the archived results of larger scales, too. The
programs write to `results/` as usual. A program that fails is reported with its last lines, and the
others go on. A finished program is not started again, unless its module or a module of its paper
has changed, or with `--again`. A stopped program continues from its finished runs.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from fedjax_het._version import __version__
from fedjax_het.analysis.report import write_text
from fedjax_het.papers.archived_results import (
    ArchivedResults,
    archive_version,
    archives_of,
    prepare_show_command,
)
from fedjax_het.papers.programs import find_programs, make_config_program
from fedjax_het.papers.report import (
    PAPERS,
    ArchiveRecords,
    PaperItem,
    ProgramRecord,
    ReportEntry,
    StudyRecords,
    describe_provenance,
    format_state,
    render_html,
    render_markdown,
    summarize_entries,
)
from fedjax_het.papers.table.table_run import QUICK, TOY_SCALE
from fedjax_het.runtime.progress import show_progress
from fedjax_het.utils import console
from fedjax_het.utils.errors import require_name
from fedjax_het.utils.io import make_output_directory

HERE = Path(__file__).resolve().parent
MAX_ERROR_LINES = 12  # of a failed program


@dataclass
class Arguments:
    """The command line."""

    preset: Literal["quick", "cpu", "paper"] = "quick"
    """Size of the tables and figures; a program without the preset fails."""
    only: tuple[str, ...] = ()
    """Papers (dynafed), or single tables and figures (fsl-fig3) (default: all)."""
    again: bool = False
    """Start finished programs again; their runs are not repeated."""
    output_dir: Path | None = None
    """Folder of the report; tables and figures are below results/ (default: results/all-PRESET)."""
    list: bool = False
    """Print the tables and figures, and whether they are done; run nothing."""


def select_items(only: Sequence[str] = ()) -> list[PaperItem]:
    """Select tables and figures by paper, tables first.

    Args:
      only: papers or single items; empty: all.

    Returns:
      The items.

    Raises:
      ConfigError: if a name is neither a paper nor an item.
    """
    items = [
        PaperItem(name.rpartition(".")[0] or "dynafed", module)
        for name, module in find_programs().items()
        if name != "all"
    ]
    items = [item for item in items if item.paper in PAPERS]
    for name in only:
        require_name("only", name, [*PAPERS, *(item.name for item in items)])
    return [item for item in items if not only or item.paper in only or item.name in only]


def item_version(item: PaperItem) -> str:
    """Hash the item's name, the programs of its paper and the version of the package."""
    digest = hashlib.sha256(f"{__version__} {item.name}".encode())
    for path in sorted({item.module.path, *(HERE / item.paper).glob("*.py")}):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read_record(folder: Path, name: str, version: str) -> ProgramRecord | None:
    """Read the record of a finished program.

    Args:
      folder: folder of the report.
      name: name of the item or archive.
      version: version that the record must have.

    Returns:
      None if the program failed, its version changed, or one of its files is missing.
    """
    try:
        record = ProgramRecord(**json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    is_complete = record.status == 0 and all(Path(file).is_file() for file in record.files)
    return record if is_complete and record.version == version else None


def list_output_files(results: Path, folder: Path) -> dict[Path, int]:
    """List figures and tables with their times of modification.

    Args:
      results: folder that is searched.
      folder: subfolder that is left out.

    Returns:
      Times in nanoseconds by file.
    """
    paths = (path for path in sorted(results.rglob("*")) if path.suffix in (".png", ".md"))
    return {path: path.stat().st_mtime_ns for path in paths if folder not in path.parents}


def item_command(item: PaperItem, preset: str) -> list[str]:
    """Return the command that runs an item, in a checkout and in an installed package.

    Args:
      item: the table or figure.
      preset: its preset.

    Returns:
      Words of the command.
    """
    # With -P Python imports nothing from the current folder.
    words = ["-P", "-m", "fedjax_het", "table", item.module.name, "--preset", preset]
    return [sys.executable, *words]


def run_item(item: PaperItem, preset: str, folder: Path, results: Path) -> ProgramRecord:
    """Run an item and record the files that it wrote.

    Args:
      item: the table or figure.
      preset: its preset.
      folder: folder of the report.
      results: folder below which the program writes.

    Returns:
      The record.
    """
    before = list_output_files(results, folder)
    name = f"fedjax-het table {item.module.name} --preset {preset}"
    record = _run_program(item.name, item_version(item), item_command(item, preset), name, folder)
    after = list_output_files(results, folder)
    new_files = [path for path, time_ns in after.items() if before.get(path) != time_ns]
    return _save_record(record, folder, new_files)


def redraw_archive(archive: ArchivedResults, folder: Path) -> ProgramRecord:
    """Draw archived results again with the present program.

    Args:
      archive: the archived results.
      folder: folder of the report.

    Returns:
      The record.
    """
    copy_folder = folder / archive.name
    words, version = prepare_show_command(archive, copy_folder), archive_version(archive)
    if words is None:
        record = ProgramRecord(archive.name, version, 0, 0.0, [], "", archive.show_command)
    else:
        record = _run_program(archive.name, version, words, archive.show_command, folder)
    files = [path for path in sorted(copy_folder.iterdir()) if path.suffix in (".md", ".png")]
    return _save_record(record, folder, files, is_new=False)


def _run_program(
    name: str, version: str, words: list[str], display_command: str, folder: Path
) -> ProgramRecord:
    log, start = folder / f"{name}.log", time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, check=False)
    seconds, status = time.perf_counter() - start, process.returncode
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    text = "\n".join(lines[-MAX_ERROR_LINES:]) if status else ""
    return ProgramRecord(name, version, status, seconds, [], text, display_command)


def _save_record(
    record: ProgramRecord, folder: Path, files: Sequence[Path], *, is_new: bool = True
) -> ProgramRecord:
    """Save the record with its files; the numbers of new files are of this version and today."""
    record.files = [str(path) for path in files]
    default = f"fedjax_het {__version__}" if is_new else ""
    record.made_by = describe_provenance(record.files, default)
    record.when = time.strftime("%Y-%m-%d", time.gmtime()) if is_new else ""
    write_text(folder / f"{record.name}.json", json.dumps(asdict(record), indent=1))
    return record


def archive_records(name: str, folder: Path, *, again: bool) -> ArchiveRecords:
    """Return the archived results of an item or paper, drawn again unless that is done.

    Args:
      name: name of the item or paper.
      folder: folder of the report.
      again: whether finished ones are drawn again.

    Returns:
      Archives with their records.
    """
    records = []
    for archive in archives_of(name):
        record = None if again else read_record(folder, archive.name, archive_version(archive))
        records.append((archive, record or redraw_archive(archive, folder)))
    return records


def run_all(arguments: Arguments) -> int:
    """Run all selected items and write the report after each; return the exit status."""
    results, again = Path("results"), arguments.again
    folder = arguments.output_dir or results / f"all-{arguments.preset}"
    items = select_items(arguments.only)
    if arguments.list:
        for item in items:
            state = "done" if read_record(folder, item.name, item_version(item)) else "missing"
            print(f"{state:8} {item.name:16} {item.title}")
        return 0
    make_output_directory(folder)
    entries = [ReportEntry(item) for item in items]
    studies: StudyRecords = {}
    papers = {item.paper for item in items}.intersection(arguments.only or PAPERS)
    for number, entry in enumerate(entries, 1):
        item = entry.item
        entry.record = None if again else read_record(folder, item.name, item_version(item))
        action, label = "done" if entry.record else "made", f"[{number}/{len(items)}] {item.name}"
        try:
            with show_progress(label, transient=True, initial_phase="at work"):
                entry.record = entry.record or run_item(item, arguments.preset, folder, results)
                entry.archives = archive_records(item.name, folder, again=again)
                if item.paper in papers and item.paper not in studies:
                    studies[item.paper] = archive_records(item.paper, folder, again=again)
        except KeyboardInterrupt:
            console.print_error("stopped; the same command continues from the finished programs")
            return 130
        console.print_status(f"{label}: {action}, {format_state(entry.record)}")
        write_report(arguments, folder, entries, studies)  # can be read while the rest is made
    print(summarize_entries(entries))
    print(f"Written to {folder}: report.md, report.html.")
    has_failed = any(entry.record and entry.record.status for entry in entries)
    if arguments.preset == QUICK and not has_failed:
        print(f"The installation works. {TOY_SCALE}; --preset cpu is larger.")
    return 1 if has_failed else 0


def write_report(
    arguments: Arguments, folder: Path, entries: Sequence[ReportEntry], studies: StudyRecords
) -> None:
    """Write the report as Markdown and HTML.

    Args:
      arguments: the command line.
      folder: folder of the report.
      entries: selected items.
      studies: archived results that belong to no item, by paper.
    """
    title = f"Tables and figures of four papers, preset {arguments.preset}"
    title += f". {TOY_SCALE}" if arguments.preset == QUICK else ""
    only = ["--only", *arguments.only] if arguments.only else []
    command = " ".join(["python experiments/all.py --preset", arguments.preset, *only])
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    provenance = (
        f"fedjax_het {__version__} · {machine} · {time.strftime('%Y-%m-%d', time.gmtime())}. Each "
        "section lists its command, seconds, versions and device. A click on a column's name sorts "
        "by it."
    )
    html = render_html(title, entries, studies, command=command, provenance=provenance)
    write_text(folder / "report.md", render_markdown(title, entries, folder))
    write_text(folder / "report.html", html)


main = make_config_program(Arguments, run_all, "Every table and figure.")
