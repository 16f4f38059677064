"""One run, from its settings to its result, as one call or as a loop over its rounds."""

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from fedjax_het.algorithms import METHODS
from fedjax_het.config.protocols import choose_protocol, describe_protocol
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.data import Dataset, Partition
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.callbacks import Callback, CallbackRunner, RunStatus
from fedjax_het.runtime.checkpointing import (
    CHECKPOINT_FILE,
    NOTHING_SAVED,
    CheckpointWriter,
    delete_checkpoint,
    find_checkpoint_record,
    find_resumable_record,
)
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.device_report import warn_unused_hardware
from fedjax_het.runtime.group_init import init_group, log_run_header
from fedjax_het.runtime.group_state import GroupState, Snapshot
from fedjax_het.runtime.history import CALLBACK, EarlyStop
from fedjax_het.runtime.identity import RegisteredIdentity
from fedjax_het.runtime.leases import exit_on_sigterm
from fedjax_het.runtime.memory_limits import translate_out_of_memory
from fedjax_het.runtime.placement import DEVICE_STATE, Placement
from fedjax_het.runtime.program_memory import init_within_memory
from fedjax_het.runtime.progress import END, START, ProgressOption, show_selected_progress
from fedjax_het.runtime.result_builder import build_results, compute_result_digest
from fedjax_het.runtime.result_store import ResultWriter, SavedStateIndex, save_run_files
from fedjax_het.runtime.results import Result, build_state_path
from fedjax_het.runtime.runner import advance_runs, start_runs
from fedjax_het.runtime.trackers import add_tracker_callback
from fedjax_het.utils.config import PositiveInt, validate, validate_arguments
from fedjax_het.utils.env import is_terminal, require_variables
from fedjax_het.utils.errors import ConfigError, display_name, require
from fedjax_het.utils.io import make_output_directory
from fedjax_het.utils.signals import defer_signals

log = logging.getLogger("fedjax_het")


class Session:
    """A run that is ready, or at some round; `federation` returns it.

    Example:
      >>> from fedjax_het import RunSpec, federation
      >>> session = federation(RunSpec("fedavg", "digits", model="mlp", num_clients=2, rounds=2))
      >>> [status.done for status in session.rounds(every=1)]
      [1, 2]
      >>> session.result().rounds
      2
    """

    def __init__(
        self,
        group_state: GroupState,
        checkpoints: CheckpointWriter,
        callbacks: Sequence[Callback],
        state_folder: Path | None,
        *,
        title: str,
        progress: ProgressOption = None,
    ):
        """Prepare the callbacks.

        Args:
          group_state: the run.
          checkpoints: its checkpoints, in the folder of its result.
          callbacks: called at the start, between chunks of rounds and at the end.
          state_folder: the folder of the final state; None if the state is not written.
          title: title of the progress.
          progress: progress of the loop over rounds.
        """
        self._group_state, self._checkpoints = group_state, checkpoints
        self._callback_runner = CallbackRunner(group_state, checkpoints, callbacks)
        self._folder = checkpoints.folders[0] if checkpoints.folders else None
        self._state_folder, self._progress, self._title = state_folder, progress, title
        self._has_started = False
        self._x64 = _is_x64_enabled()
        self._result: Result | None = None
        self._unfinished: Snapshot | None = None  # before `result` ended the run

    def rounds(self, every: PositiveInt | None = None) -> Iterator[RunStatus]:
        """Execute the remaining rounds and yield the status of the run after every chunk of rounds.

        The result is written after the last round. A caller that leaves the loop earlier leaves a
        checkpoint if there is an `output_dir`. The caller can continue with another loop, before
        and after `result()`. The programs are compiled at the first round.

        The caller can also continue after an exception that a signal raised, such as
        KeyboardInterrupt of Ctrl-C. The run then has the bits of an uninterrupted run. Signals wait
        until a call of a program has ended and its rounds are recorded.

        Args:
          every: chunks end at multiples of this number of rounds (default: a chunk takes about two
            seconds).

        Returns:
          An iterator of the status of the run.

        Raises:
          ConfigError: if `every` is no whole number >= 1, or if an error interrupted the
            replacement of the state, so that the run cannot continue.
        """
        return self._rounds(validate("every", every, PositiveInt | None))

    def _rounds(self, every: int | None) -> Iterator[RunStatus]:
        self._callback_runner.always_report, self._group_state.pause_every = True, every
        steps, title = self.advance(), self._title
        # A terminal shows a panel only while rounds are executed: the caller may print or read.
        has_panel = self._progress in ("auto", True) and is_terminal(sys.stderr)
        with show_selected_progress(None if has_panel else self._progress, title) as shown:
            progress, phase = self._progress if has_panel else shown, "compiling"
            try:
                while True:
                    with show_selected_progress(
                        progress, title, transient=True, initial_phase=phase
                    ) as show:
                        if show is not None:
                            self._group_state.progress = show
                        with exit_on_sigterm(), _explain_interrupt(self._folder):
                            status = next(steps, None)
                    if status is None:
                        return
                    phase = "rounds"
                    yield status
            except GeneratorExit:
                self._checkpoints.save(self._group_state, force=True)
                raise

    def advance(self) -> Iterator[RunStatus | None]:
        """Execute the remaining rounds; yield the status if a callback or a loop reads it."""
        self._require_same_width()
        group_state, checkpoints = self._group_state, self._checkpoints
        with translate_out_of_memory(group_state.prepared_runs[0].spec):
            if not self._has_started:
                log_run_header(group_state)
                start_runs(group_state, checkpoints)
                self._has_started = True
            with checkpoints.save_at_interrupt(group_state):
                if self._result is None or self._unfinished is not None:
                    yield from self._advance()
                self._finalize()

    def _advance(self) -> Iterator[RunStatus | None]:
        group_state = self._group_state
        group_state.require_state()
        self._reopen()
        unreported_phase = group_state.snapshot.unreported_phase
        if unreported_phase == START:
            self._callback_runner.call(0, START)
        elif unreported_phase not in (None, END):  # a signal came before the callbacks
            yield self._callback_runner.call(0, unreported_phase)
            self._reopen()
        for phase in advance_runs(group_state, self._checkpoints):
            yield self._callback_runner.call(0, phase)
            self._reopen()  # the caller may have called `result`

    def _reopen(self) -> None:
        """Continue a run that `result` has ended; its result keeps its curves and client states."""
        group_state, snapshot = self._group_state, self._unfinished
        if snapshot is None:
            return
        group_state.curves[0] = {name: c.copy() for name, c in group_state.curves[0].items()}
        if (pager := group_state.pager) is not None:
            pager.states = [pager.states[0].copy()] * len(pager.states)
        group_state.snapshot = snapshot
        self._callback_runner.call(0, START)  # the end has closed the records of trackers
        with defer_signals():
            group_state.update(unreported_phase=snapshot.unreported_phase)
            group_state.reported.discard(0)
            self._result = self._unfinished = None

    def result(self) -> Result:
        """Return the result of the rounds so far.

        A run that has rounds left ends here: callbacks are called with the phase "end", and the
        result is partial. Another loop over `rounds()` continues the run.

        Raises:
          ConfigError: before the first round, and if an error interrupted the replacement of the
            state.
        """
        expected = "a run whose rounds() were iterated"
        require(self._has_started, "result", "none yet", expected)
        self._require_same_width()
        unreported_phase = self._group_state.snapshot.unreported_phase
        if unreported_phase not in (None, END):  # a signal came before the callbacks
            self._callback_runner.call(0, unreported_phase)
        snapshot = self._group_state.snapshot
        if self._result is None and self._group_state.is_unfinished:
            self._unfinished = snapshot
            reason = "the caller left the loop over rounds()"
            self._group_state.end_run(0, EarlyStop(snapshot.rounds_done, CALLBACK, reason))
        try:
            return self._finalize()
        except BaseException:
            if self._result is None:  # the run has not ended
                self._group_state.snapshot, self._unfinished = snapshot, None
                self._group_state.reported.discard(0)
            raise

    def _require_same_width(self) -> None:
        """Raise ConfigError if `jax_enable_x64` has changed since the run began."""
        value, expected = _is_x64_enabled(), f"{self._x64}, as at the start of the run"
        require(value == self._x64, "jax_enable_x64", value, expected)

    def _finalize(self) -> Result:
        """Build and write the result, once; after a signal or a full disk, a call tries again."""
        group_state = self._group_state
        if self._result is None:
            result = build_results(group_state, [0])[0]
            if jax.process_index() == 0:
                self._write(result)
            group_state.reported.add(0)
            group_state.update(unreported_phase=END)
            self._result = result
        if group_state.snapshot.unreported_phase == END:
            self._callback_runner.call(0, END, self._result)
        return self._result

    def _write(self, result: Result) -> None:
        """Write the result and the final state, and delete the checkpoint of a run that ended."""
        group_state, checkpoints = self._group_state, self._checkpoints
        if self._state_folder is not None:
            path = build_state_path(self._state_folder, result.file_stem)
            checkpoints.save_final_state(group_state, 0, path)
        result_writer = ResultWriter(self._folder, save_run_files)
        result_writer.write(result)
        result_writer.require_all_written(result)
        if result.is_partial:  # it may be resumed
            checkpoints.save(group_state, force=True)
        elif self._folder is not None:
            delete_checkpoint(self._folder)

    def close(self) -> None:
        """Release the output folder to other processes."""
        self._checkpoints.unlock_run()


@validate_arguments
def simulate(
    spec: RunSpec,
    *,
    dataset: Dataset | None = None,
    partition: Partition | None = None,
    network: Any = None,
    optimizer: Any = None,
    output_dir: str | Path | None = None,
    resume: bool = False,
    resume_anyway: bool = False,
    keep_state: bool = True,
    progress: ProgressOption = "auto",
    callbacks: Sequence[Callback] = (),
    track: Sequence[str] = (),
    placement: Placement = Placement(),
    data_dir: str | os.PathLike | None = None,
    debug: bool = False,
) -> Result:
    """Execute one run, and write its result if there is an `output_dir`.

    If `jax.distributed` is initialized, every process must call this function with equal arguments.
    The devices of all processes share the lanes, all processes return the result, and the first
    process writes it.

    Args:
      spec: the settings; the protocol sets the fields that are None.
      dataset: the user's data set (default: the data set of `spec`). If it differs from the data
        set of `spec`, its digest is part of the result's name and of its summary (`own_dataset`).
      partition: the user's partition (default: the partition of `spec`); its digest is recorded as
        `own_partition`.
      network: the user's network, which replaces `spec.model`. It is a flax.linen module or its
        class, an (init, apply) pair, or a function that returns one of them; see `nn.to_model`.
        `spec.network_options` are its options.
      optimizer: the clients' optimizer, which replaces `spec.local_optimizer`. It is an
        `optax.GradientTransformation`, or a function that returns one and takes the dictionary
        `spec.hyperparameters`. `spec.hp` may have `local_...` entries of the user. New values do
        not compile again. The optimizer's digest is part of the result's name.
      output_dir: the folder of the result, and of checkpoints during the run.
      resume: whether to continue from the checkpoint in `output_dir`; without a checkpoint, from
        the end of the same run with fewer rounds, or from the beginning. On a CPU the metrics are
        bit-equal to the metrics of an uninterrupted run. The checkpoint sets the numbers of lanes
        and blocks.
      resume_anyway: whether to resume also from a checkpoint of another version, device or
        precision, which the summary then records (`begun_under`).
      keep_state: whether to write the final state to `output_dir` as `<digest>.state.npz`. With it
        the run can continue to more rounds, and the loaded result has its models. The file is as
        large as a checkpoint.
      progress: "auto" or True for a bar on a terminal or in a notebook (elsewhere a line now and
        then, if the run takes longer than 30 seconds); None or False for no output; or a function
        that is called between chunks of rounds.
      callbacks: called at the start, between chunks of rounds and at the end with all metrics so
        far; they can stop the run. See `runtime.callbacks.RunStatus`.
      track: names of trackers in `TRACKERS`, which record the run in `output_dir`.
      placement: devices, lanes and the place of client states. Affects speed and memory; results
        differ by rounding at most.
      data_dir: folder of the prepared data that `spec` names (default: TFDS_DATA_DIR).
      debug: whether to run without jit on one device, client by client, so that a method's
        functions can print and test values. An exception in a client's function becomes a
        `ClientError` that names method, round, client and step. Slow: for small runs of a new
        method.

    Returns:
      The result.

    Raises:
      ConfigError: before compilation, if a setting cannot be used, or if the run needs more memory
        than is free. Also if `output_dir` holds a damaged checkpoint or a checkpoint of other
        settings. If the compiled program needs more memory, lanes are halved and client states move
        to the host first, as far as `placement` leaves them open.
      ResultNotWrittenError: if the result could not be written to `output_dir`. The exception holds
        the result and names the place where it is stored.

    Example:
      >>> from fedjax_het import RunSpec, simulate
      >>> result = simulate(RunSpec(dataset="digits", model="mlp", num_clients=2, rounds=2))
      >>> result.metrics["test_accuracy"].shape
      (2,)
    """
    with (
        exit_on_sigterm(),
        _explain_interrupt(output_dir),
        show_selected_progress(progress, make_title(spec, dataset)) as progress_callback,
    ):
        session = federation(
            spec,
            dataset=dataset,
            partition=partition,
            network=network,
            optimizer=optimizer,
            output_dir=output_dir,
            resume=resume,
            resume_anyway=resume_anyway,
            keep_state=keep_state,
            progress=progress_callback,
            callbacks=callbacks,
            track=track,
            placement=placement,
            data_dir=data_dir,
            debug=debug,
        )
        try:
            for _ in session.advance():
                pass
            return session.result()
        finally:
            session.close()


def _is_x64_enabled() -> bool:
    config: Any = jax.config  # jax adds its settings at run time
    return bool(config.jax_enable_x64)


def make_title(spec: RunSpec, dataset: Dataset | None = None) -> str:
    """Return the title of a run's progress: method, data set and protocol.

    Args:
      spec: the settings.
      dataset: the user's data set, if the run has one.

    Returns:
      The title.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.runtime.session import make_title
      >>> make_title(RunSpec())
      'FedAvg on digits, protocol standard'
    """
    data = spec.dataset if dataset is None else "own data"
    try:
        method = METHODS.require(spec.algorithm)
        return f"{method.title} on {data}, protocol {choose_protocol(spec.protocol, method)}"
    except ConfigError:  # the run itself reports an unknown name
        return f"{spec.algorithm} on {data}"


@contextlib.contextmanager
def _explain_interrupt(output_dir: str | Path | None) -> Iterator[None]:
    """Add to the exception of Ctrl-C or SIGTERM how the run continues."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        is_python = display_name("resume") == "resume"
        has_checkpoint = output_dir is not None and (Path(output_dir) / CHECKPOINT_FILE).exists()
        if output_dir is None and is_python:
            error.add_note("Without output_dir, no file has the rounds that are done.")
        elif has_checkpoint and is_python:
            error.add_note(
                f"Call again with output_dir={str(output_dir)!r} and resume=True to continue from "
                "the checkpoint."
            )
        elif output_dir is not None and not has_checkpoint and not hasattr(error, "__notes__"):
            error.add_note(NOTHING_SAVED)
        raise


@validate_arguments
def federation(
    spec: RunSpec,
    *,
    dataset: Dataset | None = None,
    partition: Partition | None = None,
    network: Any = None,
    optimizer: Any = None,
    output_dir: str | Path | None = None,
    resume: bool = False,
    resume_anyway: bool = False,
    keep_state: bool = True,
    progress: ProgressOption = "auto",
    callbacks: Sequence[Callback] = (),
    track: Sequence[str] = (),
    placement: Placement = Placement(),
    data_dir: str | os.PathLike | None = None,
    debug: bool = False,
) -> Session:
    """Prepare a run whose rounds the caller executes in a loop.

    `simulate` describes the arguments in full.

    Args:
      spec: the settings.
      dataset: the user's data set (default: the data set of `spec`).
      partition: the user's partition (default: the partition of `spec`).
      network: the user's network (default: the network of `spec`).
      optimizer: the clients' optimizer (default: the optimizer of `spec`).
      output_dir: the folder of the result, and of checkpoints during the run.
      resume: whether to continue from the checkpoint in `output_dir`.
      resume_anyway: whether to resume from a checkpoint of another version, device or precision.
      keep_state: whether to write the final state to `output_dir`.
      progress: "auto", True, None, False or a function, see `simulate`.
      callbacks: called at the start, between chunks of rounds and at the end.
      track: names of trackers in `TRACKERS`.
      placement: devices, lanes and the place of client states.
      data_dir: folder of the prepared data that `spec` names (default: TFDS_DATA_DIR).
      debug: whether to run without jit on one device, client by client.

    Returns:
      The run. `Session.rounds` executes it, `Session.result` returns its result.

    Raises:
      ConfigError: before compilation, if a setting cannot be used, or if the run needs more memory
        than is free. Also if `output_dir` holds a damaged checkpoint or a checkpoint of other
        settings.
      ResultNotWrittenError: from `Session.rounds` and `Session.result`, if the result could not be
        written to `output_dir`.

    Example:
      >>> from fedjax_het import RunSpec, federation
      >>> run = federation(RunSpec(dataset="digits", model="mlp", num_clients=2, rounds=2))
      >>> [status.done for status in run.rounds(every=1)]
      [1, 2]
      >>> run.result().metrics["test_accuracy"].shape
      (2,)
    """
    start_time = time.perf_counter()
    require_variables()
    if not placement.has_explicit_cpus:
        warn_unused_hardware()
    user_objects = UserObjects(dataset, partition, network, optimizer, data_dir)
    spec = user_objects.resolve(spec)
    log.info("protocol: %s", describe_protocol(spec.protocol))
    folder = None if output_dir is None else make_output_directory(output_dir)
    for name, value in {"resume": resume, "resume_anyway": resume_anyway}.items():
        expected = f"an {display_name('output_dir')} with checkpoints"
        require(not value or folder is not None, name, value, expected)
    callbacks = add_tracker_callback(callbacks, track, folder)
    resume = resume or resume_anyway
    record = existing_record = None
    if folder is not None and resume:
        list_changes = RegisteredIdentity(user_objects).list_changes
        saved_state = SavedStateIndex(folder).find(spec, dataset, partition, list_changes)
        record = existing_record = find_resumable_record(
            folder,
            spec,
            saved_state=saved_state,
            resume_anyway=resume_anyway,
            list_changes=list_changes,
        )
    elif folder is not None:
        existing_record = find_checkpoint_record(folder, spec)
        if existing_record is not None:
            del existing_record["arrays"]
            _warn_restart(existing_record, spec)
    if record is not None:  # the same lanes, so that sums are taken in the same order
        log.info("continuing after round %d of %d", record["round"], spec.rounds)
        lanes, blocks = record["lanes"], record["blocks"]
        devices = min(blocks, len(jax.devices()))
        placement = dataclasses.replace(placement, lanes=lanes, blocks=blocks, devices=devices)
    if debug:
        placement = Placement(devices=1, lanes=1, blocks=1, client_state=DEVICE_STATE)
    checkpoints = CheckpointWriter(None if folder is None else [folder])

    def init(candidate: Placement) -> GroupState:
        group = prepare_group([spec], user_objects, candidate, has_mesh=not debug, is_debug=debug)
        group_state = init_group(
            group,
            group.prepared_runs,
            progress=progress if callable(progress) else None,
            start_time=start_time,
            records=[] if record is None else [record],
        )
        if existing_record is not None:
            checkpoints.require_matching_data(group_state, [existing_record])
        if folder is not None and candidate is placement:  # the first one
            digest = compute_result_digest(group_state, 0)
            checkpoints.lock_run(folder, digest)
            if not resume and (path := folder / f"{digest}.json").exists():
                text = "%r is the result of this run: the run is repeated and replaces it"
                log.warning(text + "; Result.load reads it", str(path))
        return group_state

    with translate_out_of_memory(spec):
        group_state = init(placement) if debug else init_within_memory(init, placement)
    state_folder = folder if keep_state else None
    title = make_title(spec, dataset)
    return Session(
        group_state, checkpoints, callbacks, state_folder, title=title, progress=progress
    )


def _warn_restart(record: dict[str, Any], spec: ResolvedRunSpec) -> None:
    """Warn that a run replaces a checkpoint, which has rounds done."""
    log.warning(
        "checkpoint = %r: %d of %d rounds are done, but the run starts again and replaces it; "
        "%s continues from it",
        record["path"],
        record["round"],
        spec.rounds,
        "resume=True" if display_name("resume") == "resume" else "the command without --restart",
    )
