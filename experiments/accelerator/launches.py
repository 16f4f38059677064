"""Count the kernel launches of the package's programs on an accelerator that need not be present.

    python experiments/accelerator/launches.py --target h200 --output after.json
    python experiments/accelerator/launches.py --target v5e --programs mlp-32 convnet-im2col-32

XLA compiles the programs for a described device. The compiled text gives launches, graphs and
memory. The CUDA plugin (`pip install "jax[cuda12]"`) or libtpu of jax's version is required, but no
device. Times are compile times; the speed of a program is unknown without a device.
"""

import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax

from experiments.accelerator.programs import (
    CASES,
    Case,
    lower_case,
    make_noise_dataset,
    shrink_case,
)
from experiments.accelerator.reading import (
    LoopBody,
    count_grouped_convolutions,
    parse_command_buffers,
    parse_loop_bodies,
)
from experiments.accelerator.targets import (
    TARGETS,
    describe_devices,
    mock_platform,
    prepare_process,
)
from fedjax_het.papers.programs import make_config_program
from fedjax_het.utils.errors import require, require_name
from fedjax_het.utils.io import write_atomically

# Kinds of operations in XLA's graphs: the default, and with loops and branches of programs.
_DEFAULT_GRAPH_KINDS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
GRAPH_KINDS = {
    "graphs": _DEFAULT_GRAPH_KINDS,
    "graphs_with_loops": f"{_DEFAULT_GRAPH_KINDS},WHILE,CONDITIONAL",
}

MIN_STEP_LAUNCHES = 8  # launches; no step of training has fewer


@dataclass
class Arguments:
    """Compile programs of the package for a described device and count their kernel launches."""

    target: Literal["h200", "h200x2", "v5e", "cpu"] = "h200"
    """The device; "h200x2": two of them; "cpu": the devices of this machine."""
    programs: tuple[str, ...] = field(default_factory=tuple)
    """Names of the programs (default: all that fit the target)."""
    small: bool = False
    """Use few clients, small images and narrow networks."""
    output: Path | None = None
    """JSON file of all counts; entries of other programs and targets stay."""


def analyze_programs(arguments: Arguments) -> int:
    """Compile the chosen programs and print a table of their launches.

    Args:
      arguments: options of the program.

    Returns:
      The exit status, 0.

    Raises:
      ConfigError: if a program is unknown or needs more devices than the target has.
    """
    for name in arguments.programs:
        require_name("programs", name, CASES)
    is_valid = arguments.output is None or arguments.output.parent.is_dir()
    require(is_valid, "output", arguments.output, "a file in a folder that is there")
    chips = TARGETS[arguments.target].chips
    program_names = arguments.programs or [
        name for name, case in CASES.items() if (case.devices > 1) == (arguments.target == "h200x2")
    ]
    for name in program_names:
        expected = f"one of at most {chips} devices, as {arguments.target} has"
        require(CASES[name].devices <= chips, "programs", name, expected)
    prepare_process(arguments.target, max(CASES[name].devices for name in program_names))
    devices = describe_devices(arguments.target)
    analyses = {}
    for name in program_names:
        case = shrink_case(CASES[name]) if arguments.small else CASES[name]
        analyses[name] = analyze_case(case, arguments.target, devices, is_small=arguments.small)
        print(f"{name}: compiled in {analyses[name]['compile_seconds']} s", flush=True)
        if arguments.output is not None:
            merge_into_file(arguments.output, arguments.target, name, analyses[name])
    print_table(arguments.target, analyses)
    return 0


def analyze_case(
    case: Case, target: str, devices: Any, *, is_small: bool = False
) -> dict[str, Any]:
    """Compile the program of a case and read its launches, memory and compile time.

    Args:
      case: the case.
      target: name of the target.
      devices: the described devices.
      is_small: whether the data set is small.

    Returns:
      The facts by name, as the JSON file stores them.
    """
    platform = TARGETS[target].platform
    dataset = make_noise_dataset(case.dataset, small=is_small)
    with mock_platform(platform):
        program = lower_case(case, dataset, devices)
    start_time = time.perf_counter()
    graphs = {}
    if platform == "gpu":
        compiled, graphs["graphs"] = _compile_with_graphs(program, GRAPH_KINDS["graphs"])
    else:
        compiled = program.compile()
    seconds = time.perf_counter() - start_time
    if platform == "gpu":
        kinds = GRAPH_KINDS["graphs_with_loops"]
        graphs["graphs_with_loops"] = _compile_with_graphs(program, kinds)[1]
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    bodies = parse_loop_bodies(text)
    return {
        "lanes": case.lanes,
        "devices": case.devices,
        "jax": jax.__version__,
        "compile_seconds": round(seconds, 1),
        "argument_mb": round(memory.argument_size_in_bytes / 1e6, 2),
        "temp_mb": round(memory.temp_size_in_bytes / 1e6, 2),
        "step_launches": [body.launches for body in select_training_steps(bodies)],
        "grouped_convolutions": count_grouped_convolutions(text),
        **graphs,
        "bodies": [body._asdict() for body in bodies],
    }


def select_training_steps(bodies: list[LoopBody]) -> list[LoopBody]:
    """Select the innermost loops, which are steps of training.

    Loops with few launches, of which an operation such as a sort consists, are left out.
    """
    steps = [body for body in bodies if body.launches >= MIN_STEP_LAUNCHES] or bodies
    deepest = max(body.depth for body in steps)
    return [body for body in steps if body.depth == deepest]


def _compile_with_graphs(program: Any, kinds: str) -> tuple[Any, dict[str, Any]]:
    """Compile a program with these kinds of operations in graphs; also return the graphs."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_gpu_enable_command_buffer": kinds}
        compiled = program.compile(compiler_options=options)
        files = sorted(Path(folder).glob("*thunk_sequence*.txt"))
        final_files = [path for path in files if "after_thunk_passes" in path.name] or files
        return compiled, parse_command_buffers(final_files[-1].read_text())


def merge_into_file(path: Path, target: str, name: str, analysis: dict[str, Any]) -> None:
    """Add the analysis of a program to a JSON file with the analyses of other programs."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    stored.setdefault(target, {})[name] = analysis
    text = json.dumps(stored, indent=1)
    write_atomically(path, lambda file: file.write(text.encode()))


def print_table(target: str, analyses: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Launches on {target}")
    columns = ("program", "a step", "loops", "conditionals", "grouped", "graph", "with loops")
    for column in (*columns, "temp MB", "collectives", "MB", "seconds"):
        table.add_column(column)
    for name, row in analyses.items():
        bodies = row["bodies"]
        loops = [f"{'·' * body['depth']}{body['launches']}" for body in bodies]
        collective_bodies = [body for body in bodies if body["collectives"]]
        table.add_row(
            name,
            " + ".join(map(str, row["step_launches"])),
            " ".join(loops),
            str(sum(body["conditionals"] for body in bodies if body["depth"] > 1)),
            str(row["grouped_convolutions"]),
            _format_graphs(row.get("graphs")),
            _format_graphs(row.get("graphs_with_loops")),
            str(row["temp_mb"]),
            ", ".join(f"{'·' * body['depth']}{body['collectives']}" for body in collective_bodies),
            ", ".join(f"{body['collective_bytes'] / 1e6:.2f}" for body in collective_bodies),
            str(row["compile_seconds"]),
        )
    Console(width=200).print(table)


def _format_graphs(graphs: dict[str, Any] | None) -> str:
    if graphs is None:
        return ""
    if graphs["whole"]:
        return "one"
    return f"{graphs['graphs']}, {graphs['host_reads']} read"


main = make_config_program(Arguments, analyze_programs, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
