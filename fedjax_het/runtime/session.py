"""One federation, from its settings to its result, as one call or as a loop over its rounds."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from fedjax_het.config.run_spec import RunSpec
from fedjax_het.data import Dataset, Partition
from fedjax_het.runtime.build import on_single_device, prepare_group
from fedjax_het.runtime.callbacks import Callback, CallbackRunner, RunStatus
from fedjax_het.runtime.checkpointing import (
    CheckpointWriter,
    delete_checkpoint,
    find_checkpoint_record,
    find_resumable_record,
)
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.device_report import warn_unused_hardware
from fedjax_het.runtime.group_state import GroupState, init_group
from fedjax_het.runtime.history import CALLBACK, EarlyStop
from fedjax_het.runtime.memory_limits import (
    InsufficientMemoryError,
    reduce_memory_use,
    require_memory_for_programs,
    translate_out_of_memory,
)
from fedjax_het.runtime.placement import DEVICE_STATE, Placement
from fedjax_het.runtime.progress import Progress
from fedjax_het.runtime.result_builder import build_result
from fedjax_het.runtime.result_store import ResultWriter, SavedStateIndex, save_run_files
from fedjax_het.runtime.results import Result, build_state_path
from fedjax_het.runtime.runner import advance_runs, log_run_header, start_runs
from fedjax_het.runtime.trackers import add_tracker_callback
from fedjax_het.utils.config import PositiveInt, validate, validate_arguments
from fedjax_het.utils.env import require_variables
from fedjax_het.utils.errors import display_name, require
from fedjax_het.utils.io import make_output_directory


class Session:
    """A federation that is ready, or at some round; see `federation`."""

    def __init__(
        self,
        group_state: GroupState,
        checkpoints: CheckpointWriter,
        record: dict | None,
        callbacks: Sequence[Callback],
        write_result: Callable[[Result], None],
    ):
        """record: of the checkpoint to go on from. keep: writes the result."""
        self._group_state, self._checkpoints, self._record = group_state, checkpoints, record
        self._callback_runner = CallbackRunner(group_state, checkpoints, callbacks)
        self._write_result = write_result
        self._started = False
        self._result: Result | None = None

    def rounds(self, every: PositiveInt | None = None) -> Iterator[RunStatus]:
        """Go through the rounds that are left: where the run stands, after every chunk of them.

        every: chunks end at multiples of so many rounds (default: they take about two seconds).
        When there are none left the result is written. Who leaves the loop before leaves a
        checkpoint, where there is an `output_dir`, and goes on with another loop, or takes
        `result()`. Cost: the programs are compiled at the first round.
        """
        return self._rounds(validate("every", every, PositiveInt | None))

    def _rounds(self, every: int | None) -> Iterator[RunStatus]:
        self._callback_runner.always_report, self._group_state.pause_every = True, every
        try:
            for status in self.advance():
                assert status is not None
                yield status
        except GeneratorExit:
            self._checkpoints.save(self._group_state, force=True)
            raise

    def advance(self) -> Iterator[RunStatus | None]:
        """The same; of nothing where nobody looks."""
        with translate_out_of_memory(self._group_state.prepared_runs[0].spec):
            if not self._started:
                log_run_header(self._group_state)
                start_runs(
                    self._group_state, self._checkpoints, [self._record] if self._record else None
                )
                self._started = True
                self._callback_runner.on_start()
            if self._result is None:
                for phase in advance_runs(self._group_state, self._checkpoints):
                    statuses = self._callback_runner.on_phase_end(phase)
                    yield statuses[0] if statuses else None
            self._finalize()

    def result(self) -> Result:
        """The result; of a run that was left before its last round, which ends it, that of the
        rounds so far. Raises ConfigError before the first round."""
        expected = "a run that was begun, by going through rounds()"
        require(self._started, "result", "none yet", expected)
        group_state = self._group_state
        if self._result is None and group_state.is_unfinished:
            group_state.early_stops[0] = EarlyStop(
                group_state.rounds_done, CALLBACK, "left by whoever went through its rounds"
            )
        self._finalize()
        assert self._result is not None
        return self._result

    def _finalize(self) -> None:
        if self._result is None:
            self._result = build_result(self._group_state, 0)
            self._write_result(self._result)
            self._group_state.reported.add(0)
            self._callback_runner.on_run_end(0, self._result)


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
    progress: Callable[[Progress], None] | None = None,
    callbacks: Sequence[Callback] = (),
    track: Sequence[str] = (),
    placement: Placement = Placement(),
    data_dir: str | os.PathLike | None = None,
    debug: bool = False,
) -> Result:
    """Run one federation.

    Args:
      spec: the settings; `None`s are filled from the method's paper.
      dataset, partition: the user's own; default: those that `spec` names. Where they are others
        than those, the result's name and its summary's `own_dataset` and `own_partition` say so,
        by their digests.
      network: the user's own, in place of the one that `spec` names: a flax.linen module or its
        class, an (init, apply) pair, a function of either; see `nn.to_model`. Its options are
        `spec.network_options`.
      optimizer: the clients' own, in place of the one that `spec` names: an
        `optax.GradientTransformation`, or a function of the numbers of `spec.hp` (a dictionary, of
        which any `local_...` may be its own) that returns one; it need not be traced again where
        these change. Its digest is part of the result's name.
      output_dir: where the result, and checkpoints on the way, are written.
      resume: continue from the checkpoint in `output_dir`, if there is one, else from where the
        same run ended with fewer rounds. The metrics are those of an uninterrupted run, bit for bit
        on a CPU; lanes and blocks are those it began with, whatever `placement` says.
      resume_anyway: also from one that was begun under another version, device or precision, which
        the summary then names (`begun_under`).
      keep_state: write to `output_dir` how the run ended, `<digest>.state.npz`: from there it goes
        on to more rounds, and the loaded result has its models. Of the size of a checkpoint.
      progress: called between chunks of rounds.
      callbacks: called at the start, between chunks and at the end with all that is measured so
        far, and able to stop the run: see `runtime.callbacks.RunStatus`.
      track: names of trackers, of `TRACKERS`, that keep a record of the run in `output_dir`.
      placement: on which devices, in how many lanes, with clients' states where: a matter of speed
        and memory, on which results do not depend beyond rounding.
      data_dir: of the prepared data that `spec` names (default: TFDS_DATA_DIR).
      debug: run without jit on one device, client by client, so that the functions of a method can
        print and test values. An exception of a client's function is a `ClientError` whose one line
        names method, round, client and step. Slow: for small runs of a new method.
    Raises: ConfigError, before anything compiles, if a setting cannot be used, if `output_dir`
      holds the checkpoint of another configuration, or one that is damaged, or if the run needs
      more memory than there is; before the first round, if its compiled program does, with fewer
      lanes and clients' states on the host, too, where `placement` leaves these open.
      ResultNotWrittenError, which has the result and says where it is kept, if it could not be written to
      `output_dir`.

    Where `jax.distributed` was initialised, every process calls this with the same arguments; the
    devices of all of them share the lanes, all return the result, and the first writes it.
    """
    session = federation(**locals())  # which takes the same arguments
    for _ in session.advance():
        pass
    return session.result()


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
    progress: Callable[[Progress], None] | None = None,
    callbacks: Sequence[Callback] = (),
    track: Sequence[str] = (),
    placement: Placement = Placement(),
    data_dir: str | os.PathLike | None = None,
    debug: bool = False,
) -> Session:
    """A federation whose rounds are gone through in a loop; it takes what `simulate` does.

        run = federation(spec)
        for now in run.rounds():
            print(now.done, now.metrics["test_accuracy"][-1])
            if enough(now):
                break
        result = run.result()

    See `Session.rounds` and `Session.result`. Raises: as `simulate`.
    """
    start_time = time.perf_counter()
    require_variables()
    if not placement.has_explicit_cpus:
        warn_unused_hardware()
    user_objects = UserObjects(dataset, partition, network, optimizer, data_dir)
    spec = user_objects.resolve(spec)
    folder = None if output_dir is None else make_output_directory(output_dir)
    require_output_dir_to_resume(folder, resume=resume, resume_anyway=resume_anyway)
    callbacks = add_tracker_callback(callbacks, track, folder)
    resume = resume or resume_anyway
    record = existing_record = None
    if folder is not None:
        existing_record = find_checkpoint_record(folder, spec, allow_more_rounds=resume)
        if resume:
            saved_state = SavedStateIndex(folder).find(spec, dataset, partition)
            record = find_resumable_record(
                folder, spec, saved_state=saved_state, resume_anyway=resume_anyway
            )
    if record is not None:  # the same lanes, so that sums are taken in the same order
        lanes, blocks = record["lanes"], record["blocks"]
        devices = min(blocks, len(jax.devices()))
        placement = dataclasses.replace(placement, lanes=lanes, blocks=blocks, devices=devices)
    if debug:
        placement = Placement(devices=1, lanes=1, blocks=1, client_state=DEVICE_STATE)
    checkpoints = CheckpointWriter(None if folder is None else [folder])
    with translate_out_of_memory(spec):
        candidate: Placement | None = placement
        while candidate is not None:
            group = prepare_group([spec], user_objects, candidate)
            if debug:
                group = on_single_device(group, is_debug=True)
            group_state = init_group(
                group,
                group.prepared_runs,
                progress=progress,
                start_time=start_time,
                records=() if record is None else (record,),
            )
            if existing_record is not None:
                checkpoints.require_matching_data(group_state, [existing_record])
            if debug:
                break
            try:
                programs = group_state.list_programs()
                require_memory_for_programs(
                    programs, group.program, spec, group.client_state, placement.memory
                )
                break
            except InsufficientMemoryError:
                candidate = reduce_memory_use(group.program, spec, group.client_state, placement)
                if candidate is None:
                    raise

    def write_result(result: Result) -> None:
        if jax.process_index() != 0:
            return
        if keep_state and folder is not None:
            checkpoints.save_final_state(group_state, 0, build_state_path(folder, result.digest()))
        result_writer = ResultWriter(folder, save_run_files)
        result_writer.write(result)
        result_writer.require_all_written(result)
        if (
            group_state.early_stops and group_state.early_stops[0].cause == CALLBACK
        ):  # not by its settings: it may go on
            checkpoints.save(group_state, force=True)
        elif folder is not None:
            delete_checkpoint(folder)

    return Session(group_state, checkpoints, record, callbacks, write_result)


def require_output_dir_to_resume(folder: str | Path | None, **resume_options: bool) -> None:
    """ConfigError for a run that is kept nowhere and is to go on, as an argument asks."""
    for name, value in resume_options.items():
        expected = f"an {display_name('output_dir')}, where checkpoints are kept"
        require(not value or folder is not None, name, value, expected)
