"""Check a device: compare its numbers with numbers of the CPU, and find its fastest settings.

python experiments/accelerator/prove.py                 first device of jax; 15 minutes on an H200
python experiments/accelerator/prove.py --scale quick   small cases; ten minutes on one CPU core

Correctness: each method runs five rounds on synthetic data, on the device and on the CPU, both with
float32 products. The difference is compared with the effect of another order of sums on the CPU
(four lanes instead of one): a correct device differs about as much.

Speed: client samples per second of FedAvg's rounds by network, implementation of convolutions,
lanes and precision, the median of all rounds except the first. Compile times are separate.
`prove.json` holds all numbers and the fastest settings. A case that fails is a line with its error.
A repeated command continues with the missing cases; the exit status is 130 while cases are missing.
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

from fedjax_het.analysis.render import (
    TableSection,
    TextTable,
    format_number,
    print_table,
    to_markdown,
)
from fedjax_het.analysis.report import write_text
from fedjax_het.core.autotune import MAX_UNROLLED_LANES
from fedjax_het.nn.conv_products import IM2COL, NATIVE, UNROLLED
from fedjax_het.nn.precision import BFLOAT16, FLOAT32, TF32
from fedjax_het.nn.precision import PRECISIONS as ALL_PRECISIONS
from fedjax_het.papers.programs import make_config_program
from fedjax_het.utils.config import Bounds
from fedjax_het.utils.errors import require, require_name
from fedjax_het.utils.io import make_output_directory

RESULTS_FILE = "prove.json"
WORKER_FLAG = "--measure"  # flag of a subprocess that reads its cases as JSON
# Relative difference that counts as rounding, independent of the order of sums.
MIN_TOLERANCE = 1e-3
REORDERING_FACTOR = 30.0  # factor on the difference of another order of sums
PRECISIONS = {"cpu": (FLOAT32,), "gpu": (FLOAT32, TF32, BFLOAT16), "tpu": (FLOAT32, BFLOAT16)}


class Scale(NamedTuple):
    """Sizes of the data set, the federation and the network of the cases."""

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
    **{
        f"fedavg, convnet, {impl}": {
            **{"model": "convnet", "width": 8},
            "network_options": {"conv_impl": impl},
        }
        for impl in (IM2COL, NATIVE)
    },
    "fedbn, convnet": {"model": "convnet", "width": 8, "norm": "batch"},
    **{name: {"model": "mlp"} for name in ("scaffold", "fednova", "moon", "fedgen", "feddf")},
    "dynafed": {
        "model": "mlp",
        "options": {"trajectory_rounds": 4, "segment_length": 3, "num_iterations": 3},
    },
    "feddm": {"model": "mlp", "options": CONDENSATION_OPTIONS},
    "fedaf": {"model": "mlp", "options": CONDENSATION_OPTIONS},
    **{name: {"model": "mlp"} for name in ("fedamp", "ditto", "fsl")},
}


class Case(NamedTuple):
    """A measurement: a method or a network with its settings."""

    name: str
    kind: Literal["numbers", "speed"]
    scale: str
    settings: dict[str, Any]
    lanes: int


class Worker(NamedTuple):
    """A process of its own and the cases that it measures one after the other."""

    environment: dict[str, str]
    """Environment variables, which choose the device."""
    cases: list[Case]


@dataclass
class Arguments:
    """Compare an accelerator with the CPU and find its fastest settings."""

    scale: Literal["full", "quick"] = "full"
    """full: sizes of the papers' runs, for an accelerator; quick: small sizes, for a CPU."""
    only: Literal["numbers", "speed", "all"] = "all"
    """Measurements to make."""
    methods: tuple[str, ...] | None = None
    """Methods whose numbers are compared (default: all)."""
    precisions: tuple[str, ...] | None = None
    """Precisions of the device whose speed is measured (default: all)."""
    lanes: tuple[int, ...] | None = None
    """Numbers of lanes of the scale whose speed is measured (default: all)."""
    minutes: Annotated[float, Bounds(0, 1e6, open_low=True)] = 30.0
    """Minutes after which no case starts; the same command continues."""
    output_dir: str = "results/accelerator"
    """Folder of prove.json and prove.md."""


def make_synthetic_dataset(scale: Scale) -> Any:
    """Make a data set of ten classes: blurred spots with noise."""
    from fedjax_het import dataset_from_arrays

    rng, size = np.random.default_rng(0), scale.pixels
    spots = rng.random((10, size, size, 1))

    def draw(count):
        labels = rng.integers(0, 10, count)
        images = 0.6 * spots[labels] + 0.4 * rng.random((count, size, size, 1))
        return (255 * images).astype(np.uint8), labels

    return dataset_from_arrays(*draw(scale.examples), *draw(max(200, scale.examples // 10)))


def measure_case(case: Case) -> dict[str, Any]:
    """Measure a case in this process, on its first device.

    Args:
      case: the case.

    Returns:
      The device and, by kind of the case, losses and norms of every round, or client samples per
      second and the compile time in seconds.
    """
    import jax

    from fedjax_het import Placement, RunSpec, simulate
    from fedjax_het.config.settings import get_former_protocol
    from fedjax_het.runtime.benchmark import benchmark_rounds

    scale = SCALES[case.scale if case.kind == "speed" else "quick"]
    settings = {"num_clients": scale.clients, "rounds": scale.rounds, "seed": 0, **case.settings}
    # The recorded measurements have this protocol.
    settings["protocol"] = get_former_protocol(settings["algorithm"])
    spec = RunSpec(dataset="user", **settings)
    placement = Placement(lanes=case.lanes, devices=1)
    actual: dict[str, Any] = {"device": jax.devices()[0].device_kind}
    dataset = make_synthetic_dataset(scale)
    if case.kind == "speed":
        times = benchmark_rounds(spec, scale.rounds, dataset, placement=placement)
        # The first also loads kernels and captures graphs.
        rates = np.divide(times.samples[1:], times.seconds[1:])
        actual["client_samples_per_second"] = float(np.median(rates))
        return actual | {"compile_seconds": times.compile_seconds}
    result = simulate(spec, dataset=dataset, placement=placement)
    curves = ("train_loss", "update_norm", "test_loss", "client_accuracy")
    named = {name: result.metrics[name] for name in curves if name in result.metrics}
    return actual | {name: np.asarray(curve).tolist() for name, curve in named.items()}


def serve_cases() -> None:
    """Measure the cases on standard input and print a line of JSON for each."""
    for arguments in json.load(sys.stdin):
        case = Case(*arguments)
        try:
            actual = measure_case(case)
        except Exception as error:  # whatever it is, the others are to be measured
            actual = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        print(json.dumps({"name": case.name, **actual}), flush=True)


def run_workers(workers: list[Worker], seconds: float) -> list[dict[str, dict[str, Any]]]:
    """Run all workers in parallel.

    Args:
      workers: the workers.
      seconds: maximum duration.

    Returns:
      The records of each worker by case name. Cases that a worker did not reach are absent.
    """
    words = [sys.executable, str(Path(__file__).resolve()), WORKER_FLAG]
    with ExitStack() as files:
        running = []
        for worker in workers:
            output = files.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(
                words,
                env={**os.environ, **worker.environment},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(worker.cases))
            process.stdin.close()
            running.append((process, output))
        ends = time.monotonic() + seconds
        for process, _ in running:
            try:
                process.wait(max(1.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return [_read_records(output) for _, output in running]


def _read_records(output: IO[str]) -> dict[str, dict[str, Any]]:
    output.seek(0)
    actual = [json.loads(line) for line in output if line.startswith("{") and line.endswith("}\n")]
    return {result.pop("name"): result for result in actual}


def make_parity_workers(names: Sequence[str]) -> list[Worker]:
    """Return the workers for the device, the CPU, and the CPU with another order of sums."""
    cases = []
    for name in names:
        method = name.split(",")[0]
        settings = {"algorithm": method, "precision": FLOAT32, **METHODS[name], "rounds": 5}
        cases.append(Case(name, "numbers", "quick", settings, 4))
    on_cpu = {"JAX_PLATFORMS": "cpu"}
    alone = [case._replace(lanes=1) for case in cases]
    return [Worker({}, cases), Worker(on_cpu, cases), Worker(on_cpu, alone)]


def make_speed_workers(
    scale: str,
    platform: str,
    precisions: Sequence[str] | None = None,
    lanes: Sequence[int] | None = None,
) -> list[Worker]:
    """Return a worker for each precision, with FedAvg by network, implementation and lanes.

    Args:
      scale: "full" or "quick".
      platform: jax's name of the platform.
      precisions: precisions to measure; None: all of the platform.
      lanes: numbers of lanes to measure; None: all of the scale.

    Returns:
      The workers.
    """
    size, workers = SCALES[scale], []
    there = PRECISIONS.get(platform, (FLOAT32,))
    widths = [count for count in size.lanes if lanes is None or count in lanes]
    networks: list[tuple[str, dict[str, Any]]] = [("mlp", {"model": "mlp"})]
    for impl in (IM2COL, NATIVE, UNROLLED):
        options = {"width": size.width, "network_options": {"conv_impl": impl}}
        networks.append((f"convnet, {impl}", {"model": "convnet", **options}))
    for precision in there if precisions is None else [p for p in precisions if p in there]:
        cases = []
        for network, settings in networks:
            for count in widths:
                if count > MAX_UNROLLED_LANES and network.endswith(UNROLLED):
                    continue
                name = f"{network}, {precision}, {count} lanes"
                arguments = {"algorithm": "fedavg", "precision": precision, **settings}
                cases.append(Case(name, "speed", scale, arguments, count))
        workers.append(Worker({}, cases))
    return workers


def compare_curves(device: dict, cpu: dict, in_another_order: dict) -> dict[str, Any]:
    """Compare the curves of the device with the curves of the CPU.

    Args:
      device: curves of the device by name.
      cpu: curves of the CPU by name.
      in_another_order: curves of the CPU with another order of sums by name.

    Returns:
      The largest relative differences of device and CPU and of the CPU's two orders, and whether
      the first is explained by rounding.
    """
    errors = [result["error"] for result in (device, cpu, in_another_order) if "error" in result]
    if errors:
        return {"error": errors[0]}

    def compute_difference(one, other):
        curves = [name for name in one if name != "device"]
        pairs = [(np.asarray(one[name]), np.asarray(other[name])) for name in curves]
        if any((np.isnan(a) != np.isnan(b)).any() for a, b in pairs):
            return float("inf")

        def largest(values):
            return np.nanmax(np.abs(values), initial=0)

        return max(float(largest(a - b) / max(largest(b), 1e-12)) for a, b in pairs)

    difference = compute_difference(device, cpu)
    order = compute_difference(in_another_order, cpu)
    agrees = difference <= max(MIN_TOLERANCE, REORDERING_FACTOR * order)
    return {"difference": difference, "another order": order, "agrees": agrees}


def select_fastest(speeds: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return implementation and lanes of the fastest case of each network and precision."""
    best: dict[str, dict[str, Any]] = {}
    for name, result in speeds.items():
        rate = result.get("client_samples_per_second", 0.0)
        *network, precision, lanes = name.split(", ")
        key = f"{network[0]}, {precision}"
        if rate > best.get(key, {}).get("client_samples_per_second", 0.0):
            chosen = {"conv_impl": network[1]} if len(network) > 1 else {}
            count = int(lanes.removesuffix(" lanes"))
            best[key] = {**chosen, "lanes": count, "client_samples_per_second": rate}
    return best


def make_tables(kept: dict[str, Any]) -> list[TextTable]:
    """Return the tables of differences, of speeds and of the fastest settings that have rows."""
    device = kept["device"]
    numbers = _make_table(
        f"{device} against the CPU, both in float32",
        ("Method",),
        (*_PARITY_COLUMNS, "Error"),
        kept["numbers"],
        "Largest relative difference of losses and norms over the rounds; another order: the "
        "CPU's own, with one lane instead of four.",
    )
    speed = _make_table(
        f"{device}: FedAvg's rounds",
        ("Case",),
        (*_SPEED_COLUMNS, "Error"),
        kept["speed"],
        "Client samples a second, the median of all rounds but the first; compilation in seconds, "
        "apart.",
    )
    best = _make_table(f"{device}: fastest", ("Network",), ("conv_impl", "lanes"), kept["fastest"])
    return [table for table in (numbers, speed, best) if table.sections[0].rows]


_PARITY_COLUMNS = ("difference", "another order", "agrees")
_SPEED_COLUMNS = ("client_samples_per_second", "compile_seconds")


def _make_table(
    title: str,
    names: tuple[str],
    values: tuple[str, ...],
    actual: dict[str, dict[str, Any]],
    *notes: str,
) -> TextTable:
    rows = tuple(
        {names[0]: name, **{value: _format_value(result.get(value.lower())) for value in values}}
        for name, result in actual.items()
    )
    return TextTable(title, names, (TableSection(rows),), notes)


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return format_number(value, ",.0f" if value >= 100 else ".2g")
    return "" if value is None else str(value)


def run_checks(arguments: Arguments) -> int:
    """Measure all cases that are not complete.

    Args:
      arguments: options of the program.

    Returns:
      The exit status: 1 if the numbers of a method do not agree or a process died before its time;
      130 if the time ended before all cases were measured; else 0.

    Raises:
      ConfigError: if a method, a precision or a number of lanes is unknown.
    """
    names = tuple(METHODS) if arguments.methods is None else arguments.methods
    for name in names:
        require_name("methods", name, METHODS)
    for name in arguments.precisions or ():
        require_name("precisions", name, ALL_PRECISIONS)
    there = SCALES[arguments.scale].lanes
    for count in arguments.lanes or ():
        require(count in there, "lanes", count, f"one of {', '.join(map(str, there))}")
    folder, ends = make_output_directory(arguments.output_dir), time.monotonic()
    ends += 60 * arguments.minutes
    path = folder / RESULTS_FILE
    kept: dict[str, Any] = {"numbers": {}, "speed": {}, "fastest": {}}
    if path.is_file():
        kept |= json.loads(path.read_text())
    kept["device"], platform = _query_device()

    def due(kind: str, cases: Iterable[str]) -> list[str]:
        return [name for name in cases if "error" in kept[kind].get(name, {"error": ""})]

    def keep(kind: str, result: dict[str, dict[str, Any]]) -> None:
        kept[kind] |= result
        kept["fastest"] = select_fastest(kept["speed"])
        write_text(path, json.dumps(kept, indent=1))

    if arguments.only != "speed" and (left := due("numbers", names)):
        device, *on_cpu = run_workers(make_parity_workers(left), ends - time.monotonic())
        done = [name for name in left if all(name in actual for actual in (device, *on_cpu))]
        comparisons = {
            name: compare_curves(device[name], *(f[name] for f in on_cpu)) for name in done
        }
        keep("numbers", comparisons)
    asked = (arguments.scale, platform, arguments.precisions, arguments.lanes)
    workers = make_speed_workers(*asked) if arguments.only != "numbers" else []
    for worker in workers:
        left = due("speed", [case.name for case in worker.cases])
        if left and time.monotonic() < ends:
            worker = worker._replace(cases=[case for case in worker.cases if case.name in left])
            (actual,) = run_workers([worker], ends - time.monotonic())
            keep("speed", actual)
    tables = make_tables(kept)
    for table in tables:
        print_table(table)
    write_text(folder / "prove.md", "\n".join(map(to_markdown, tables)))
    wrong = [name for name, result in kept["numbers"].items() if not result.get("agrees")]
    if wrong:
        print(f"Not as on the CPU: {', '.join(wrong)}.", file=sys.stderr)
    undone = [name for name in names if name not in kept["numbers"] and arguments.only != "speed"]
    planned = [case.name for worker in workers for case in worker.cases]
    undone += [name for name in planned if name not in kept["speed"]]
    if undone:
        print(f"{len(undone)} cases are left: the same command goes on.", file=sys.stderr)
    if wrong or (undone and time.monotonic() < ends):
        return 1
    return 130 if undone else 0


def _query_device() -> tuple[str, str]:
    """Return kind and platform of the first device, from another process, which releases it."""
    asked = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind)"
    output = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    platform, _, kind = output.stdout.strip().splitlines()[-1].partition(" ")
    return kind, platform


main = make_config_program(Arguments, run_checks, __doc__)

if __name__ == "__main__":
    if WORKER_FLAG in sys.argv:
        serve_cases()
        raise SystemExit(0)
    raise SystemExit(main())
