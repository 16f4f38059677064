"""Half an hour on an accelerator, in pieces that stop in time and go on: proofs, then tables.

python experiments/accelerator/half_hour.py                          nine minutes of it
python experiments/accelerator/half_hour.py --carry half_hour.tar    on a machine that forgets
python experiments/accelerator/half_hour.py --scale quick            a rehearsal on a CPU

First the numbers of `prove.py`; then the papers' tables at their own scale, the most telling cells
first, as far as the time goes: DynaFed's Table 1 on Fashion-MNIST, the speeds of `prove.py`, then
Table 1 on CIFAR-10, FSL's Table I, FedAF's Table 1.
The same command goes on where it stopped: with the runs that are made, within a run from its
checkpoint. Data sets that are not there are passed over. Of data, a decoded set of the cache is
enough (`datasets/fashion_mnist.npz` in $FEDJAX_HET_CACHE). With `--carry` the folder's small files
are taken from that archive at the start, and written to it at the end.
"""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from fedjax_het.analysis.report import write_text
from fedjax_het.papers.programs import make_config_program
from fedjax_het.utils.errors import require
from fedjax_het.utils.io import make_output_directory, write_atomically

ACCELERATOR_FOLDER = Path(__file__).resolve().parent
LOG_FILE = "half_hour.json"
PROVE = "accelerator/prove.py"
STATUS_NO_DATA = 3  # the status of a piece whose data set is not there
SHUTDOWN_SECONDS = 20.0  # seconds that what is asked to stop has for it
MIN_SECONDS = 30.0  # seconds below which nothing is begun
MAX_ARCHIVED_BYTES = 2**22  # bytes of a file that is carried


class Task(NamedTuple):
    """A program and its command line."""

    name: str
    program: str
    """A file below experiments/, or the name of a table: `fedaf.table1`."""
    words: tuple[str, ...]


class TaskStatus(NamedTuple):
    """What became of a piece: its last exit status, how long it took in all, its last words."""

    status: int
    seconds: float
    said: str


@dataclass
class Arguments:
    """The command line."""

    minutes: float = 9.0
    """After which it has ended."""
    scale: Literal["paper", "quick"] = "paper"
    """paper: for an accelerator; quick: the tables' quick presets, a rehearsal."""
    carry: str | None = None
    """An archive of what was done before, which is written anew at the end."""
    output_dir: str = "results/accelerator"
    """Where everything is: half_hour.json says what was done."""
    list: bool = False
    """Print the pieces and what became of them; run nothing."""


def plan_tasks(scale: str, folder: Path) -> list[Task]:
    """In the order in which they are made."""

    def table(program: str, *filters: str, of: str = "") -> Task:
        preset = "paper" if scale == "paper" else "quick"
        where = str(folder / program)
        words = ("--preset", preset, *filters, "--seeds", "0", "--output-dir", where)
        return Task(f"{program} {of}".strip(), program, words)

    sizes = ("--scale", "full" if scale == "paper" else "quick")

    def prove(only: str, *words: str) -> Task:
        given = (*sizes, "--only", only, *words, "--output-dir", str(folder))
        return Task(f"prove {only}", PROVE, given)

    if scale == "quick":
        quick = ("--methods", "fedavg", "--rounds", "2", "--alphas")
        return [
            prove("numbers", "--methods", "fedavg"),
            table("table1", *quick, "0.04"),
            table("fedaf.table1", *quick, "0.1"),
        ]
    central, real = "dynafed", "dynafed(synthetic='real')"
    telling = ("--methods", "fedavg", central, real, "scaffold")
    fashion, cifar = ("--datasets", "fashion_mnist"), ("--datasets", "cifar10")
    return [
        prove("numbers"),
        table("table1", *fashion, "--alphas", "0.01", *telling, of="fashion 0.01"),
        prove("speed"),
        table("table1", *fashion, "--alphas", "0.16", *telling, of="fashion 0.16"),
        table("table1", *cifar, "--alphas", "0.01", *telling, of="cifar 0.01"),
        table("fsl.table1", "--methods", "fedavg", "fsl", "data_sharing"),
        table("fedaf.table1", *fashion, "--alphas", "0.02", of="fashion 0.02"),
        table("fedaf.table1", *cifar, "--alphas", "0.02", of="cifar 0.02"),
    ]


def run_task(piece: Task, seconds: float) -> tuple[int, str]:
    """Run a piece for so long at most: its exit status, 130 where it was stopped, and its last
    words."""
    if piece.program.endswith(".py"):
        words = [sys.executable, str(ACCELERATOR_FOLDER.parent / piece.program), *piece.words]
    else:
        table = ["-P", "-m", "fedjax_het.cli", "table", piece.program]
        words = [sys.executable, *table, *piece.words]
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as behind `nohup ... &`
        # Else a piece would ignore it too, and be killed.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C: it keeps what it has
            try:
                said, _ = process.communicate(timeout=SHUTDOWN_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                said, _ = process.communicate()
            return 130, said
    return process.returncode, said


def run_campaign(arguments: Arguments) -> int:
    """The pieces that are not done, as far as the time goes. 1 where one has failed."""
    ends = time.monotonic() + 60 * arguments.minutes
    require(arguments.minutes > 0, "minutes", arguments.minutes, "more than 0")
    folder = make_output_directory(arguments.output_dir)
    archive = None if arguments.carry is None else Path(arguments.carry)
    if archive is not None and archive.is_file():
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    path = folder / LOG_FILE
    done = {name: TaskStatus(*each) for name, each in _read_log(path).items()}
    planned = plan_tasks(arguments.scale, folder)
    for piece in planned if not arguments.list else ():
        left = ends - time.monotonic() - SHUTDOWN_SECONDS
        before = done.get(piece.name)
        if left < MIN_SECONDS or (before is not None and before.status == 0):
            continue
        began = time.monotonic()
        if piece.program == PROVE:
            piece = piece._replace(words=(*piece.words, "--minutes", f"{left / 60:.2f}"))
        status, said = run_task(piece, left)
        if status == 2 and "no prepared data" in said:
            status = STATUS_NO_DATA
        seconds = time.monotonic() - began + (before.seconds if before else 0.0)
        done[piece.name] = TaskStatus(status, round(seconds, 1), "\n".join(said.splitlines()[-40:]))
        write_text(path, json.dumps(done, indent=1))
        print(f"{piece.name}: {_format_status(status)}, {seconds:.0f} s in all\n{said}", flush=True)
    for piece in planned:
        known = done.get(piece.name)
        print(f"{piece.name}: {_format_status(known.status) if known else 'not begun'}")
    if archive is not None:
        _write_archive(folder, archive)
    return int(any(each.status not in (0, 130, STATUS_NO_DATA) for each in done.values()))


def _format_status(status: int) -> str:
    words = {0: "done", 130: "goes on", STATUS_NO_DATA: "passed over, as its data are not there"}
    return words.get(status, f"failed with status {status}")


def _read_log(path: Path) -> dict[str, list]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _write_archive(folder: Path, archive: Path) -> None:
    """Write the files of a folder that are not large to an archive; say which are."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    small = [
        path for path in files if path.stat().st_size <= MAX_ARCHIVED_BYTES and path != archive
    ]

    def write(file):
        with tarfile.open(fileobj=file, mode="w:gz") as packed:
            for path in small:
                packed.add(path, path.relative_to(folder))

    write_atomically(archive, write)
    left = [str(path.relative_to(folder)) for path in files if path not in small]
    if left:
        print(f"left out of {archive}, as they are large: {', '.join(left)}")


main = make_config_program(Arguments, run_campaign, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
