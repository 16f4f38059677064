"""`fedjax-het run`: one federation."""

import dataclasses
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import tyro

from fedjax_het.cli.arguments import (
    HP_HELP,
    OPTION_HELP,
    NetworkOptions,
    OptimizerOptions,
    PartitionOptions,
    ServerOptions,
    parse_count,
    parse_literals,
    parse_number,
    parse_pairs,
)
from fedjax_het.cli.config_file import MAPPING_SETTINGS
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.utils import console
from fedjax_het.utils.errors import ConfigError, display_name
from fedjax_het.utils.io import make_output_directory

HpArguments = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE", help=HP_HELP)]
OptionArguments = Annotated[
    tuple[str, ...], tyro.conf.arg(name="option", metavar="NAME=VALUE", help=OPTION_HELP)
]


@dataclass(frozen=True)
class RunCommand(RunSpec):
    """Run one federation; the last line printed is one JSON object.

    Whatever is not given is as in the method's paper. `fedjax-het list` names what there is,
    `fedjax-het show NAME` says what it takes.
    """

    # As words, which are no settings yet: hence the types that RunSpec does not have. The settings
    # themselves, with their help, are those of RunSpec.
    hp: HpArguments = ()  # type: ignore[assignment]
    options: OptionArguments = ()  # type: ignore[assignment]
    network_options: NetworkOptions = ()  # type: ignore[assignment]
    partition_options: PartitionOptions = ()  # type: ignore[assignment]
    server_options: ServerOptions = ()  # type: ignore[assignment]
    optimizer_options: OptimizerOptions = ()  # type: ignore[assignment]
    config: Path | None = None
    """A file of settings in YAML, or a result's JSON; what is given here goes over it."""
    data_dir: Path | None = None
    """Folder of the prepared data (default: TFDS_DATA_DIR)."""
    output_dir: Path | None = None
    """Where the result, pictures and checkpoints are written (default: nothing is)."""
    resume: bool = False
    """Continue from the checkpoint in the output folder, if there is one."""
    resume_anyway: bool = False
    """The same also where it was begun under another version, device or precision."""
    keep_state: bool = True
    """Keep how the run ended, in the output folder: from there it goes on to more rounds (--rounds
    400 --resume), and the loaded result has its models."""
    track: tuple[str, ...] = ()
    """Trackers that keep a record of the run, in the output folder: csv, tensorboard, wandb,
    mlflow."""
    lanes: str = "auto"
    """Vmapped lanes per device; a matter of speed only."""
    server_work: str = "auto"
    """Whether devices share what the server does: shared, alone (all do the same) or auto, what is
    faster; a matter of speed only."""
    client_state: str = "auto"
    """Where clients' states are: device, split (a part on each device), host (those of the next
    rounds' clients are put on the devices) or auto, the last two if they would not fit; a matter of
    memory only."""
    pictures: tuple[str, ...] = ()
    """Kinds of pictures besides PNG: pdf, svg; dark: each on a dark page, too, as NAME-dark.png."""
    quiet: bool = False
    """Nothing but errors on stderr. Otherwise progress: where stderr is no terminal, a line every
    30 s, and less often the longer it takes, every 10 min in the end."""
    json: bool = False
    """Progress, notes and errors on stderr as one JSON object a line."""
    distributed: bool = False
    """Several processes: call jax.distributed.initialize(), which finds SLURM, TPU pods, MPI."""


def build_run_spec(command: RunCommand) -> RunSpec:
    """The settings that a command line names."""
    values = {field.name: getattr(command, field.name) for field in dataclasses.fields(RunSpec)}
    values["hp"] = {
        name: parse_number("hp", name, text) for name, text in parse_pairs("hp", command.hp)
    }
    for name in MAPPING_SETTINGS[1:]:
        values[name] = parse_literals(name, getattr(command, name))
    return RunSpec(**values)


def run_command(command: RunCommand) -> int:
    from fedjax_het.analysis.figures.run_figures import write_run_figures
    from fedjax_het.data import load_dataset
    from fedjax_het.runtime.placement import Placement
    from fedjax_het.runtime.progress import show_progress
    from fedjax_het.runtime.result_schema import to_json_value
    from fedjax_het.runtime.result_store import ResultNotWrittenError
    from fedjax_het.runtime.session import require_output_dir_to_resume, simulate

    is_main_process = jax.process_index() == 0
    quiet = command.quiet or not is_main_process
    console.set_output_mode(quiet=quiet, as_json=command.json)
    # What it runs on is for who looks on: a pipe gets notes, and progress now and then.
    is_watched = sys.stderr.isatty() or command.json
    console.log_to_stderr(logging.INFO if is_watched else logging.WARNING)
    spec = build_run_spec(command).resolved()
    placement = Placement(
        lanes=parse_count("lanes", command.lanes),
        server_work=command.server_work,
        client_state=command.client_state,
    )
    resume_options = {"resume": command.resume, "resume_anyway": command.resume_anyway}
    require_output_dir_to_resume(command.output_dir, **resume_options)
    if command.output_dir is not None:
        make_output_directory(command.output_dir)
    dataset = load_dataset(
        spec.dataset, normalisation=spec.normalisation, data_dir=command.data_dir
    )
    write_error: Exception | None = None
    with show_progress(f"{spec.algorithm} on {spec.dataset}") as update_progress:
        try:
            result = simulate(
                spec,
                dataset=dataset,
                output_dir=command.output_dir,
                resume=command.resume,
                resume_anyway=command.resume_anyway,
                keep_state=command.keep_state,
                progress=update_progress,
                track=command.track,
                placement=placement,
                data_dir=command.data_dir,
            )
        except ResultNotWrittenError as error:  # what was made is there, elsewhere
            result, write_error = error.results, error
    if not is_main_process:
        return 0
    if command.output_dir is not None and write_error is None:
        assert result.partition is not None  # a run that was just made has it
        try:
            write_run_figures(result, dataset, result.partition, command.output_dir)
        except OSError as error:
            folder, reason = str(command.output_dir), error.strerror or error
            setting_text = f"{display_name('output_dir')} = {folder!r}"
            write_error = ConfigError(
                f"{setting_text}: the result is written, its pictures are not ({reason})"
            )
    print(json.dumps(to_json_value(result.summary), allow_nan=False), flush=True)
    if write_error is not None:
        raise write_error
    return 0
