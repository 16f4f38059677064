"""Loops over rounds that a signal or an error interrupts at any instruction, and that continue."""

import collections
import signal
import subprocess
import sys
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.data import make_user_dataset
from support.interrupts import InstructionTracer, raise_error, send_signal
from support.markers import slow_case
from support.small_runs import OWN_METHOD_RUN, assert_results_equal, make_spec, with_placement

from fedjax_het import Result, RunSpec, federation, register_method, simulate, sweep
from fedjax_het.algorithms.base import ServerStage
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.server_step import with_server_step
from fedjax_het.runtime import checkpointing, long_phases, resumable_rounds, runner
from fedjax_het.runtime.callbacks import CallbackRunner
from fedjax_het.utils.arrays import to_numpy_bits
from fedjax_het.utils.errors import ConfigError

STOP_ROUND = 3


@dataclass(frozen=True)
class Case:
    """A run whose loop is interrupted."""

    method: str
    settings: dict[str, str | int] = field(default_factory=dict)
    is_long: bool = False  # rounds are split into parts
    has_folder: bool = False  # checkpoints and a result are written
    stops: bool = False  # a callback ends the run

    def __str__(self):
        places = [str(value) for value in self.settings.values()]
        names = ("is_long", "has_folder", "stops")
        flags = [name for name in names if getattr(self, name)]
        return "-".join([self.method, *places, *flags])


HOST = {"client_state": "host"}
FIRST_CASES = [Case("scaffold", HOST, has_folder=True), Case("dynafed")]
QUICK_CASES = [FIRST_CASES[0], slow_case(FIRST_CASES[1])]
SLOW_CASES = [
    Case("fedavg", has_folder=True, stops=True),
    Case("scaffold", HOST, is_long=True),
    Case("fsl", stops=True),
]
LONG_CASES = [
    Case("fedaf", is_long=True, has_folder=True),
    Case("scaffold", has_folder=True),
    Case("scaffold", is_long=True, stops=True),
    Case("dynafed", {"devices": 1}, has_folder=True),
    Case("fedaf"),
    Case("fedgen"),
    Case("fedavg_ft", is_long=True),
    Case("fedamp"),
    Case("feddyn", HOST),
]


class Loop:
    """A run of a case as a loop, with the calls of its callback."""

    def __init__(self, case, folder, *, resume=False):
        self.calls = []
        spec = make_spec(case.method, rounds=5 if case.method == "dynafed" else 4)
        self.session = federation(
            spec,
            dataset=make_user_dataset(),
            output_dir=folder if case.has_folder else None,
            resume=resume,
            callbacks=[self._stop if case.stops else self._record],
            track=["csv"] if case.has_folder else [],
            **with_placement(case.settings),
        )

    def _record(self, status):
        self.calls.append((status.phase, status.done))

    def _stop(self, status):
        self._record(status)
        if status.phase == "rounds" and status.done == STOP_ROUND:
            status.stop("a test")

    def run(self):
        for _ in self.session.rounds(every=1):
            pass
        return self.session.result()


@pytest.fixture
def run_case(monkeypatch, tmp_path):
    """Return a function that interrupts a case at some instructions; it returns the outcomes."""
    monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0)
    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 0.0)

    def run(case, interrupt, num_positions, rng):
        long_flops = 0 if case.is_long else 2e12
        monkeypatch.setitem(resumable_rounds.LONG_FLOPS, "cpu", long_flops)
        whole = Loop(case, tmp_path / "whole")
        expected = whole.run()
        loop = Loop(case, tmp_path / "counted")
        with InstructionTracer(interrupt=interrupt) as counter:
            loop.run()
        outcomes = collections.Counter()
        for position in sorted(rng.integers(1, counter.count + 1, num_positions)):
            folder = tmp_path / str(position)
            outcome = interrupt_loop(case, folder, position, interrupt, whole.calls, expected)
            outcomes[outcome] += 1
        return outcomes

    return run


def interrupt_loop(case, folder, position, interrupt, calls, expected):
    """Interrupt a loop, continue in one of three ways, and compare; return the outcome."""
    loop = Loop(case, folder)
    try:
        with InstructionTracer(position, interrupt) as tracer:
            loop.run()
        outcome = "no interrupt"
    except KeyboardInterrupt:
        outcome = "interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, tracer.place
    ways = ["rounds", "result"]
    if case.has_folder and not case.stops:  # a resumed run continues after the stop of a callback
        ways.append("resume")
    way, early = ways[position % len(ways)], None
    try:
        if way == "result" and loop.calls:
            early = loop.session.result()
            early_leaves = [leaf.copy() for leaf in list_state_leaves(early)]
        if way == "resume":
            loop = Loop(case, folder, resume=True)
        result = loop.run()
        assert way == "resume" or set(calls) <= set(loop.calls), f"callbacks after {tracer.place}"
        assert_bits_equal(result, expected, tracer.place)
        if early is not None:  # the loop that continues does not change this result
            assert_starts_equal(early, expected, tracer.place)
            for a, b in zip(list_state_leaves(early), early_leaves, strict=True):
                np.testing.assert_array_equal(a, b)
        if case.has_folder:
            (path,) = folder.glob("*.json")
            assert_results_equal(Result.load(path), expected)
            assert read_tracked_rounds(folder) == [*range(1, expected.summary["rounds"] + 1)]
    except ConfigError as error:
        assert interrupt is raise_error and "cannot continue" in str(error), tracer.place
        return "refused"
    return outcome


def read_tracked_rounds(folder):
    (path,) = (folder / "csv").glob("*.csv")
    return [int(line.split(",")[0]) for line in path.read_text().splitlines()[1:]]


def assert_bits_equal(result, expected, place):
    try:
        assert_results_equal(result, expected)
        assert result.rounds == expected.rounds
        for a, b in zip(list_state_leaves(result), list_state_leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)
    except AssertionError as error:
        raise AssertionError(f"interrupted at {place}: {error}") from None


def assert_starts_equal(result, expected, place):
    """The result of a loop that was left has the first rounds of the whole run, and no others."""
    rounds = result.summary["rounds"]
    for name, curve in expected.metrics.items():
        if result.metrics[name].ndim and name in result.metrics:
            actual = result.metrics[name]
            np.testing.assert_array_equal(actual[:rounds], curve[:rounds], f"{name} at {place}")
            rest = actual[rounds:]
            assert not np.any(rest[np.isfinite(rest)]), f"{name} after the end at {place}"


def list_state_leaves(result):
    clients = result.state.clients
    clients = getattr(clients, "rows", clients)
    return [to_numpy_bits(a) for a in jax.tree.leaves(result.state._replace(clients=clients))]


@pytest.mark.parametrize("case", QUICK_CASES, ids=str)
def test_signal_at_any_instruction(case, run_case):
    outcomes = run_case(case, send_signal, 8, np.random.default_rng(0))
    assert outcomes["interrupted"] >= 6


@pytest.mark.parametrize("last_round", [4, 2])
def test_result_calls_callbacks_that_a_signal_prevented(last_round, monkeypatch, tmp_path):
    """Also for rounds that have ended when the caller asks for the result and then continues."""
    whole = Loop(Case("fedavg"), tmp_path)
    whole.run()
    build_status = CallbackRunner._build_status

    def interrupt(self, i, phase, result=None):
        if phase == "rounds" and self._group_state.rounds_done == last_round:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return build_status(self, i, phase, result)

    monkeypatch.setattr(CallbackRunner, "_build_status", interrupt)
    loop = Loop(Case("fedavg"), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert loop.session.result().rounds == last_round
    assert loop.calls[-2:] == [("rounds", last_round), ("end", last_round)]
    loop.run()
    assert set(whole.calls) <= set(loop.calls) and loop.calls.count(("rounds", last_round)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES, ids=str)
@pytest.mark.parametrize("interrupt", [send_signal, raise_error])
def test_interrupts_by_method(interrupt, case, run_case):
    outcomes = run_case(case, interrupt, 5, np.random.default_rng(1))
    assert not outcomes["refused"] or interrupt is raise_error


@pytest.mark.long
@pytest.mark.parametrize("case", [*FIRST_CASES, *SLOW_CASES, *LONG_CASES], ids=str)
@pytest.mark.parametrize("interrupt", [send_signal, raise_error])
def test_interrupts_at_full_length(interrupt, case, run_case):
    outcomes = run_case(case, interrupt, 20, np.random.default_rng(2))
    print(f"{case}, {interrupt.__name__}: {dict(outcomes)}")
    assert outcomes["interrupted"] + outcomes["refused"] >= 18


def test_error_between_call_and_record(monkeypatch):
    """The program has taken the old state's buffers, and the new state is not recorded."""
    loop = Loop(Case("scaffold"), None)
    rounds = loop.session.rounds(every=1)
    assert next(rounds).done == 1
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(runner, "finish_rounds", lambda *args: {}["lost"])
        next(rounds)
    for continue_run in (lambda: next(loop.session.rounds()), loop.session.result):
        with pytest.raises(ConfigError, match=r"^rounds: the run cannot continue after round 1"):
            continue_run()


@pytest.mark.parametrize(
    ("case", "module", "name"),
    [
        (Case("scaffold", HOST), runner, "finish_rounds"),
        slow_case(Case("scaffold", is_long=True), long_phases, "finish_rounds"),
        slow_case(Case("dynafed"), long_phases, "_find_diverged"),
    ],
    ids=str,
)
def test_signal_between_call_and_record(case, module, name, monkeypatch):
    monkeypatch.setattr(long_phases, "CHUNK_SECONDS", 0.0)
    monkeypatch.setitem(resumable_rounds.LONG_FLOPS, "cpu", 0 if case.is_long else 2e12)
    expected, loop, function = Loop(case, None).run(), Loop(case, None), getattr(module, name)

    def send_signal_first(*args):
        signal.raise_signal(signal.SIGINT)
        return function(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, name, send_signal_first)
        loop.run()
    assert_bits_equal(loop.run(), expected, name)


ITERATOR_CASES = [
    pytest.param(Case("dynafed"), marks=pytest.mark.slow),
    Case("scaffold", HOST),
]


@pytest.mark.parametrize("case", ITERATOR_CASES, ids=str)
def test_iterators_take_turns(case, monkeypatch):
    monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0)
    expected, loop = Loop(case, None).run(), Loop(case, None)
    iterators = [loop.session.rounds(every=1) for _ in range(2)]
    while iterators:
        iterators = [iterator for iterator in iterators if next(iterator, None) is not None]
    assert_bits_equal(loop.session.result(), expected, "each call")


@pytest.mark.parametrize("case", QUICK_CASES, ids=str)
def test_result_within_loop(case, monkeypatch, tmp_path):
    monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0)
    expected, loop = Loop(case, tmp_path / "whole").run(), Loop(case, tmp_path / "loop")
    results = [(s.done, loop.session.result()) for s in loop.session.rounds(every=1)]
    for done, result in results:
        assert result.summary["rounds"] == done
        assert result.is_partial == (done < expected.spec.rounds)
        assert_starts_equal(result, expected, done)
    assert_bits_equal(loop.session.result(), expected, "each call")
    if case.has_folder:
        assert not list((tmp_path / "loop").glob("*.partial.*"))
        assert read_tracked_rounds(tmp_path / "loop") == [1, 2, 3, 4]


def interrupt_at(round, number):
    """Return a callback that sends a signal after a round."""

    def callback(status):
        if status.phase == "rounds" and status.done >= round:
            signal.raise_signal(number)

    return callback


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_writes_checkpoint(number, tmp_path):
    spec, data = make_spec(rounds=4), make_user_dataset()
    settings = {"dataset": data, "output_dir": tmp_path}
    before = signal.getsignal(number)
    with pytest.raises((KeyboardInterrupt, SystemExit)) as error:
        simulate(spec, callbacks=[interrupt_at(1, number)], **settings)
    assert signal.getsignal(number) == before
    note = error.value.__notes__[0]
    record = checkpointing.find_checkpoint_record(tmp_path, spec.resolved())
    assert note == f"the next run continues after round {record['round']} of 4"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.npz"]
    assert_results_equal(simulate(spec, resume=True, **settings), simulate(spec, dataset=data))


def test_second_signal_ends_the_write(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointing, "save_checkpoint", lambda *args: send_signal())
    settings = {"dataset": make_user_dataset(), "callbacks": [interrupt_at(1, signal.SIGINT)]}
    with pytest.raises(KeyboardInterrupt) as error:
        simulate(make_spec(rounds=4), output_dir=tmp_path, **settings)
    assert error.value.__notes__[0] == checkpointing.NOTHING_SAVED
    assert not list(tmp_path.iterdir())


def test_signal_writes_checkpoints_of_sweep(tmp_path):
    specs = [make_spec(rounds=4, seed=seed) for seed in (0, 1)]
    data = make_user_dataset()
    with pytest.raises(KeyboardInterrupt) as error:
        callbacks = [interrupt_at(1, signal.SIGINT)]
        sweep(specs, tmp_path, dataset=data, callbacks=callbacks, progress=None)
    (note,) = error.value.__notes__
    assert note.startswith("the next run continues after round ")
    assert len(list(tmp_path.glob("unfinished/*/checkpoint.npz"))) == 2


def test_run_of_another_process_is_refused(tmp_path, caplog):
    settings = {"dataset": make_user_dataset(), "output_dir": tmp_path}
    result = simulate(make_spec(rounds=1), **settings)
    path = tmp_path / f".{result.digest()}.lock"
    assert not path.exists()
    text = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX)"
    text += "; f.write('host, process 7'); f.flush(); print('locked', flush=True); input()"
    command = [sys.executable, "-c", text, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.readline()
        with pytest.raises(ConfigError, match=r"another process \(host, process 7\) executes it"):
            simulate(make_spec(rounds=1), **settings)
        process.kill()
    assert not caplog.records
    simulate(make_spec(rounds=1), **settings)  # the system has released the lock
    (record,) = caplog.records
    assert "is the result of this run: the run is repeated" in record.getMessage()
    simulate(make_spec(rounds=1), resume=True, **settings)
    assert len(caplog.records) == 1 and not path.exists()


def build_flickering(training, plan):
    """FedAvg with a server stage whose number is NaN before, and in the second iteration."""
    algorithm = with_server_step(
        fedavg(training, plan),
        lambda hp, step_state, context: (context.variables_after, step_state),
        init_step_state=lambda hp, key, variables: (jnp.int32(0), jnp.float32(jnp.nan)),
    )

    def advance(hp, state, key, num_iterations, server_examples):
        done = state.server.step_state[0] + num_iterations
        number = jnp.where(done % 2 == 0, jnp.nan, 1.0).astype(jnp.float32)
        return state._replace(server=state.server._replace(step_state=(done, number)))

    stage = ServerStage("flicker", (1,), 3, lambda state: int(state.server.step_state[0]), advance)
    return algorithm._replace(server_stages=(stage,))


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_divergence_in_an_interrupted_server_stage(is_interrupted, monkeypatch):
    monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0)
    register_method("flickering", build_flickering)
    session = federation(RunSpec("flickering", **OWN_METHOD_RUN), dataset=make_user_dataset())
    for status in session.rounds():
        if is_interrupted and status.phase == "flicker":
            break
    for _ in session.rounds():
        pass
    result = session.result()
    assert result.diverged and result.summary["rounds"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [slow_case(Case("dynafed")), Case("scaffold", is_long=True)], ids=str
)
def test_error_of_progress_function(case, monkeypatch):
    """A loop continues after an error of the user's function between parts of a phase."""
    monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0)
    monkeypatch.setitem(resumable_rounds.LONG_FLOPS, "cpu", 0 if case.is_long else 2e12)
    expected, loop, phases = Loop(case, None).run(), Loop(case, None), set()

    def fail_once_per_phase(progress):
        if progress.phase not in phases:
            phases.add(progress.phase)
            raise KeyError(progress.phase)

    loop.session._progress = fail_once_per_phase
    result, num_errors = None, 0
    while result is None:
        try:
            result = loop.run()
        except KeyError:
            num_errors += 1
    assert num_errors == len(phases) > 1
    assert_bits_equal(result, expected, phases)
