"""Prove a device: the same numbers as on the CPU, and what is fastest on it.

python experiments/accelerator/prove.py                 what jax finds, about five minutes
python experiments/accelerator/prove.py --scale quick   small; two minutes on a CPU

Correctness: each method runs five rounds on made-up data, on the device and on the CPU, both with
true float32 products. Beside the difference is what another order of sums makes of the CPU's own
numbers (four lanes instead of one): a device that rounds as well differs about as much. Speed:
client samples a second of FedAvg's rounds by network, implementation of convolutions, lanes and
precision; compilation apart. `prove.json` has all of it and the settings that were fastest.
A case that fails is a line with its error, and the others go on; what is done is not done again.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple

import numpy as np

from fedjax_het.common.errors import require_name
from fedjax_het.common.files import make_output_directory
from fedjax_het.common.records import Bounds
from fedjax_het.engine.probe import MAX_UNROLLED_LANES
from fedjax_het.nn.computing import BFLOAT16, FLOAT32, TF32
from fedjax_het.nn.conv_products import IM2COL, NATIVE, UNROLLED
from fedjax_het.report.programs import make_config_program
from fedjax_het.report.render import (
    TableSection,
    TextTable,
    format_number,
    print_table,
    to_markdown,
)
from fedjax_het.report.write import write_text

RESULTS_FILE = "prove.json"
WORKER_FLAG = "--measure"  # what a process of its own is asked, which reads its cases as JSON
MIN_TOLERANCE = (
    1e-3  # relative: a smaller difference is rounding, whatever another order of sums makes
)
REORDERING_FACTOR = 30.0  # times what another order makes
PRECISIONS = {
    "cpu": (FLOAT32,),
    "gpu": (FLOAT32, TF32, BFLOAT16),
    "tpu": (FLOAT32, BFLOAT16),
}


class Scale(NamedTuple):
    """How large the cases are."""

    pixels: int
    examples: int
    clients: int
    width: int
    lanes: tuple[int, ...]
    rounds: int


SCALES = {
    "quick": Scale(12, 2_000, 20, 8, (1, 4), 4),
    "full": Scale(28, 60_000, 80, 128, (1, 4, 16, 32), 6),
}

CONDENSATION_OPTIONS = {"ipc": 2, "steps": 4, "server_epochs": 2, "threshold": 5}
# Methods whose programs differ, each small: (name, settings).
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"model": "mlp"},
    "fedavg, convnet": {"model": "convnet", "width": 8},
    "fedavg, convnet, im2col": {
        "model": "convnet",
        "width": 8,
        "network_options": {"conv_impl": "im2col"},
    },
    "fedavg, convnet, native": {
        "model": "convnet",
        "width": 8,
        "network_options": {"conv_impl": "native"},
    },
    "fedbn, convnet": {"model": "convnet", "width": 8, "norm": "batch"},
    "scaffold": {"model": "mlp"},
    "fednova": {"model": "mlp"},
    "moon": {"model": "mlp"},
    "fedgen": {"model": "mlp"},
    "feddf": {"model": "mlp"},
    "dynafed": {
        "model": "mlp",
        "options": {"trajectory_rounds": 4, "segment_length": 3, "num_iterations": 3},
    },
    "feddm": {"model": "mlp", "options": CONDENSATION_OPTIONS},
    "fedaf": {"model": "mlp", "options": CONDENSATION_OPTIONS},
    "fedamp": {"model": "mlp"},
    "ditto": {"model": "mlp"},
    "fsl": {"model": "mlp"},
}


class Case(NamedTuple):
    """What is measured once."""

    name: str
    kind: Literal["numbers", "speed"]
    scale: str
    settings: dict[str, Any]
    lanes: int


class Worker(NamedTuple):
    """A process of its own, and what it measures one after the other."""

    environment: dict[str, str]
    """Variables that say where it runs."""
    cases: list[Case]


@dataclass
class Arguments:
    """The command line."""

    scale: Literal["full", "quick"] = "full"
    """full: as the papers' runs, for an accelerator; quick: small, for a CPU."""
    only: Literal["numbers", "speed", "all"] = "all"
    """What is measured."""
    methods: tuple[str, ...] | None = None
    """Of which the numbers are compared (default: all)."""
    minutes: Annotated[float, Bounds(0, 1e6, open_low=True)] = 30.0
    """After which no case is begun; the same command goes on."""
    output_dir: str = "results/accelerator"
    """Where prove.json and prove.md are."""


def make_synthetic_dataset(scale: Scale) -> Any:
    """A data set of ten classes: blurred spots, and noise."""
    from fedjax_het import dataset_from_arrays

    rng, size = np.random.default_rng(0), scale.pixels
    class_patterns = rng.random((10, size, size, 1))

    def draw(num_images):
        labels = rng.integers(0, 10, num_images)
        images = 0.6 * class_patterns[labels] + 0.4 * rng.random((num_images, size, size, 1))
        return (255 * images).astype(np.uint8), labels

    images, labels = draw(scale.examples)
    test_images, test_labels = draw(max(200, scale.examples // 10))
    return dataset_from_arrays(
        train_images=images, train_labels=labels, test_images=test_images, test_labels=test_labels
    )


def measure_case(case: Case) -> dict[str, Any]:
    """In this process, on its first device: losses and norms of every round, or client samples a
    second."""
    import jax

    from fedjax_het import Placement, RunSpec, simulate

    scale = SCALES[case.scale if case.kind == "speed" else "quick"]
    settings = {"num_clients": scale.clients, "rounds": scale.rounds, "seed": 0, **case.settings}
    spec = RunSpec(dataset="user", **settings)
    placement = Placement(lanes=case.lanes, devices=1)
    result = simulate(spec, dataset=make_synthetic_dataset(scale), placement=placement)
    record: dict[str, Any] = {"device": jax.devices()[0].device_kind}
    if case.kind == "speed":
        summary_names = ("client_samples_per_second", "compile_seconds")
        return record | {name: result.summary[name] for name in summary_names}
    curves = ("train_loss", "update_norm", "test_loss", "client_accuracy")
    curves_by_name = {name: result.metrics[name] for name in curves if name in result.metrics}
    return record | {name: np.asarray(curve).tolist() for name, curve in curves_by_name.items()}


def serve_cases() -> None:
    """The cases on standard input, a line of standard output for each."""
    for case_fields in json.load(sys.stdin):
        case = Case(*case_fields)
        try:
            record = measure_case(case)
        except Exception as error:  # whatever it is, the others are to be measured
            record = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        print(json.dumps({"name": case.name, **record}), flush=True)


def run_workers(workers: list[Worker], seconds: float) -> list[dict[str, dict[str, Any]]]:
    """What each place has found by name, after so many seconds at most; all of them side by side.
    A case that a place did not come to is not there."""
    command = [sys.executable, str(Path(__file__).resolve()), WORKER_FLAG]
    with ExitStack() as files:
        processes = []
        for worker in workers:
            output_file = files.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(
                command,
                env={**os.environ, **worker.environment},
                stdin=subprocess.PIPE,
                stdout=output_file,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(worker.cases))
            process.stdin.close()
            processes.append((process, output_file))
        deadline = time.monotonic() + seconds
        for process, _ in processes:
            try:
                process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return [_read_records(output_file) for _, output_file in processes]


def _read_records(output_file: IO[str]) -> dict[str, dict[str, Any]]:
    output_file.seek(0)
    records = [
        json.loads(line) for line in output_file if line.startswith("{") and line.endswith("}\n")
    ]
    return {record.pop("name"): record for record in records}


def make_parity_workers(names: Sequence[str]) -> list[Worker]:
    """The device, the CPU, and the CPU in another order."""
    cases = []
    for name in names:
        method = name.split(",")[0]
        settings = {"algorithm": method, "precision": FLOAT32, **METHODS[name], "rounds": 5}
        cases.append(Case(name, "numbers", "quick", settings, 4))
    cpu_environment = {"JAX_PLATFORMS": "cpu"}
    single_lane_cases = [case._replace(lanes=1) for case in cases]
    return [
        Worker({}, cases),
        Worker(cpu_environment, cases),
        Worker(cpu_environment, single_lane_cases),
    ]


def make_speed_workers(scale: str, platform: str) -> list[Worker]:
    """FedAvg by precision, and in each by network, implementation and lanes."""
    scale_config, workers = SCALES[scale], []
    networks: list[tuple[str, dict[str, Any]]] = [("mlp", {"model": "mlp"})]
    for impl in (IM2COL, NATIVE, UNROLLED):
        options = {"width": scale_config.width, "network_options": {"conv_impl": impl}}
        networks.append((f"convnet, {impl}", {"model": "convnet", **options}))
    for precision in PRECISIONS.get(platform, (FLOAT32,)):
        cases = []
        for network, settings in networks:
            for lanes in scale_config.lanes:
                if lanes > MAX_UNROLLED_LANES and network.endswith(UNROLLED):
                    continue
                name = f"{network}, {precision}, {lanes} lanes"
                precision_settings = {
                    "precision": precision,
                    "eval_every": scale_config.rounds,
                    **settings,
                }
                cases.append(
                    Case(name, "speed", scale, {"algorithm": "fedavg", **precision_settings}, lanes)
                )
        workers.append(Worker({}, cases))
    return workers


def compare_curves(device: dict, cpu: dict, reordered_cpu: dict) -> dict[str, Any]:
    """How far the device's curves are from the CPU's, relative; and the CPU's from its own in
    another order."""
    errors = [record["error"] for record in (device, cpu, reordered_cpu) if "error" in record]
    if errors:
        return {"error": errors[0]}

    def max_relative_difference(record, other_record):
        curves = [name for name in record if name != "device"]
        pairs = [(np.asarray(record[name]), np.asarray(other_record[name])) for name in curves]
        if any((np.isnan(a) != np.isnan(b)).any() for a, b in pairs):
            return float("inf")
        return max(
            float(np.nanmax(np.abs(a - b), initial=0) / max(np.nanmax(np.abs(b), initial=0), 1e-12))
            for a, b in pairs
        )

    difference, reordering_difference = (
        max_relative_difference(device, cpu),
        max_relative_difference(reordered_cpu, cpu),
    )
    agrees = difference <= max(MIN_TOLERANCE, REORDERING_FACTOR * reordering_difference)
    return {"difference": difference, "another order": reordering_difference, "agrees": agrees}


def select_fastest(speeds: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By network and precision the implementation and lanes of most samples a second."""
    best: dict[str, dict[str, Any]] = {}
    for name, record in speeds.items():
        rate = record.get("client_samples_per_second", 0.0)
        *network, precision, lanes = name.split(", ")
        key = f"{network[0]}, {precision}"
        if rate > best.get(key, {}).get("client_samples_per_second", 0.0):
            network_settings = {"conv_impl": network[1]} if len(network) > 1 else {}
            num_lanes = int(lanes.removesuffix(" lanes"))
            best[key] = {**network_settings, "lanes": num_lanes, "client_samples_per_second": rate}
    return best


def make_tables(stored_results: dict[str, Any]) -> list[TextTable]:
    """Of the numbers, of the speeds, and of what was fastest, as far as they are known."""
    device = stored_results["device"]
    numbers = _make_table(
        f"{device} against the CPU, both in float32",
        ("Method",),
        (*_PARITY_COLUMNS, "Error"),
        stored_results["numbers"],
        "Largest relative difference of losses and norms over the rounds; another order: the "
        "CPU's own, with one lane instead of four.",
    )
    speed = _make_table(
        f"{device}: FedAvg's rounds",
        ("Case",),
        (*_SPEED_COLUMNS, "Error"),
        stored_results["speed"],
        "Client samples a second; compilation in seconds, apart.",
    )
    best = _make_table(
        f"{device}: fastest", ("Network",), ("conv_impl", "lanes"), stored_results["fastest"]
    )
    return [table for table in (numbers, speed, best) if table.sections[0].rows]


_PARITY_COLUMNS = ("difference", "another order", "agrees")
_SPEED_COLUMNS = ("client_samples_per_second", "compile_seconds")


def _make_table(
    title: str,
    names: tuple[str],
    values: tuple[str, ...],
    records: dict[str, dict[str, Any]],
    *notes: str,
) -> TextTable:
    rows = tuple(
        {names[0]: name, **{value: _format_value(record.get(value.lower())) for value in values}}
        for name, record in records.items()
    )
    return TextTable(title, names, values, (TableSection(rows),), notes)


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return format_number(value, ",.0f" if value >= 100 else ".2g")
    return "" if value is None else str(value)


def run_checks(arguments: Arguments) -> int:
    """All cases that are not done. 1 where a method's numbers do not agree."""
    names = tuple(METHODS) if arguments.methods is None else arguments.methods
    for name in names:
        require_name("methods", name, METHODS)
    folder, deadline = make_output_directory(arguments.output_dir), time.monotonic()
    deadline += 60 * arguments.minutes
    path = folder / RESULTS_FILE
    stored_results: dict[str, Any] = {"numbers": {}, "speed": {}, "fastest": {}}
    if path.is_file():
        stored_results |= json.loads(path.read_text())
    stored_results["device"], platform = _query_device()

    def pending_cases(kind: str, cases: Iterable[str]) -> list[str]:
        return [name for name in cases if "error" in stored_results[kind].get(name, {"error": ""})]

    def store_results(kind: str, records: dict[str, dict[str, Any]]) -> None:
        stored_results[kind] |= records
        stored_results["fastest"] = select_fastest(stored_results["speed"])
        write_text(path, json.dumps(stored_results, indent=1))

    if arguments.only != "speed" and (pending := pending_cases("numbers", names)):
        device, *cpu_records = run_workers(
            make_parity_workers(pending), deadline - time.monotonic()
        )
        completed = [
            name for name in pending if all(name in records for records in (device, *cpu_records))
        ]
        comparisons = {
            name: compare_curves(
                device[name], *(worker_records[name] for worker_records in cpu_records)
            )
            for name in completed
        }
        store_results("numbers", comparisons)
    for worker in (
        make_speed_workers(arguments.scale, platform) if arguments.only != "numbers" else ()
    ):
        pending = pending_cases("speed", [case.name for case in worker.cases])
        if pending and time.monotonic() < deadline:
            worker = worker._replace(cases=[case for case in worker.cases if case.name in pending])
            (records,) = run_workers([worker], deadline - time.monotonic())
            store_results("speed", records)
    text_tables = make_tables(stored_results)
    for table in text_tables:
        print_table(table)
    write_text(folder / "prove.md", "\n".join(map(to_markdown, text_tables)))
    failed_methods = [
        name
        for name, text_tables in stored_results["numbers"].items()
        if not text_tables.get("agrees")
    ]
    if failed_methods:
        print(f"Not as on the CPU: {', '.join(failed_methods)}.", file=sys.stderr)
    return 1 if failed_methods else 0


def _query_device() -> tuple[str, str]:
    """The kind of jax's first device, and its platform; found in a process of its own, since this
    one is not to hold it."""
    query_code = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind)"
    process = subprocess.run([sys.executable, "-c", query_code], capture_output=True, text=True)
    platform, _, kind = process.stdout.strip().splitlines()[-1].partition(" ")
    return kind, platform


main = make_config_program(Arguments, run_checks, __doc__)

if __name__ == "__main__":
    if WORKER_FLAG in sys.argv:
        serve_cases()
        raise SystemExit(0)
    raise SystemExit(main())
