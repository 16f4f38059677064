"""Every table and figure of every paper, one after the other, and one report of them.

python experiments/all.py --preset quick                      on the embedded digits
python experiments/all.py --preset quick --only fsl dynafed   of these papers alone
python experiments/all.py --list

Writes `report.md`, with links to the pictures, and `report.html`, which holds them and, in a
checkout, what is kept of larger scales, to `results/all-PRESET`; the programs write where they
always do, to `results/`. One that fails is
reported with its last lines, and the others go on. One that is done is not started again, unless it
or what it shares with others has changed, or with `--again`; a program that is cut off goes on from
the runs that it has made.
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

import fedjax_het
from experiments.kept import Kept, kept_of, show_command
from experiments.kept import version_of as kept_version
from experiments.report_items import (
    PAPERS,
    Entry,
    Item,
    Record,
    Studies,
    made_by,
    state_text,
    summary,
)
from experiments.report_page import markdown, page
from fedjax_het.common import manner
from fedjax_het.common.errors import require_name
from fedjax_het.common.files import make_output_directory
from fedjax_het.common.text import html_text
from fedjax_het.report.programs import find_programs, record_program
from fedjax_het.report.write import write_text
from fedjax_het.running.progress import progress_line

HERE = Path(__file__).resolve().parent
LAST_LINES = 12  # of a program that failed


@dataclass
class Arguments:
    """The command line."""

    preset: Literal["quick", "cpu", "paper"] = "quick"
    """quick, cpu or paper; a program that does not have it fails, and says so."""
    only: tuple[str, ...] = ()
    """Papers (dynafed), or single tables and figures (fsl-fig3)."""
    again: bool = False
    """Start those that are done, too: their runs are not made again."""
    list: bool = False
    """Print what would be made, and whether it is done; run nothing."""


def items(only: Sequence[str] = ()) -> list[Item]:
    """By paper, tables first. ConfigError for a name that none has."""
    found = []
    for name, module in find_programs().items():
        paper, _, stem = name.rpartition(".")
        if stem != "all":
            found.append(Item(paper or "dynafed", stem, module))
    found.sort(key=lambda item: list(PAPERS).index(item.paper))
    known = [*PAPERS, *(item.name for item in found)]
    for name in only:
        require_name("only", name, known)
    return [item for item in found if not only or item.paper in only or item.name in only]


def version_of(item: Item) -> str:
    """Changes with the programs of its folder, which share settings, and with the package's."""
    digest = hashlib.sha256(fedjax_het.__version__.encode())
    for path in sorted({item.path, *(HERE / item.paper).glob("*.py")}):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read_record(folder: Path, name: str, version: str) -> Record | None:
    """None unless it was made of what is there now, and its files are."""
    try:
        record = Record(**json.loads((folder / f"{name}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
    good = record.status == 0 and all(Path(file).is_file() for file in record.files)
    return record if good and record.version == version else None


def written(results: Path, folder: Path) -> dict[Path, int]:
    """The pictures and tables below `results`, apart from those in `folder`, and when they were
    written."""
    paths = (path for path in sorted(results.rglob("*")) if path.suffix in (".png", ".md"))
    return {path: path.stat().st_mtime_ns for path in paths if folder not in path.parents}


def command(item: Item, preset: str) -> list[str]:
    """The same from a checkout and from an installed package; -P: nothing of this folder is
    imported."""
    words = ["-P", "-m", "fedjax_het.cli", "table", item.module.name, "--preset", preset]
    return [sys.executable, *words, "--pictures", "dark"]


def run(item: Item, preset: str, folder: Path, results: Path) -> Record:
    """Run it; its files are what it wrote below `results`."""
    before = written(results, folder)
    name = f"fedjax-het table {item.module.name} --preset {preset}"
    record = _of_program(item.name, version_of(item), command(item, preset), name, folder)
    after = written(results, folder)
    return _noted(
        record, folder, [path for path, when in after.items() if before.get(path) != when]
    )


def show(kept: Kept, folder: Path) -> Record:
    """What is kept, as its program draws it now."""
    copy = folder / kept.name
    words, version = show_command(kept, copy), kept_version(kept)
    if words is None:
        record = Record(kept.name, version, 0, 0.0, [], "", kept.command)
    else:
        record = _of_program(kept.name, version, words, kept.command, folder)
    drawn = [path for path in sorted(copy.iterdir()) if path.suffix in (".md", ".png")]
    return _noted(record, folder, drawn, now=False)


def _of_program(name: str, version: str, words: list[str], called: str, folder: Path) -> Record:
    log, clock = folder / f"{name}.log", time.perf_counter()
    with log.open("w") as file:
        done = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, check=False)
    seconds, status = time.perf_counter() - clock, done.returncode
    text = "" if status == 0 else "\n".join(log.read_text().splitlines()[-LAST_LINES:])
    return Record(name, version, status, seconds, [], text, called)


def _noted(record: Record, folder: Path, files: Sequence[Path], *, now: bool = True) -> Record:
    """The record with its files, on disk. now: their numbers were made by this version, today."""
    record.files = [str(path) for path in files]
    record.made_by = made_by(record.files, f"fedjax_het {fedjax_het.__version__}" if now else "")
    record.when = time.strftime("%Y-%m-%d", time.gmtime()) if now else ""
    write_text(folder / f"{record.name}.json", json.dumps(asdict(record), indent=1))
    return record


def kept_records(name: str, folder: Path, *, again: bool) -> list[tuple[Kept, Record]]:
    """What is kept of a table, figure or paper, drawn unless that is done."""
    found = []
    for kept in kept_of(name):
        record = None if again else read_record(folder, kept.name, kept_version(kept))
        found.append((kept, record or show(kept, folder)))
    return found


def make_all(arguments: Arguments) -> int:
    results = Path("results")
    folder = results / f"all-{arguments.preset}"
    chosen = items(arguments.only)
    if arguments.list:
        for item in chosen:
            done = "done" if read_record(folder, item.name, version_of(item)) else "missing"
            print(f"{done:8} {item.name:16} {item.title}")
        return 0
    make_output_directory(folder)
    entries = [Entry(item) for item in chosen]
    studies: Studies = {}
    papers = {item.paper for item in chosen}.intersection(arguments.only or PAPERS)
    again = arguments.again
    for place, entry in enumerate(entries):
        item = entry.item
        entry.record = None if again else read_record(folder, item.name, version_of(item))
        how, label = "done" if entry.record else "made", f"[{place + 1}/{len(chosen)}] {item.name}"
        try:
            with progress_line(label, passing=True, first="at work"):
                entry.record = entry.record or run(item, arguments.preset, folder, results)
                entry.kept = kept_records(item.name, folder, again=again)
                if item.paper in papers and item.paper not in studies:
                    studies[item.paper] = kept_records(item.paper, folder, again=again)
        except KeyboardInterrupt:
            manner.tell_error("stopped; the same command goes on from what is done")
            return 130
        manner.say(f"{label}: {how}, {state_text(entry.record)}")
        # Written anew each time: what is there can be read while the rest is made.
        write_report(arguments, folder, entries, studies)
    print(summary(entries))
    print(f"Written to {folder}: report.md, report.html.")
    return 1 if any(entry.record and entry.record.status for entry in entries) else 0


def write_report(
    arguments: Arguments, folder: Path, entries: Sequence[Entry], studies: Studies
) -> None:
    """Both forms of it."""
    title = f"Tables and figures of four papers, preset {arguments.preset}"
    words = ["--preset", arguments.preset, *(("--only", *arguments.only) if arguments.only else ())]
    command = " ".join(["python", "experiments/all.py", *words])
    seen = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    about = (
        f"<code>{html_text(command)}</code> · fedjax_het {fedjax_het.__version__} · {seen} · "
        f"{time.strftime('%Y-%m-%d', time.gmtime())}. Each section says its own command, seconds, "
        "versions and device. Columns sort by a click on their names."
    )
    write_text(folder / "report.md", markdown(title, entries, folder))
    write_text(folder / "report.html", page(title, entries, studies, about))


main = record_program(Arguments, make_all, "Every table and figure.")

if __name__ == "__main__":
    raise SystemExit(main())
