"""Compare the speed of local training with other simulators, for equal work.

    experiments/benchmarks/peers/make_environments.sh          # once; needs the network
    python experiments/speed.py
    python experiments/speed.py --quick
    python experiments/speed.py --regimes R1 R3 --peers torch --output results/speed

Every program is a process of its own that makes one regime and ends. This package runs first and
writes the examples of each client and the cohorts of all rounds. Then the peers run. Programs
alternate, so that other load of the machine affects all of them. Results are medians over rounds.
Starting, reading data and compiling are not part of a round. The files in `peers` and the notes
below the table state the deviations of each peer.
"""

import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedjax_het
from fedjax_het import dataset_from_arrays, load_dataset
from fedjax_het._startup import count_available_cores
from fedjax_het.data import Dataset
from fedjax_het.papers.programs import make_config_program
from fedjax_het.utils.config import NonNegativeInt, PositiveInt
from fedjax_het.utils.errors import ConfigError, require_name

PEERS_FOLDER = Path(__file__).parent / "peers"
TIMEOUT = 1200  # seconds, of one program


class Peer(NamedTuple):
    """A program that does equal work.

    Attributes:
      environment: name of its virtual environment.
      files: files in `peers` by kind of regime.
      note: its deviations, for the notes below the tables.
      func: whether `torch.func` transforms its functions.
      compile: whether `torch.compile` compiles its steps.
    """

    environment: str
    files: dict[str, str]
    note: str
    func: bool = False
    compile: bool = False


LOOP = {"rounds": "torch_loop.py", "sweep": "torch_loop.py"}
FUNCTIONAL = {
    **{"rounds": "torch_func.py", "sweep": "torch_func.py"},
    "synthesis": "torch_synthesis.py",
}
PEERS = {
    "torch": Peer(
        "torch",
        {**LOOP, "synthesis": "torch_synthesis.py", "server": "torch_server.py"},
        "a plain loop; images are float32 and normalized beforehand",
    ),
    "torch-compile": Peer(
        "torch", LOOP, "the loop with steps compiled by torch.compile", compile=True
    ),
    "torch-func": Peer(
        "torch",
        FUNCTIONAL,
        "torch.func.vmap over the clients of a round; in the synthesis torch.func.grad",
        func=True,
    ),
    "torch-func-compile": Peer(
        "torch", FUNCTIONAL, "torch-func compiled by torch.compile", func=True, compile=True
    ),
    "fedjax": Peer(
        "fedjax",
        {"rounds": "fedjax_peer.py"},
        "its jit mode; pads the last batch of a client, which counts as work",
    ),
    "pfl": Peer(
        "pfl", {"rounds": "pfl_peer.py"}, "one process; does not reshuffle a client's images"
    ),
    "flower": Peer(
        "flower",
        {"rounds": "flower_peer.py"},
        "one single-threaded actor per core; draws the cohorts itself, of clients of one size",
    ),
}
TORCH_PEERS = ("torch", "torch-compile", "torch-func", "torch-func-compile")
TORCH_FUNC_PEERS = ("torch", "torch-func", "torch-func-compile")


class Regime(NamedTuple):
    """A workload.

    Attributes:
      description: text for the tables.
      spec: settings of the run.
      rounds: number of rounds in each turn.
      kind: "rounds", "sweep", "synthesis" or "server".
      num_images: number of training images.
      dataset: name of a data set in the package; None: images.
      seeds: number of seeds of a sweep.
      server: settings of the server's training, see `torch_server.py`.
      peers: peers that can do the same work.
      turns: maximum number of turns.
    """

    description: str
    spec: dict[str, Any]
    rounds: int
    kind: str = "rounds"
    num_images: int = 60_000
    dataset: str | None = None
    seeds: int = 1
    server: dict[str, Any] | None = None
    peers: tuple[str, ...] = tuple(PEERS)
    turns: int = 9


FEDAVG: dict[str, Any] = {
    "algorithm": "fedavg",
    "protocol": "dynafed",  # without weight decay, as the peers
    "partition": "iid",
    "model": "mlp",
    "num_clients": 80,
    "participation": 0.4,
    "local_epochs": 1,
    "batch_size": 32,
    "local_optimizer": "sgd",
    "optimizer_state": "reset",
    "averaging": "weighted",
    "hp": {"local_lr": 0.05},
}
CONVNET32 = {**FEDAVG, "model": "convnet", "width": 32}
SPEAKERS: dict[str, Any] = {
    **{name: FEDAVG[name] for name in FEDAVG if name not in ("partition", "model")},
    "partition": "natural",
    "num_clients": 20,
    "participation": 1.0,
    "batch_size": 10,
    "hp": {"local_lr": 0.5},
}
DYNAFED: dict[str, Any] = {
    "algorithm": "dynafed",
    "model": "convnet",
    "partition": "iid",
    "num_clients": 4,
    "participation": 1.0,
    "rounds": 7,
    "options": {
        "fine_tune_epochs": 1,
        "num_samples": 150,
        "inner_steps": 20,
        "augment_strategy": "none",  # as the loop has it
        "trajectory_rounds": 6,
    },
}
EQUAL_SIZES = "80 clients x 750 images, 32 a round, batch 32"
REGIMES = {
    "R1": Regime(f"MLP 784-128-128-10, {EQUAL_SIZES}", FEDAVG, 5),
    "R2-32": Regime(
        f"ConvNet, width 32, {EQUAL_SIZES}", CONVNET32, 1, peers=(*TORCH_PEERS, "fedjax", "pfl")
    ),
    "R2-128": Regime(
        "ConvNet, width 128, 80 clients x 750 images, 4 a round, batch 32",
        {**CONVNET32, "width": 128, "participation": 0.05},
        1,
        peers=(*TORCH_PEERS, "fedjax", "pfl"),
        turns=1,
    ),
    "R3": Regime(
        "CNN 5x5-32, 5x5-64, FC 512, 1000 clients x 50 images, 50 a round, batch 10",
        {**FEDAVG, "model": "cnn", "num_clients": 1000, "participation": 0.05, "batch_size": 10},
        3,
        num_images=50_000,
    ),
    **{
        f"R4-{alpha}": Regime(
            f"as R2-32, Dirichlet({alpha}) with unequal sizes",
            {**CONVNET32, "partition": "dirichlet", "alpha": alpha},
            2,
            peers=("torch", "torch-compile"),
            turns=1,
        )
        for alpha in (0.1, 0.01)
    },
    "R5": Regime(
        "a sweep of 8 seeds of R1", FEDAVG, 20, kind="sweep", seeds=8, peers=TORCH_PEERS, turns=5
    ),
    **{
        name: Regime(
            f"DynaFed's synthesis, {network}: 150 images, 20 inner steps, no augmentation; "
            "a round is an iteration, a sample an image in an inner step",
            {**DYNAFED, **model},
            iterations,
            kind="synthesis",
            num_images=200,
            peers=TORCH_FUNC_PEERS,
            turns=5,
        )
        for name, network, model, iterations in (
            ("R6-mlp", "MLP 784-128-128-10", {"model": "mlp"}, 100),
            ("R6-32", "ConvNet of width 32", {"width": 32}, 4),
            ("R6-128", "ConvNet of width 128", {"width": 128}, 2),
        )
    },
    "R7": Regime(
        "the server of FedAF: ConvNet of width 32 on 500 labeled images in batches of 256, SGD; "
        "a round is 10 epochs",
        CONVNET32,
        8,
        kind="server",
        num_images=500,
        peers=("torch",),
        server={"batch_size": 256, "epochs": 10, "teachers": 0},
        turns=2,
    ),
    "R8": Regime(
        "the server of FedDF: ConvNet of width 32 learns the logits of 8 others on 1,000 images, "
        "batches of 128, Adam; a round is 4 epochs",
        CONVNET32,
        4,
        kind="server",
        num_images=1000,
        peers=("torch",),
        server={"batch_size": 128, "epochs": 4, "teachers": 8},
        turns=2,
    ),
    **{
        f"R9-{name}": Regime(
            f"next characters by speaker, {network}: 20 clients, 1,894 sequences of 40, batch 10",
            {**SPEAKERS, "model": model, "network_options": {"hidden": width, "layers": layers}},
            3,
            dataset="speakers",
            peers=("torch",),
        )
        for name, network, model, width, layers in (
            ("lstm-256", "LSTM with two layers of 256", "lstm", 256, 2),
            ("lstm-64", "LSTM of 64", "lstm", 64, 1),
            ("gru-64", "GRU of 64", "gru", 64, 1),
        )
    },
}
SLOWEST_REGIME = "R6-128"  # minutes on a CPU: only if it is named


@dataclass
class Arguments:
    """Compare the speed of local training with other simulators."""

    regimes: tuple[str, ...] = tuple(name for name in REGIMES if name != SLOWEST_REGIME)
    """Regimes: R1, R2-32, R2-128, R3, R4-0.1, R4-0.01, R5, R6-mlp, R6-32, R6-128, R7, R8,
    R9-lstm-256, R9-lstm-64, R9-gru-64."""
    turns: PositiveInt = 2
    """Number of turns of each program (the longest regimes have one)."""
    quick: bool = False
    """Run one turn of each program: about ten minutes on 2 cores."""
    rounds: NonNegativeInt = 0
    """Number of rounds in a turn (default: the number of each regime)."""
    peers: tuple[str, ...] | None = None
    """Peers: torch, torch-compile, torch-func, torch-func-compile, fedjax, pfl, flower (default:
    all that are installed)."""
    environments: Path = Path(".peers")
    """Folder of the peers' virtual environments."""
    output: Path | None = None
    """Write all measurements to OUTPUT.json and the tables to OUTPUT.md."""


def run_benchmark(arguments: Arguments) -> int:
    """Run all regimes and print the tables.

    Args:
      arguments: options of the benchmark.

    Returns:
      The exit status, 0.

    Raises:
      ConfigError: if a regime or a peer is unknown, or a requested peer is not installed.
    """
    for name in arguments.regimes:
        require_name("regimes", name, REGIMES)
    interpreters = find_interpreters(arguments.peers, arguments.environments)
    record: dict[str, Any] = {"machine": describe_machine(), "regimes": {}}
    with tempfile.TemporaryDirectory() as folder:
        dataset, record["data"] = load_images()
        write_images(Path(folder) / "images.npz", dataset)
        for dataset_name in {REGIMES[name].dataset for name in arguments.regimes} - {None}:
            text = load_dataset(str(dataset_name))
            path = Path(folder) / f"{dataset_name}.npz"
            np.savez(path, images=text.train_inputs, labels=text.train_labels)
        for name in arguments.regimes:
            print(f"{name}: {REGIMES[name].description}", file=sys.stderr)
            turns = alternate_programs(name, arguments, interpreters, Path(folder))
            record["regimes"][name] = turns
            if arguments.output:
                write_output(arguments.output, record)
    print(format_tables(record))
    return 0


def find_interpreters(peers: tuple[str, ...] | None, environments: Path) -> dict[str, str]:
    """Find the Python of every peer: of its environment, or for torch of this process.

    Args:
      peers: requested peers; None: all that are installed.
      environments: folder of the virtual environments.

    Returns:
      Paths by peer.

    Raises:
      ConfigError: if a requested peer is unknown or not installed.
    """
    interpreters = {}
    for peer in PEERS if peers is None else peers:
        require_name("peers", peer, PEERS)
        python = environments / PEERS[peer].environment / "bin" / "python"
        if python.exists():
            interpreters[peer] = str(python.absolute())
        elif PEERS[peer].environment == "torch" and importlib.util.find_spec("torch"):
            interpreters[peer] = sys.executable
        elif peers is not None:
            raise ConfigError(
                f"peers = {peer!r}: expected {python}, which "
                "experiments/benchmarks/peers/make_environments.sh makes"
            )
    return interpreters


def load_images() -> tuple[Dataset, str]:
    """Load Fashion-MNIST if it is prepared on this machine, else make random images of its shape.

    Returns:
      The data set, and its description.
    """
    try:
        return load_dataset("fashion_mnist"), "Fashion-MNIST"
    except ConfigError:
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (70_000, 28, 28, 1), np.uint8)
        labels = random.integers(0, 10, 70_000, np.int32)
        split = images[:60_000], labels[:60_000], images[60_000:], labels[60_000:]
        dataset = dataset_from_arrays(*split, num_classes=10, mean=(0.5,), std=(0.29,))
        return dataset, "random images of Fashion-MNIST's shape (it is not prepared here)"


def write_images(path: Path, dataset: Dataset) -> None:
    """Write the training images, labels and normalization constants for the programs of peers."""
    mean, std = (np.asarray(values, np.float32) for values in (dataset.mean, dataset.std))
    np.savez(path, images=dataset.train_inputs, labels=dataset.train_labels, mean=mean, std=std)


def alternate_programs(
    name: str, arguments: Arguments, interpreters: dict[str, str], folder: Path
) -> dict[str, Any]:
    """Run the programs of one regime in turns.

    Args:
      name: name of the regime.
      arguments: options of the benchmark.
      interpreters: the Python of every installed peer.
      folder: folder of the images and of the compilation cache.

    Returns:
      The records of all turns by program; this package is "here".

    Raises:
      ConfigError: if this package's program fails.
    """
    regime = REGIMES[name]
    settings = make_settings(regime, arguments, folder)
    programs: dict[str, tuple[str, str, dict[str, bool]]]
    programs = {"here": (sys.executable, "this_package.py", {})}
    for peer_name in (peer for peer in regime.peers if peer in interpreters):
        peer = PEERS[peer_name]
        options = {"func": peer.func, "compile": peer.compile}
        programs[peer_name] = (interpreters[peer_name], peer.files[regime.kind], options)
    turns: dict[str, list] = {program: [] for program in programs}
    cache = folder / f"cache-{name}"  # of its own, so that the first turn compiles
    for _ in range(1 if arguments.quick else min(arguments.turns, regime.turns)):
        if regime.kind == "sweep":  # its peers make the rounds of one run
            single_run = {**settings, "kind": "rounds", "seeds": 1, "rounds": 3}
            run_program(sys.executable, "this_package.py", single_run, folder / "cache")
        for program, (python, file, options) in programs.items():
            record = run_program(python, file, settings | options, cache)
            if record is None and program == "here":
                raise ConfigError(f"{name}: this package's program failed; see above")
            if record is not None:
                turns[program].append(record)
    return {program: records for program, records in turns.items() if records}


def make_settings(regime: Regime, arguments: Arguments, folder: Path) -> dict[str, Any]:
    """Return the settings of a regime; each program reads a part of them."""
    options = regime.spec.get("network_options", {})
    return {
        "kind": regime.kind,
        "spec": regime.spec,
        "network": regime.spec["model"],
        "width": regime.spec.get("width") or options.get("hidden"),
        "layers": options.get("layers"),
        "dataset": regime.dataset,
        "batch_size": regime.spec.get("batch_size"),
        "local_lr": regime.spec.get("hp", {}).get("local_lr"),
        "rounds": arguments.rounds or regime.rounds,
        "seeds": regime.seeds,
        "server": regime.server,
        "num_images": regime.num_images,
        "threads": count_available_cores(),
        "func": False,
        "compile": False,
        "images": str(folder / f"{regime.dataset or 'images'}.npz"),
        "clients": str(folder / "clients.npz"),
        **(regime.server or {}),
    }


def run_program(
    python: str, file: str, settings: dict[str, Any], cache: Path
) -> dict[str, Any] | None:
    """Run a program and read the record that it prints last.

    Args:
      python: path of the interpreter.
      file: name of the program in `peers`.
      settings: the program's argument, written as JSON.
      cache: folder of the compilation cache.

    Returns:
      The record; None if the program fails, and its error output is printed.
    """
    environment = {**os.environ, "FEDJAX_HET_CACHE": str(cache)}
    if file == "this_package.py":  # wherever this package is imported from here
        package_root = str(Path(fedjax_het.__file__).parent.parent)
        paths = [package_root, os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [python, str(PEERS_FOLDER / file), json.dumps(settings)]
    try:
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        print(f"  {file}: stopped after {TIMEOUT} s", file=sys.stderr)
        return None
    if process.returncode != 0:
        print(f"  {file} failed:\n{process.stderr[-2000:]}", file=sys.stderr)
        return None
    record = json.loads(process.stdout.strip().splitlines()[-1])
    rate = statistics.median(sample_rates([record]))
    variant = "".join(f", {name}" for name in ("func", "compile") if settings[name])
    print(f"  {file}{variant}: {rate:,.0f} samples/s", file=sys.stderr, flush=True)
    return record


def sample_rates(turns: list[dict[str, Any]]) -> list[float]:
    """Return the client samples per second of every round."""
    return [n / s for turn in turns for n, s in zip(turn["samples"], turn["seconds"], strict=True)]


def describe_machine() -> str:
    """Return processor, cores and version of Python as text."""
    cores = f"{count_available_cores()} of {os.cpu_count()} cores"
    return f"{cpu_model()}, {cores}, Python {platform.python_version()}"


def cpu_model() -> str:
    """Return the name of the processor."""
    try:
        with open("/proc/cpuinfo") as lines:
            names = (line.split(":", 1)[1].strip() for line in lines if "model name" in line)
            return next(names, platform.processor())
    except OSError:
        return platform.processor() or platform.machine()


class RegimeSummary(NamedTuple):
    """Results of this package in one regime.

    Attributes:
      samples_per_second: client samples per second.
      seconds: seconds of each round.
      useful_fraction: fraction of the processed samples that are not padding.
      flops: floating-point operations per second.
      matmul_share: `flops` divided by the rate of large matrix products.
      compile_seconds: compile time in seconds.
      peak_memory: peak memory in bytes.
      ratios: samples per second divided by each peer's samples per second.
    """

    samples_per_second: float
    seconds: list[float]
    useful_fraction: float
    flops: float
    matmul_share: float
    compile_seconds: float
    peak_memory: int
    ratios: dict[str, float]


def summarize_turns(turns: dict[str, list[dict[str, Any]]]) -> RegimeSummary:
    """Summarize the records of all turns of one regime."""
    package_turns = turns["here"]
    rate = statistics.median(sample_rates(package_turns))
    flops = rate * package_turns[0]["flops_per_sample"]
    return RegimeSummary(
        rate,
        [second for turn in package_turns for second in turn["seconds"]],
        package_turns[0]["useful_work_fraction"],
        flops,
        flops / max(turn["matmul_flops"] for turn in package_turns),
        package_turns[0]["compile_seconds"],  # later turns load compiled programs
        max(turn["peak_memory"] for turn in package_turns),
        {p: rate / statistics.median(sample_rates(t)) for p, t in turns.items() if p != "here"},
    )


def format_tables(record: dict[str, Any]) -> str:
    """Format the results, the ratios to all peers and the notes as Markdown."""
    rows = {name: summarize_turns(turns) for name, turns in record["regimes"].items()}
    regime_turns = list(record["regimes"].values())
    devices = regime_turns[0]["here"][0]["devices"]
    lines = [f"{record['machine']}; jax devices: {devices}. Data: {record['data']}.", ""]
    lines += [
        "| regime | samples/s | x best peer | s a round (range) | useful work "
        "| GFLOP/s (of a matmul's) | compilation | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {name} | {' | '.join(format_columns(row))} |" for name, row in rows.items()]
    peers = [peer for peer in PEERS if any(peer in row.ratios for row in rows.values())]
    if peers:
        lines += ["", f"| times as fast as | {' | '.join(peers)} |", "|---|" + "---|" * len(peers)]
        lines += [
            f"| {name} | {' | '.join(format_ratio(row.ratios.get(peer)) for peer in peers)} |"
            for name, row in rows.items()
            if row.ratios
        ]
    lines.append("")
    for name in rows:
        lines.append(f"* {name}: {REGIMES[name].description}; {describe_lanes(record, name)}.")
    for peer in peers:
        version = next(turns[peer][0]["version"] for turns in regime_turns if peer in turns)
        lines.append(f"* {peer}: {version}; {PEERS[peer].note}.")
    return "\n".join(lines)


def describe_lanes(record: dict[str, Any], name: str) -> str:
    """Describe the lanes of a regime, and the cost of a sweep."""
    first = record["regimes"][name]["here"][0]
    if "seconds_of_one" not in first:
        return first["lanes"]
    factor = first["seconds"][0] / first["seconds_of_one"][0]
    return f"{first['lanes']}; all take {factor:.2f} times as long as one run alone"


def format_columns(row: RegimeSummary) -> list[str]:
    """Format the cells of a row."""
    low, high = min(row.seconds), max(row.seconds)
    return [
        f"{row.samples_per_second:,.0f}",
        format_ratio(min(row.ratios.values(), default=None)),
        f"{statistics.median(row.seconds):.3f} ({low:.3f} to {high:.3f})",
        f"{100 * row.useful_fraction:.1f} %",
        f"{row.flops / 1e9:,.0f} ({100 * row.matmul_share:.0f} %)",
        f"{row.compile_seconds:.1f} s",
        f"{row.peak_memory / 1e6:,.0f} MB",
    ]


def format_ratio(value: float | None) -> str:
    """Format a ratio; a dash for None."""
    return "—" if value is None else f"{value:.2f}"


def write_output(path: Path, record: dict[str, Any]) -> None:
    """Write the record as JSON and the tables as Markdown."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(record, indent=1))
    path.with_suffix(".md").write_text(format_tables(record) + "\n")


main = make_config_program(Arguments, run_benchmark)

if __name__ == "__main__":
    raise SystemExit(main())
