"""What programs launch on an accelerator that need not be there: launches, graphs, memory, seconds.

    python experiments/accelerator/launches.py --target h200 --output after.json
    python experiments/accelerator/launches.py --target v5e --programs mlp-32 convnet-im2col-32

XLA compiles the package's own programs for a described device, and what it made is read. Needs the
CUDA plugin (`pip install "jax[cuda12]"`) or libtpu, of jax's version, and no device. Times are
those of the compiler; how fast a program runs, nobody knows without one.
"""

import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax

from experiments.accelerator.programs import CASES, Case, blank_data, lowered, small
from experiments.accelerator.reading import Body, bodies_of, graphs_of, grouped_convolutions
from experiments.accelerator.targets import TARGETS, as_on, described, prepare_process
from fedjax_het.common.errors import require, require_name
from fedjax_het.common.files import write_atomically
from fedjax_het.report.programs import record_program

# What XLA makes graphs of unless told otherwise, and with the loops and branches of programs.
_USUAL = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
FLAGS = {"graphs": _USUAL, "graphs_with_loops": f"{_USUAL},WHILE,CONDITIONAL"}

FEW = 8  # launches; no step of training has fewer


@dataclass
class Arguments:
    """Compile programs of the package for a described device, and count what they launch."""

    target: Literal["h200", "h200x2", "v5e", "cpu"] = "h200"
    """The device; "h200x2" is two, "cpu" what is here."""
    programs: tuple[str, ...] = field(default_factory=tuple)
    """Which (default: all that fit the target)."""
    small: bool = False
    """Few clients, small images and narrow networks instead."""
    output: Path | None = None
    """A JSON file for all that was counted; what it holds of other programs and targets stays."""


def measure(a: Arguments) -> int:
    for name in a.programs:
        require_name("programs", name, CASES)
    require(
        a.output is None or a.output.parent.is_dir(),
        "output",
        a.output,
        "a file in a folder that is there",
    )
    chips = TARGETS[a.target].chips
    wanted = a.programs or [
        name for name, case in CASES.items() if (case.devices > 1) == (a.target == "h200x2")
    ]
    for name in wanted:
        fits = CASES[name].devices <= chips
        require(fits, "programs", name, f"one of at most {chips} devices, as {a.target} has")
    prepare_process(a.target, max(CASES[name].devices for name in wanted))
    devices = described(a.target)
    found = {}
    for name in wanted:
        case = small(CASES[name]) if a.small else CASES[name]
        found[name] = counted(case, a.target, devices, is_small=a.small)
        print(f"{name}: compiled in {found[name]['compile_seconds']} s", flush=True)
        if a.output is not None:
            keep(a.output, a.target, name, found[name])
    show(a.target, found)
    return 0


def counted(case: Case, target: str, devices: Any, *, is_small: bool = False) -> dict[str, Any]:
    """What is known of a case's program once compiled."""
    platform = TARGETS[target].platform
    dataset = blank_data(case.dataset, small=is_small)
    with as_on(platform):
        program = lowered(case, dataset, devices)
    began = time.perf_counter()
    if platform == "gpu":
        compiled, graphs = _with_graphs(program, _USUAL)
    else:
        compiled, graphs = program.compile(), {}
    seconds = time.perf_counter() - began
    if platform == "gpu":
        graphs = {"graphs": graphs}
        graphs["graphs_with_loops"] = _with_graphs(program, FLAGS["graphs_with_loops"])[1]
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    bodies = bodies_of(text)
    return {
        "lanes": case.lanes,
        "devices": case.devices,
        "jax": jax.__version__,
        "compile_seconds": round(seconds, 1),
        "argument_mb": round(memory.argument_size_in_bytes / 1e6, 2),
        "temp_mb": round(memory.temp_size_in_bytes / 1e6, 2),
        "step_launches": [body.launches for body in steps_of(bodies)],
        "grouped_convolutions": grouped_convolutions(text),
        **graphs,
        "bodies": [body._asdict() for body in bodies],
    }


def steps_of(bodies: list[Body]) -> list[Body]:
    """The innermost loops, steps of training: those in the most loops, but for what an operation
    of a few launches, a sort or a scan, is made of."""
    steps = [body for body in bodies if body.launches >= FEW] or bodies
    deepest = max(body.depth for body in steps)
    return [body for body in steps if body.depth == deepest]


def _with_graphs(program: Any, kinds: str) -> tuple[Any, dict[str, Any]]:
    """The program compiled with these kinds of work in graphs, and which graphs there are."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_gpu_enable_command_buffer": kinds}
        compiled = program.compile(compiler_options=options)
        lists = sorted(Path(folder).glob("*thunk_sequence*.txt"))
        last = [path for path in lists if "after_thunk_passes" in path.name] or lists
        return compiled, graphs_of(last[-1].read_text())


def keep(path: Path, target: str, name: str, found: dict[str, Any]) -> None:
    """Write what was found of a program beside what the file has of others."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept.setdefault(target, {})[name] = found
    text = json.dumps(kept, indent=1)
    write_atomically(path, lambda file: file.write(text.encode()))


def show(target: str, found: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"What is launched on {target}")
    columns = ("program", "a step", "loops", "conditionals", "grouped", "graph", "with loops")
    for column in (*columns, "temp MB", "collectives", "MB", "seconds"):
        table.add_column(column)
    for name, row in found.items():
        bodies = row["bodies"]
        loops = [f"{'·' * body['depth']}{body['launches']}" for body in bodies]
        exchanged = [body for body in bodies if body["collectives"]]
        table.add_row(
            name,
            " + ".join(map(str, row["step_launches"])),
            " ".join(loops),
            str(sum(body["conditionals"] for body in bodies if body["depth"] > 1)),
            str(row["grouped_convolutions"]),
            _graph(row.get("graphs")),
            _graph(row.get("graphs_with_loops")),
            str(row["temp_mb"]),
            ", ".join(f"{'·' * body['depth']}{body['collectives']}" for body in exchanged),
            ", ".join(f"{body['collective_bytes'] / 1e6:.2f}" for body in exchanged),
            str(row["compile_seconds"]),
        )
    Console(width=200).print(table)


def _graph(graphs: dict[str, Any] | None) -> str:
    if graphs is None:
        return ""
    if graphs["whole"]:
        return "one"
    return f"{graphs['graphs']}, {graphs['host_reads']} read"


main = record_program(Arguments, measure, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
