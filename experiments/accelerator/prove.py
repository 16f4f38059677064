"""Prove a device: the same numbers as on the CPU, and what is fastest on it.

python experiments/accelerator/prove.py                 what jax finds; an H200: 15 minutes
python experiments/accelerator/prove.py --scale quick   small; ten minutes on a CPU's core

Correctness: each method runs five rounds on made-up data, on the device and on the CPU, both with
true float32 products. Beside the difference is what another order of sums makes of the CPU's own
numbers (four lanes instead of one): a device that rounds as well differs about as much. Speed:
client samples a second of FedAvg's rounds by network, implementation of convolutions, lanes and
precision, the median of all rounds but the first; compilation apart. `prove.json` has all of it
and the settings that were fastest. A case that fails is a line with its error, and the others go
on; what is done is not done again, and the status is 130 while cases are left.
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
WORKER_FLAG = "--measure"  # what a process of its own is asked, which reads its cases as JSON
# Relative: a smaller difference is rounding, whatever another order of sums makes.
MIN_TOLERANCE = 1e-3
REORDERING_FACTOR = 30.0  # times what another order makes
PRECISIONS = {"cpu": (FLOAT32,), "gpu": (FLOAT32, TF32, BFLOAT16), "tpu": (FLOAT32, BFLOAT16)}


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
    precisions: tuple[str, ...] | None = None
    """In which speeds are measured, as far as the device has them (default: all, in this order)."""
    lanes: tuple[int, ...] | None = None
    """With which speeds are measured, of those of the scale (default: all)."""
    minutes: Annotated[float, Bounds(0, 1e6, open_low=True)] = 30.0
    """After which no case is begun; the same command goes on."""
    output_dir: str = "results/accelerator"
    """Where prove.json and prove.md are."""


def make_synthetic_dataset(scale: Scale) -> Any:
    """A data set of ten classes: blurred spots, and noise."""
    from fedjax_het import dataset_from_arrays

    rng, size = np.random.default_rng(0), scale.pixels
    spots = rng.random((10, size, size, 1))

    def draw(count):
        labels = rng.integers(0, 10, count)
        images = 0.6 * spots[labels] + 0.4 * rng.random((count, size, size, 1))
        return (255 * images).astype(np.uint8), labels

    return dataset_from_arrays(*draw(scale.examples), *draw(max(200, scale.examples // 10)))


def measure_case(case: Case) -> dict[str, Any]:
    """In this process, on its first device: losses and norms of every round, or client samples a
    second."""
    import jax

    from fedjax_het import Placement, RunSpec, simulate
    from fedjax_het.runtime.benchmark import benchmark_rounds

    scale = SCALES[case.scale if case.kind == "speed" else "quick"]
    settings = {"num_clients": scale.clients, "rounds": scale.rounds, "seed": 0, **case.settings}
    spec = RunSpec(dataset="user", **settings)
    placement = Placement(lanes=case.lanes, devices=1)
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind}
    dataset = make_synthetic_dataset(scale)
    if case.kind == "speed":
        times = benchmark_rounds(spec, scale.rounds, dataset, placement=placement)
        # The first also loads kernels and captures graphs.
        rates = np.divide(times.samples[1:], times.seconds[1:])
        found["client_samples_per_second"] = float(np.median(rates))
        return found | {"compile_seconds": times.compile_seconds}
    result = simulate(spec, dataset=dataset, placement=placement)
    curves = ("train_loss", "update_norm", "test_loss", "client_accuracy")
    named = {name: result.metrics[name] for name in curves if name in result.metrics}
    return found | {name: np.asarray(curve).tolist() for name, curve in named.items()}


def serve_cases() -> None:
    """The cases on standard input, a line of standard output for each."""
    for given in json.load(sys.stdin):
        case = Case(*given)
        try:
            found = measure_case(case)
        except Exception as error:  # whatever it is, the others are to be measured
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        print(json.dumps({"name": case.name, **found}), flush=True)


def run_workers(places: list[Worker], seconds: float) -> list[dict[str, dict[str, Any]]]:
    """What each place has found by name, after so many seconds at most; all of them side by side.
    A case that a place did not come to is not there."""
    words = [sys.executable, str(Path(__file__).resolve()), WORKER_FLAG]
    with ExitStack() as files:
        running = []
        for place in places:
            said = files.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(
                words,
                env={**os.environ, **place.environment},
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(place.cases))
            process.stdin.close()
            running.append((process, said))
        ends = time.monotonic() + seconds
        for process, _ in running:
            try:
                process.wait(max(1.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return [_read_records(said) for _, said in running]


def _read_records(said: IO[str]) -> dict[str, dict[str, Any]]:
    said.seek(0)
    found = [json.loads(line) for line in said if line.startswith("{") and line.endswith("}\n")]
    return {made.pop("name"): made for made in found}


def make_parity_workers(names: Sequence[str]) -> list[Worker]:
    """The device, the CPU, and the CPU in another order."""
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
    """FedAvg by precision, and in each by network, implementation and lanes. Of precisions and
    lanes those that are asked for (None: all that there are)."""
    size, places = SCALES[scale], []
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
                given = {"algorithm": "fedavg", "precision": precision, **settings}
                cases.append(Case(name, "speed", scale, given, count))
        places.append(Worker({}, cases))
    return places


def compare_curves(device: dict, cpu: dict, in_another_order: dict) -> dict[str, Any]:
    """How far the device's curves are from the CPU's, relative; and the CPU's from its own in
    another order."""
    errors = [made["error"] for made in (device, cpu, in_another_order) if "error" in made]
    if errors:
        return {"error": errors[0]}

    def apart(one, other):
        curves = [name for name in one if name != "device"]
        pairs = [(np.asarray(one[name]), np.asarray(other[name])) for name in curves]
        if any((np.isnan(a) != np.isnan(b)).any() for a, b in pairs):
            return float("inf")

        def largest(values):
            return np.nanmax(np.abs(values), initial=0)

        return max(float(largest(a - b) / max(largest(b), 1e-12)) for a, b in pairs)

    difference, order = apart(device, cpu), apart(in_another_order, cpu)
    agrees = difference <= max(MIN_TOLERANCE, REORDERING_FACTOR * order)
    return {"difference": difference, "another order": order, "agrees": agrees}


def select_fastest(speeds: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By network and precision the implementation and lanes of most samples a second."""
    best: dict[str, dict[str, Any]] = {}
    for name, made in speeds.items():
        rate = made.get("client_samples_per_second", 0.0)
        *network, precision, lanes = name.split(", ")
        key = f"{network[0]}, {precision}"
        if rate > best.get(key, {}).get("client_samples_per_second", 0.0):
            chosen = {"conv_impl": network[1]} if len(network) > 1 else {}
            count = int(lanes.removesuffix(" lanes"))
            best[key] = {**chosen, "lanes": count, "client_samples_per_second": rate}
    return best


def make_tables(kept: dict[str, Any]) -> list[TextTable]:
    """Of the numbers, of the speeds, and of what was fastest, as far as they are known."""
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
    found: dict[str, dict[str, Any]],
    *notes: str,
) -> TextTable:
    rows = tuple(
        {names[0]: name, **{value: _format_value(made.get(value.lower())) for value in values}}
        for name, made in found.items()
    )
    return TextTable(title, names, values, (TableSection(rows),), notes)


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return format_number(value, ",.0f" if value >= 100 else ".2g")
    return "" if value is None else str(value)


def run_checks(arguments: Arguments) -> int:
    """All cases that are not done. 1 where a method's numbers do not agree, or a process died
    before its time; else 130 where the time was up before all were measured."""
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

    def keep(kind: str, made: dict[str, dict[str, Any]]) -> None:
        kept[kind] |= made
        kept["fastest"] = select_fastest(kept["speed"])
        write_text(path, json.dumps(kept, indent=1))

    if arguments.only != "speed" and (left := due("numbers", names)):
        device, *on_cpu = run_workers(make_parity_workers(left), ends - time.monotonic())
        done = [name for name in left if all(name in found for found in (device, *on_cpu))]
        apart = {name: compare_curves(device[name], *(f[name] for f in on_cpu)) for name in done}
        keep("numbers", apart)
    asked = (arguments.scale, platform, arguments.precisions, arguments.lanes)
    places = make_speed_workers(*asked) if arguments.only != "numbers" else []
    for place in places:
        left = due("speed", [case.name for case in place.cases])
        if left and time.monotonic() < ends:
            place = place._replace(cases=[case for case in place.cases if case.name in left])
            (found,) = run_workers([place], ends - time.monotonic())
            keep("speed", found)
    made = make_tables(kept)
    for table in made:
        print_table(table)
    write_text(folder / "prove.md", "\n".join(map(to_markdown, made)))
    wrong = [name for name, made in kept["numbers"].items() if not made.get("agrees")]
    if wrong:
        print(f"Not as on the CPU: {', '.join(wrong)}.", file=sys.stderr)
    undone = [name for name in names if name not in kept["numbers"] and arguments.only != "speed"]
    planned = [case.name for place in places for case in place.cases]
    undone += [name for name in planned if name not in kept["speed"]]
    if undone:
        print(f"{len(undone)} cases are left: the same command goes on.", file=sys.stderr)
    if wrong or (undone and time.monotonic() < ends):
        return 1
    return 130 if undone else 0


def _query_device() -> tuple[str, str]:
    """The kind of jax's first device, and its platform; found in a process of its own, since this
    one is not to hold it."""
    asked = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind)"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    platform, _, kind = said.stdout.strip().splitlines()[-1].partition(" ")
    return kind, platform


main = make_config_program(Arguments, run_checks, __doc__)

if __name__ == "__main__":
    if WORKER_FLAG in sys.argv:
        serve_cases()
        raise SystemExit(0)
    raise SystemExit(main())
