"""What the report of all tables and figures is of, and what became of it."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedjax_het.papers.archived_results import ArchivedResults
from fedjax_het.papers.programs import ProgramModule
from fedjax_het.runtime.result_store import list_run_files
from fedjax_het.utils.io import read_stored_file

PAPERS = {
    "dynafed": "DynaFed (Pi et al., CVPR 2023)",
    "fedaf": "FedAF (Wang et al., 2024)",
    "fedamp": "FedAMP (Huang et al., AAAI 2021)",
    "fsl": "FSL (Mai et al., 2022)",
}


@dataclass(frozen=True)
class PaperItem:
    """A table or figure of a paper."""

    paper: str
    stem: str
    """table1"""
    module: ProgramModule

    @property
    def name(self) -> str:
        return f"{self.paper}-{self.stem}"

    @property
    def path(self) -> Path:
        return self.module.path

    @property
    def title(self) -> str:
        return self.module.description

    @property
    def script(self) -> str:
        """The program's path in a checkout."""
        return f"experiments/{self.module.name.replace('.', '/')}.py"


@dataclass
class ProgramRecord:
    """What became of it."""

    name: str
    version: str
    status: int
    seconds: float
    files: list[str]
    text: str
    """The end of what it printed, where it failed."""
    command: str = ""
    made_by: str = ""
    """Versions and device."""
    when: str = ""


@dataclass
class ReportEntry:
    """A section of the report: what was made now, and what is kept."""

    item: PaperItem
    record: ProgramRecord | None = None
    archives: list[tuple[ArchivedResults, ProgramRecord]] = field(default_factory=list)


StudyRecords = dict[str, list[tuple[ArchivedResults, ProgramRecord]]]
"""By paper: what is kept of none of its tables and figures."""


def group_by_paper(entries: Sequence[ReportEntry]) -> Iterator[tuple[str, list[ReportEntry]]]:
    """Group entries by paper, in the order of `PAPERS`; papers without entries are left out."""
    for paper in PAPERS:
        if members := [entry for entry in entries if entry.item.paper == paper]:
            yield paper, members


def format_state(record: ProgramRecord | None) -> str:
    """Format how a program ended and how long it took."""
    if record is None:
        return "not made"
    state = "" if record.status == 0 else f"FAILED with exit status {record.status} after "
    minutes = record.seconds / 60
    return state + (f"{minutes:.1f} min" if minutes >= 2 else f"{record.seconds:.0f} s")


def summarize_entries(entries: Sequence[ReportEntry]) -> str:
    """Return a sentence with the number of finished items, their time and the failures."""
    records = [entry.record for entry in entries if entry.record]
    records += [record for entry in entries for _, record in entry.archives]
    num_made = sum(entry.record is not None for entry in entries)
    failed = [record.name for record in records if record.status]
    seconds = sum(entry.record.seconds for entry in entries if entry.record)
    text = f"{num_made} of {len(entries)} tables and figures, {seconds / 60:.1f} minutes in all"
    return f"{text}; failed: {', '.join(failed)}." if failed else f"{text}; none failed."


def describe_provenance(files: Iterable[str], default: str) -> str:
    """Describe versions and devices of the runs in the folders of some files.

    Args:
      files: files of tables and figures.
      default: text if the folders have no runs.
    """
    values_by_name: dict[str, set[str]] = {"fedjax_het": set(), "jax": set(), "device": set()}
    for folder in {Path(file).parent for file in files}:
        for path in list_run_files(folder):
            try:
                summary = json.loads(read_stored_file(path))["summary"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            for name, values in values_by_name.items():
                if summary.get(name):
                    values.add(str(summary[name]))
    if not values_by_name["fedjax_het"]:
        return default
    texts = {name: " and ".join(sorted(values)) for name, values in values_by_name.items()}
    return f"fedjax_het {texts['fedjax_het']}, jax {texts['jax']}, on {texts['device']}"
