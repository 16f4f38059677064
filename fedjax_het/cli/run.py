"""Command `fedjax-het run`: one federation."""

import dataclasses
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from fedjax_het.analysis.figures.style import FigureFormat
from fedjax_het.analysis.overview import get_method_title
from fedjax_het.cli.options import CommonOptions
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.config.settings import RunSettings
from fedjax_het.metrics.registry import parse_metrics
from fedjax_het.utils import console
from fedjax_het.utils.errors import ConfigError, display_name, require

if TYPE_CHECKING:
    from fedjax_het.runtime.results import Result

log = logging.getLogger("fedjax_het")


@dataclass(frozen=True)
class RunCommand(CommonOptions, RunSettings):
    """Train one federation and print a summary.

    A terminal shows the summary as text. In a pipe, or with --json or --quiet, the last line of the
    output is one JSON object.

    A run that is in the output folder already prints its result; a stopped run continues.

    An omitted setting has the value of the protocol (default: standard, of NIID-Bench). `fedjax-het
    list` names the methods, data sets, partitions and networks; `fedjax-het show NAME` lists their
    options.
    """

    output_dir: Path | None = None
    """Folder for the result, figures and checkpoints (default: nothing is written)."""
    resume: bool = False
    """Require an output folder from which the run continues. A run with an output folder continues
    from its checkpoint, and a finished run prints its result, with and without this flag."""
    restart: bool = False
    """Begin again although the output folder has the result or a checkpoint of this run."""
    keep_state: bool = True
    """Keep the final state in the output folder, which is needed to train more rounds and to load
    the models."""
    pictures: tuple[FigureFormat, ...] = ()
    """Additional files of each figure: pdf, svg (default: PNG only)."""


def build_run_spec(command: RunCommand) -> RunSpec:
    """Return the settings of a command line.

    Raises:
      ConfigError: if a setting cannot be used, or if a learning rate is given twice.
    """
    names = [field.name for field in dataclasses.fields(RunSpec)]
    return RunSpec(**{name: getattr(command, name) for name in names})


def run_command(command: RunCommand) -> int:
    """Train the federation, write its result and figures, and print its summary.

    Returns:
      Exit status 0.

    Raises:
      ConfigError: for settings that cannot be used, and for a result that cannot be written.
    """
    from fedjax_het.analysis.figures.run_figures import write_run_figures
    from fedjax_het.data import load_dataset
    from fedjax_het.runtime.data_assignment import UserObjects
    from fedjax_het.runtime.progress import show_progress
    from fedjax_het.runtime.result_display import to_json_value
    from fedjax_het.runtime.result_store import ResultNotWrittenError
    from fedjax_het.runtime.session import make_title, simulate

    is_main_process = jax.process_index() == 0
    console.set_output_mode(quiet=command.quiet or not is_main_process, as_json=command.json)
    # Messages of level INFO describe the placement to a user who watches a terminal.
    is_watched = sys.stderr.isatty() or command.json
    console.log_to_stderr(logging.INFO if is_watched else logging.WARNING)
    spec = UserObjects(data_dir=command.data_dir).resolve(build_run_spec(command))
    is_conflict, expected = command.restart and command.resume, f"no {display_name('resume')}"
    require(not is_conflict, "restart", command.restart, expected)
    folder = None if command.restart else command.output_dir
    # Processes that share a run need not share the folder.
    if folder is not None and folder.is_dir() and jax.process_count() == 1:
        finished = _find_finished(spec, folder, command)
        if finished is not None:
            console.print_summary(to_json_value(finished.summary), _describe(finished, folder))
            return 0
    data_options: Any = {"normalization": spec.normalization, "data_dir": command.data_dir}
    dataset = load_dataset(spec.dataset, **data_options)
    write_error: Exception | None = None
    with show_progress(make_title(spec)) as update_progress:
        try:
            result = simulate(
                spec,
                dataset=dataset,
                output_dir=command.output_dir,
                resume=command.resume or folder is not None,
                resume_anyway=command.resume_anyway,
                keep_state=command.keep_state,
                progress=update_progress,
                track=command.track,
                placement=command.make_placement(),
                data_dir=command.data_dir,
            )
        except ResultNotWrittenError as error:  # the result is stored elsewhere
            result, write_error = error.results, error
    if not is_main_process:
        return 0
    if command.output_dir is not None and write_error is None:
        assert result.partition is not None  # a new run has a partition
        try:
            write_run_figures(
                result, dataset, result.partition, command.output_dir, formats=command.pictures
            )
        except OSError as error:
            message = "the result is written, its figures are not"
            setting_text = f"{display_name('output_dir')} = {str(command.output_dir)!r}"
            write_error = ConfigError(f"{setting_text}: {message} ({error.strerror or error})")
    lines = _describe(result, None if write_error else command.output_dir)
    console.print_summary(to_json_value(result.summary), lines)
    if write_error is not None:
        raise write_error
    return 0


def _find_finished(spec: RunSpec, output_dir: Path, command: RunCommand) -> "Result | None":
    """Return the result of a run that is finished in a folder, and report it; None otherwise."""
    from fedjax_het.runtime.result_store import load_result
    from fedjax_het.runtime.results import build_state_path
    from fedjax_het.runtime.sweep import plan_sweep

    ((digest, _, state),) = plan_sweep([spec], output_dir, data_dir=command.data_dir)
    result = load_result(output_dir, digest) if state == "done" else None
    if state == "outdated":
        log.warning("%s has a result of this run, but of objects that have changed", output_dir)
    if result is not None:
        omitted = [f"the record of {name}" for name in command.track]
        if command.keep_state and not build_state_path(output_dir, digest).exists():
            omitted.insert(0, "the final state")
        text = f" and writes {', '.join(omitted)}" if omitted else ""
        log.warning("%s has the result of this run; --restart repeats the run%s", output_dir, text)
    return result


def _describe(result: "Result", output_dir: Path | None) -> Iterator[str]:
    """Yield the summary of a run for people, about five lines."""
    from fedjax_het.runtime.progress import format_duration
    from fedjax_het.runtime.result_display import format_outcome, name_data
    from fedjax_het.runtime.split_measures import describe_measures

    summary, spec, names = result.summary, result.spec, name_data(result.spec, result.summary)
    alpha = "" if spec.alpha is None else f" (alpha {spec.alpha:g})"
    compile_time = format_duration(summary.get("compile_seconds") or 0.0)
    time = f"{format_duration(result.seconds)}, of which compilation {compile_time}"
    method = get_method_title(spec.algorithm)
    yield f"Method:   {method}, protocol {spec.protocol}, network {spec.model}"
    yield f"Data:     {names['dataset']}, {names['partition']}{alpha}, {spec.num_clients} clients"
    requested = [name for m in parse_metrics(spec.metrics) for name in m.split_measure_names]
    if requested:
        measures = describe_measures({name: summary["split"].get(name) for name in requested})
        yield f"Split:    {', '.join(measures)}"
    yield f"Outcome:  {format_outcome(result)}"
    yield f"Rounds:   {summary['rounds']} of {spec.rounds} in {time}"
    if output_dir is None:
        yield "Files:    none; --output-dir FOLDER writes the result, figures and checkpoints"
        return
    num_files = len(list(output_dir.glob(f"{result.file_stem}.*")))
    yield f"Files:    {num_files} in {output_dir}, named {result.file_stem}.*"
    yield f"Next:     fedjax-het report {output_dir}"
