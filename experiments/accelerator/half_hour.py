"""Half an hour on an accelerator, in pieces that stop in time and go on: proofs, then tables.

python experiments/accelerator/half_hour.py                          nine minutes of it
python experiments/accelerator/half_hour.py --carry half_hour.tar    on a machine that forgets
python experiments/accelerator/half_hour.py --scale quick            a rehearsal on a CPU

First `prove.py`; then the papers' tables at their own scale, the most telling cells first, as far
as the time goes: DynaFed's Table 1 on Fashion-MNIST and CIFAR-10, FSL's Table I, FedAF's Table 1.
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

from fedjax_het.common.errors import require
from fedjax_het.common.files import make_output_directory, write_atomically
from fedjax_het.report.programs import make_config_program
from fedjax_het.report.write import write_text

ACCELERATOR_FOLDER = Path(__file__).resolve().parent
LOG_FILE = "half_hour.json"
STATUS_NO_DATA = 3  # the status of a piece whose data set is not there
SHUTDOWN_SECONDS = 20.0  # seconds that what is asked to stop has for it
MIN_SECONDS = 30.0  # seconds below which nothing is begun
MAX_ARCHIVED_BYTES = 2**22  # bytes of a file that is carried


class Task(NamedTuple):
    """A program and its command line."""

    name: str
    program: str
    """A file below experiments/, or the name of a table: `fedaf.table1`."""
    arguments: tuple[str, ...]


class TaskStatus(NamedTuple):
    """What became of a piece: its last exit status, how long it took in all, its last words."""

    status: int
    seconds: float
    output: str


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

    def table(program: str, *filters: str, suffix: str = "") -> Task:
        preset = "paper" if scale == "paper" else "quick"
        output_folder = str(folder / program)
        arguments = ("--preset", preset, *filters, "--seeds", "0", "--output-dir", output_folder)
        return Task(f"{program} {suffix}".strip(), program, arguments)

    scale_arguments = ("--scale", "full" if scale == "paper" else "quick")
    parity_task = Task(
        "prove", "accelerator/prove.py", (*scale_arguments, "--output-dir", str(folder))
    )
    if scale == "quick":
        quick_arguments = ("--methods", "fedavg", "--rounds", "2", "--alphas")
        return [
            parity_task._replace(
                arguments=(*parity_task.arguments, "--methods", "fedavg", "--only", "numbers")
            ),
            table("table1", *quick_arguments, "0.04"),
            table("fedaf.table1", *quick_arguments, "0.1"),
        ]
    main_row, control_row = "dynafed", "dynafed(synthetic='real')"
    methods = ("--methods", "fedavg", main_row, control_row, "scaffold")
    fashion_mnist_filter, cifar10_filter = (
        ("--datasets", "fashion_mnist"),
        ("--datasets", "cifar10"),
    )
    return [
        parity_task,
        *(
            table(
                "table1",
                *fashion_mnist_filter,
                "--alphas",
                alpha,
                *methods,
                suffix=f"fashion {alpha}",
            )
            for alpha in ("0.01", "0.16")
        ),
        table("table1", *cifar10_filter, "--alphas", "0.01", *methods, suffix="cifar 0.01"),
        table("fsl.table1", "--methods", "fedavg", "fsl", "data_sharing"),
        table("fedaf.table1", *fashion_mnist_filter, "--alphas", "0.02", suffix="fashion 0.02"),
        table("fedaf.table1", *cifar10_filter, "--alphas", "0.02", suffix="cifar 0.02"),
    ]


def run_task(task: Task, seconds: float) -> tuple[int, str]:
    """Run a piece for so long at most: its exit status, 130 where it was stopped, and its last
    words."""
    if task.program.endswith(".py"):
        arguments = [sys.executable, str(ACCELERATOR_FOLDER.parent / task.program), *task.arguments]
    else:
        table_command = ["-P", "-m", "fedjax_het.cli", "table", task.program]
        arguments = [sys.executable, *table_command, *task.arguments]
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as behind `nohup ... &`
        # Else a piece would ignore it too, and be killed.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C: it keeps what it has
            try:
                output, _ = process.communicate(timeout=SHUTDOWN_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
            return 130, output
    return process.returncode, output


def run_campaign(arguments: Arguments) -> int:
    """The pieces that are not done, as far as the time goes. 1 where one has failed."""
    deadline = time.monotonic() + 60 * arguments.minutes
    require(arguments.minutes > 0, "minutes", arguments.minutes, "more than 0")
    folder = make_output_directory(arguments.output_dir)
    archive = None if arguments.carry is None else Path(arguments.carry)
    if archive is not None and archive.is_file():
        with tarfile.open(archive) as tar_file:
            tar_file.extractall(folder, filter="data")
    path = folder / LOG_FILE
    statuses = {name: TaskStatus(*status_fields) for name, status_fields in _read_log(path).items()}
    tasks = plan_tasks(arguments.scale, folder)
    for task in tasks if not arguments.list else ():
        remaining_seconds = deadline - time.monotonic() - SHUTDOWN_SECONDS
        previous_status = statuses.get(task.name)
        if remaining_seconds < MIN_SECONDS or (
            previous_status is not None and previous_status.status == 0
        ):
            continue
        start_time = time.monotonic()
        if task.name == "prove":
            task = task._replace(
                arguments=(*task.arguments, "--minutes", f"{remaining_seconds / 60:.2f}")
            )
        status, output = run_task(task, remaining_seconds)
        if status == 2 and "no prepared data" in output:
            status = STATUS_NO_DATA
        seconds = (
            time.monotonic() - start_time + (previous_status.seconds if previous_status else 0.0)
        )
        statuses[task.name] = TaskStatus(
            status, round(seconds, 1), "\n".join(output.splitlines()[-40:])
        )
        write_text(path, json.dumps(statuses, indent=1))
        print(
            f"{task.name}: {_format_status(status)}, {seconds:.0f} s in all\n{output}", flush=True
        )
    for task in tasks:
        task_status = statuses.get(task.name)
        print(f"{task.name}: {_format_status(task_status.status) if task_status else 'not begun'}")
    if archive is not None:
        _write_archive(folder, archive)
    return int(
        any(
            status_fields.status not in (0, 130, STATUS_NO_DATA)
            for status_fields in statuses.values()
        )
    )


def _format_status(status: int) -> str:
    status_texts = {
        0: "done",
        130: "goes on",
        STATUS_NO_DATA: "passed over, as its data are not there",
    }
    return status_texts.get(status, f"failed with status {status}")


def _read_log(path: Path) -> dict[str, list]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _write_archive(folder: Path, archive: Path) -> None:
    """Write the files of a folder that are not large to an archive; say which are."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    archived_files = [
        path for path in files if path.stat().st_size <= MAX_ARCHIVED_BYTES and path != archive
    ]

    def write(file):
        with tarfile.open(fileobj=file, mode="w:gz") as tar_file:
            for path in archived_files:
                tar_file.add(path, path.relative_to(folder))

    write_atomically(archive, write)
    skipped_files = [str(path.relative_to(folder)) for path in files if path not in archived_files]
    if skipped_files:
        print(f"left out of {archive}, as they are large: {', '.join(skipped_files)}")


main = make_config_program(Arguments, run_campaign, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
