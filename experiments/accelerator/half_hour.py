"""Use half an hour on an accelerator: checks of the device, then tables of the papers.

python experiments/accelerator/half_hour.py                          nine minutes of it
python experiments/accelerator/half_hour.py --carry half_hour.tar    on a machine without storage
python experiments/accelerator/half_hour.py --scale quick            a rehearsal on a CPU

The tasks run in this order, as far as the time allows: the numbers of `prove.py`; DynaFed's Table 1
on Fashion-MNIST; the speeds of `prove.py`; Table 1 on CIFAR-10; FSL's Table I; FedAF's Table 1. The
most informative cells come first.

A repeated command continues where it stopped: completed runs are loaded, and a run continues from
its checkpoint. Tables whose data set is missing are skipped; a decoded data set in the cache
suffices (`datasets/fashion_mnist.npz` in $FEDJAX_HET_CACHE). With `--carry`, the small files of the
folder are read from that archive at the start and written to it at the end.
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
STATUS_NO_DATA = 3  # status of a task whose data set is missing
SHUTDOWN_SECONDS = 20.0  # seconds between the request to stop and the kill
MIN_SECONDS = 30.0  # seconds that must be left to begin a task
MAX_ARCHIVED_BYTES = 2**22  # largest size of an archived file


class Task(NamedTuple):
    """A program and its command line."""

    name: str
    program: str
    """A file below experiments/, or the name of a table: `fedaf.table1`."""
    words: tuple[str, ...]


class TaskStatus(NamedTuple):
    """Outcome of a task.

    Attributes:
      status: last exit status; 130: stopped, the same command continues.
      seconds: duration of all calls together.
      output: last lines of the program's output.
    """

    status: int
    seconds: float
    output: str


@dataclass
class Arguments:
    """Run the checks and the tables of the papers on an accelerator, as far as the time allows."""

    minutes: float = 9.0
    """Minutes after which the program ends."""
    scale: Literal["paper", "quick"] = "paper"
    """paper: settings of the papers, for an accelerator; quick: small settings, for a CPU."""
    carry: str | None = None
    """Archive of earlier results. It is read at the start and written at the end."""
    output_dir: str = "results/accelerator"
    """Folder of all results; half_hour.json lists the completed tasks."""
    list: bool = False
    """Print the tasks and their status; run nothing."""


def plan_tasks(scale: str, folder: Path) -> list[Task]:
    """List the tasks in the order in which they run.

    Args:
      scale: "paper" or "quick".
      folder: folder of all results.

    Returns:
      The tasks.
    """

    def table(program: str, *filters: str, of: str = "") -> Task:
        preset = "paper" if scale == "paper" else "quick"
        where = str(folder / program)
        words = ("--preset", preset, *filters, "--seeds", "0", "--output-dir", where)
        return Task(f"{program} {of}".strip(), program, words)

    sizes = ("--scale", "full" if scale == "paper" else "quick")

    def prove(only: str, *words: str) -> Task:
        arguments = (*sizes, "--only", only, *words, "--output-dir", str(folder))
        return Task(f"prove {only}", PROVE, arguments)

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


def run_task(task: Task, seconds: float) -> tuple[int, str]:
    """Run a task, and interrupt it when its time is up.

    Args:
      task: the task.
      seconds: maximum duration.

    Returns:
      `(status, output)`: the exit status, 130 if the task was stopped, and its output.
    """
    if task.program.endswith(".py"):
        words = [sys.executable, str(ACCELERATOR_FOLDER.parent / task.program), *task.words]
    else:
        table = ["-P", "-m", "fedjax_het", "table", task.program]
        words = [sys.executable, *table, *task.words]
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as behind `nohup ... &`
        # Else a task would ignore it too, and be killed.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C: the program saves its state
            try:
                output, _ = process.communicate(timeout=SHUTDOWN_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
            return 130, output
    return process.returncode, output


def run_campaign(arguments: Arguments) -> int:
    """Run the tasks that are not complete, as far as the time allows.

    Args:
      arguments: options of the program.

    Returns:
      The exit status: 1 if a task failed, else 0.

    Raises:
      ConfigError: if `minutes` is not positive.
    """
    ends = time.monotonic() + 60 * arguments.minutes
    require(arguments.minutes > 0, "minutes", arguments.minutes, "more than 0")
    folder = make_output_directory(arguments.output_dir)
    archive = None if arguments.carry is None else Path(arguments.carry)
    if archive is not None and archive.is_file():
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    path = folder / LOG_FILE
    done = {name: TaskStatus(*each) for name, each in _read_log(path).items()}
    tasks = plan_tasks(arguments.scale, folder)
    for task in tasks if not arguments.list else ():
        left = ends - time.monotonic() - SHUTDOWN_SECONDS
        before = done.get(task.name)
        if left < MIN_SECONDS or (before is not None and before.status == 0):
            continue
        began = time.monotonic()
        if task.program == PROVE:
            task = task._replace(words=(*task.words, "--minutes", f"{left / 60:.2f}"))
        status, output = run_task(task, left)
        if status == 2 and "no data in" in output:
            status = STATUS_NO_DATA
        seconds = time.monotonic() - began + (before.seconds if before else 0.0)
        done[task.name] = TaskStatus(
            status, round(seconds, 1), "\n".join(output.splitlines()[-40:])
        )
        write_text(path, json.dumps(done, indent=1))
        print(
            f"{task.name}: {_format_status(status)}, {seconds:.0f} s in all\n{output}", flush=True
        )
    for task in tasks:
        known = done.get(task.name)
        print(f"{task.name}: {_format_status(known.status) if known else 'not begun'}")
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
    """Write the small files of a folder to an archive and print the names of the large ones."""
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
