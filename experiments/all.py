"""Every table and figure of every paper, one after the other, and one report of them.

python experiments/all.py --preset quick                      on the embedded digits
python experiments/all.py --preset quick --only fsl dynafed   of these papers alone
python experiments/all.py --list

Writes `report.md`, with links to the pictures, and `report.html`, which holds them, to
`results/all-PRESET`; the programs write where they always do, to `results/`. One that fails is
reported with its last lines, and the others go on. One that is done is not started again, unless it
or what it shares with others has changed, or with `--again`; a program that is cut off goes on from
the runs that it has made.
"""

import base64
import hashlib
import html
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from fedjax_het.common.errors import require_name
from fedjax_het.common.files import make_output_directory
from fedjax_het.common.text import html_text, one_line, plain_markdown
from fedjax_het.report.programs import Module, find_programs, record_program
from fedjax_het.report.write import write_text

HERE = Path(__file__).resolve().parent
PAPERS = {
    "dynafed": "DynaFed (Pi et al., CVPR 2023)",
    "fedaf": "FedAF (Wang et al., 2024)",
    "fedamp": "FedAMP (Huang et al., AAAI 2021)",
    "fsl": "FSL (Mai et al., 2022)",
}
LAST_LINES = 12  # of a program that failed


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper."""

    paper: str
    stem: str
    """table1"""
    module: Module

    @property
    def name(self) -> str:
        return f"{self.paper}-{self.stem}"

    @property
    def path(self) -> Path:
        return self.module.path

    @property
    def title(self) -> str:
        return self.module.description


@dataclass
class Record:
    """What became of it."""

    name: str
    version: str
    status: int
    seconds: float
    files: list[str]
    text: str
    """The end of what it printed, where it failed."""


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
    import fedjax_het

    digest = hashlib.sha256(fedjax_het.__version__.encode())
    for path in sorted({item.path, *(HERE / item.paper).glob("*.py")}):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read_record(folder: Path, item: Item) -> Record | None:
    """None unless it was made of what is there now, and its files are."""
    try:
        record = Record(**json.loads((folder / f"{item.name}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
    good = record.status == 0 and all(Path(file).is_file() for file in record.files)
    return record if good and record.version == version_of(item) else None


def written(results: Path, folder: Path) -> dict[Path, int]:
    """The pictures and tables below `results`, apart from those in `folder`, and when they were
    written."""
    paths = (path for path in sorted(results.rglob("*")) if path.suffix in (".png", ".md"))
    return {path: path.stat().st_mtime_ns for path in paths if folder not in path.parents}


def command(item: Item, preset: str) -> list[str]:
    """The same from a checkout and from an installed package; -P: nothing of this folder is
    imported."""
    words = ["-P", "-m", "fedjax_het.cli", "table", item.module.name, "--preset", preset]
    return [sys.executable, *words]


def run(item: Item, preset: str, folder: Path, results: Path) -> Record:
    """Run it; its files are what it wrote below `results`."""
    log = folder / f"{item.name}.log"
    before, clock = written(results, folder), time.perf_counter()
    with log.open("w") as file:
        done = subprocess.run(
            command(item, preset), stdout=file, stderr=subprocess.STDOUT, check=False
        )
    status, seconds = done.returncode, time.perf_counter() - clock
    after = written(results, folder)
    changed = [path for path, when in after.items() if before.get(path) != when]
    text = "" if status == 0 else "\n".join(log.read_text().splitlines()[-LAST_LINES:])
    files = [str(path) for path in changed]
    record = Record(item.name, version_of(item), status, seconds, files, text)
    write_text(folder / f"{item.name}.json", json.dumps(asdict(record), indent=1))
    return record


def state_text(record: Record | None) -> str:
    if record is None:
        return "not made"
    state = "" if record.status == 0 else f"FAILED with exit status {record.status} after "
    return f"{state}{record.seconds:.0f} s"


def markdown(title: str, made: Sequence[tuple[Item, Record | None]], folder: Path) -> str:
    parts = [f"# {title}", "", summary(made), ""]
    parts += ["| paper | item | wall-clock |", "| --- | --- | ---: |"]
    parts += [f"| {p.paper} | [{p.stem}](#{p.name}) | {state_text(r)} |" for p, r in made]
    for paper, members in by_paper(made):
        parts += ["", f"## {PAPERS[paper]}"]
        for item, record in members:
            parts += ["", f'<a id="{item.name}"></a>', "", f"### {item.title}", ""]
            parts += [f"`{item.path.relative_to(HERE.parent)}`, {state_text(record)}."]
            if record and record.text:
                fence = "`" * (2 + max(map(len, re.findall("`+", f"{record.text}`"))))
                parts += ["", fence, printable(record.text), fence]
            for path in map(Path, record.files if record else ()):
                if path.suffix == ".md":  # its title is below this page's headings
                    text = path.read_text().strip()
                    parts += ["", re.sub(r"^# (.*)", r"**\1**", text, count=1)]
            for path in map(Path, record.files if record else ()):
                if path.suffix == ".png":
                    link = quote(os.path.relpath(path, folder).replace(os.sep, "/"))
                    parts += ["", f"![{item.name}: {path.stem}]({link})"]
    return "\n".join(parts) + "\n"


STYLE = """body{font:15px/1.45 sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;font-size:13px;margin:1em 0;display:block;overflow-x:auto}
td,th{border-bottom:1px solid #ddd;padding:2px 9px;text-align:left;white-space:nowrap}
img{max-width:100%;display:block;margin:1em 0}pre{background:#f4f4f4;padding:.8em;overflow-x:auto}
.failed{color:#b00;font-weight:bold}h2{border-top:2px solid #ccc;padding-top:.6em}"""


def page(title: str, made: Sequence[tuple[Item, Record | None]]) -> str:
    """One file that needs no other."""
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1><p>{html.escape(summary(made))}</p>",
        "<table><tr><th>paper<th>item<th>wall-clock</tr>",
    ]
    for item, record in made:
        link = f'<a href="#{item.name}">{item.stem}</a>'
        parts.append(f"<tr><td>{item.paper}<td>{link}<td>{state(record)}</tr>")
    parts.append("</table>")
    for paper, members in by_paper(made):
        parts.append(f"<h2>{html.escape(PAPERS[paper])}</h2>")
        for item, record in members:
            path = item.path.relative_to(HERE.parent)
            parts.append(f'<h3 id="{item.name}">{html.escape(item.title)}</h3>')
            parts.append(f"<p><code>{path}</code>, {state(record)}.</p>")
            if record and record.text:
                parts.append(f"<pre>{html.escape(printable(record.text))}</pre>")
            files = [Path(file) for file in record.files] if record else []
            parts += [as_html(f.read_text()) for f in files if f.suffix == ".md"]
            for file in (f for f in files if f.suffix == ".png"):
                data = base64.b64encode(file.read_bytes()).decode()
                parts.append(f'<img alt="{file.stem}" src="data:image/png;base64,{data}">')
    return "\n".join(parts) + "</html>\n"


def state(record: Record | None) -> str:
    failed = record is not None and record.status != 0
    return f'<span class="failed">{state_text(record)}</span>' if failed else state_text(record)


def as_html(text: str) -> str:
    """The Markdown that tables are written in: pipes, bold cells, and paragraphs."""
    parts, table = [], False
    for line in text.splitlines():
        is_row = line.startswith("|")
        if is_row != table:
            parts.append("<table>" if is_row else "</table>")
            table = is_row
        if is_row:
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
            if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
                parts.append("<tr>" + "".join(f"<td>{as_cell(cell)}" for cell in cells) + "</tr>")
        elif line.strip():
            parts.append(f"<p>{html_text(plain_markdown(line.lstrip('#').strip()))}</p>")
    return "\n".join([*parts, *(["</table>"] if table else [])])


def as_cell(text: str) -> str:
    """A cell, bold where all of it is; the stars of a stranger's text are escaped."""
    bold = re.fullmatch(r"\*\*(.+)\*\*", text)
    shown = html_text(plain_markdown(bold[1] if bold else text))
    return f"<b>{shown}</b>" if bold else shown


def printable(text: str) -> str:
    """What a program printed, without what a terminal or a browser would obey."""
    return "\n".join(map(one_line, text.splitlines()))


def by_paper(made: Sequence[tuple[Item, Record | None]]):
    for paper in PAPERS:
        if members := [(item, record) for item, record in made if item.paper == paper]:
            yield paper, members


def summary(made: Sequence[tuple[Item, Record | None]]) -> str:
    records = [record for _, record in made if record]
    failed = [record.name for record in records if record.status]
    seconds = sum(record.seconds for record in records)
    text = f"{len(records)} of {len(made)} tables and figures, {seconds / 60:.1f} minutes in all"
    return f"{text}; failed: {', '.join(failed)}." if failed else f"{text}; none failed."


def make_all(arguments: Arguments) -> int:
    results = Path("results")
    folder = results / f"all-{arguments.preset}"
    chosen = items(arguments.only)
    if arguments.list:
        for item in chosen:
            done = "done" if read_record(folder, item) else "missing"
            print(f"{done:8} {item.name:16} {item.title}")
        return 0
    make_output_directory(folder)
    title = f"Tables and figures of four papers, preset {arguments.preset}"
    made: list[tuple[Item, Record | None]] = [(item, None) for item in chosen]
    for place, item in enumerate(chosen):
        record = None if arguments.again else read_record(folder, item)
        how = "done" if record else "made"
        try:
            record = record or run(item, arguments.preset, folder, results)
        except KeyboardInterrupt:
            print("stopped; the same command goes on from what is done", file=sys.stderr)
            return 130
        made[place] = (item, record)
        print(f"[{place + 1}/{len(chosen)}] {item.name}: {how}, {state_text(record)}", flush=True)
        # Written anew each time: what is there can be read while the rest is made.
        write_text(folder / "report.md", markdown(title, made, folder))
        write_text(folder / "report.html", page(title, made))
    print(summary(made))
    print(f"Written to {folder}: report.md, report.html.")
    return 1 if any(record and record.status for _, record in made) else 0


main = record_program(Arguments, make_all, "Every table and figure.")

if __name__ == "__main__":
    raise SystemExit(main())
