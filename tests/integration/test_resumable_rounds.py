"""Long rounds in several calls: bits, progress, resuming within a round, and the loops."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.data import make_user_dataset
from support.markers import method_cases, slow_case
from support.small_runs import (
    KilledError,
    assert_all_equal,
    assert_results_equal,
    make_killing_callback,
    make_spec,
    run_spec,
    run_sweep,
)

from fedjax_het import Placement
from fedjax_het.algorithms import METHODS
from fedjax_het.core.resumable_loops import WHOLE_LOOPS, ResumableLoopRunner
from fedjax_het.runtime import checkpointing, resumable_rounds, runner
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.checkpointing import CheckpointWriter, read_checkpoint_record
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.group_init import init_group
from fedjax_het.runtime.signature import flops_per_sample

EVERYTHING = 1e9  # seconds: of a call that goes to the end of its loop
ROUNDING = {"rtol": 2e-5, "atol": 1e-6}  # of two programs


@pytest.fixture
def long(monkeypatch):
    """Every round counts as long; -> sets after how many seconds one is cut, 0: after a step."""
    monkeypatch.setitem(resumable_rounds.LONG_FLOPS, "cpu", 0)

    def cut_after(seconds):
        monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", seconds)

    cut_after(0.0)
    return cut_after


def short(monkeypatch):
    monkeypatch.setitem(resumable_rounds.LONG_FLOPS, "cpu", 2e12)


def small(name, **settings):
    return make_spec(name, **{"rounds": 3, **settings})


PLACES = {
    "default": {},
    "vmapped lanes": {"lanes": 3},
    "blocks in turn": {"devices": 1, "blocks": 2},
    "one device": {"devices": 1},
    "shared server": {"server_work": "shared"},
    "states on the host": {"client_state": "host"},
}
CASES = [
    *method_cases(METHODS, "default", quick=()),
    *(
        slow_case("scaffold", place)
        for place in ("vmapped lanes", "blocks in turn", "states on the host")
    ),
    *(slow_case("fedaf", p) for p in ("vmapped lanes", "blocks in turn", "shared server")),
    *(slow_case(name, "shared server") for name in ("fsl", "fedbe", "fedgen", "ccvr", "fedftg")),
    *(slow_case("fedavg_ft", place) for place in ("vmapped lanes", "blocks in turn")),
    slow_case("dynafed", "one device"),
]


@pytest.mark.parametrize(("name", "place"), CASES)
def test_cuts_of_a_round_change_no_bit(name, place, long, monkeypatch):
    by_step = run_spec(small(name), **PLACES[place])
    long(EVERYTHING)
    assert_results_equal(by_step, run_spec(small(name), **PLACES[place]))
    short(monkeypatch)
    assert_results_equal(by_step, run_spec(small(name), **PLACES[place]), **ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2])
def test_cuts_change_no_bit_of_runs_in_step(width, long, monkeypatch):
    number = width * len(jax.devices()) + 1  # a slot is idle in the end
    more = {"partition": "dirichlet", "alpha": 0.7}
    specs = [small("scaffold", seed=seed, **more) for seed in range(number)]
    by_step = run_sweep(specs, spread="runs", width=width).results
    long(EVERYTHING)
    assert_all_equal(by_step, run_sweep(specs, spread="runs", width=width).results)
    short(monkeypatch)
    whole = run_sweep(specs, spread="runs", width=width).results
    assert_all_equal(by_step, whole, **ROUNDING)


STOPPED = [
    ("scaffold", {}, {}),
    slow_case("fedaf", {}, {}),  # in its soft labels, among its clients, at its server
    slow_case("fsl", {}, {}),
    slow_case("fedavg_ft", {}, {}),
    slow_case("fedbe", {}, {}),
    slow_case("dynafed", {}, {}),
    slow_case("scaffold", {"client_state": "host"}, {}),
    slow_case("scaffold", {}, {"client_state": "host"}),
    slow_case("fedaf", {"blocks": 2}, {"devices": 1}),
]


@pytest.mark.parametrize(("name", "before", "after"), STOPPED)
def test_run_resumes_within_a_round(name, before, after, long, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 0.0)
    calls = []
    whole = run_spec(small(name), blocks=before.get("blocks"), progress=calls.append)
    places = set()
    for stop in np.linspace(1, len(calls) - 2, 3).astype(int):
        folder = tmp_path / str(stop)
        with pytest.raises(KilledError):
            run_spec(small(name), output_dir=folder, progress=make_killing_callback(stop), **before)
        within = read_checkpoint_record(folder / "checkpoint.npz")["within"]
        places.add(within and (len(within["totals"]), sum(within["done"])))
        if within and name == "scaffold":  # rounds may no longer be long
            with monkeypatch.context() as patch:
                short(patch)
                copy = shutil.copytree(folder, tmp_path / f"copy{stop}")
                assert_results_equal(run_spec(small(name), output_dir=copy, resume=True), whole)
        assert_results_equal(run_spec(small(name), output_dir=folder, resume=True, **after), whole)
    assert len(places - {None}) >= 2, "most stops are to be within a round"


@pytest.mark.slow
def test_sweep_resumes_runs_at_different_loops(long, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 0.0)
    specs = [small("scaffold", seed=seed) for seed in range(2)]
    whole = run_sweep(specs).results
    real, calls = CheckpointWriter.save, []

    def save(self, runs):
        real(self, runs)
        calls.append(runs)
        if len(calls) == 2:
            raise KilledError

    monkeypatch.setattr(CheckpointWriter, "save", save)
    for one in specs:  # each is stopped by itself
        calls[:] = [None] * one.seed
        with pytest.raises(KilledError):
            run_sweep([one], tmp_path)
    monkeypatch.setattr(CheckpointWriter, "save", real)
    stands = [read_checkpoint_record(path) for path in tmp_path.glob("unfinished/*/checkpoint.npz")]
    assert len({str(record["within"]) for record in stands}) == 2
    assert_all_equal(run_sweep(specs, tmp_path).results, whole)


@pytest.mark.slow
def test_progress_reports_the_loops_of_a_round(long):
    seen = []
    # All take part: else the rounds differ in steps where clients share a device.
    run_spec(small("fedaf", rounds=2, participation=1.0), progress=seen.append)
    names = [progress.phase for progress in seen]
    first = names[: names.index("rounds")]
    assert list(dict.fromkeys(first)) == ["soft labels", "clients", "server"]
    assert first == names[len(first) + 1 : -1], "both rounds go through the same"
    for name in dict.fromkeys(first):
        (total,) = {progress.total for progress in seen if progress.phase == name}
        done = [progress.done for progress in seen[: len(first)] if progress.phase == name]
        ends = total + 1 if name != "server" else total  # the last call ends the round
        assert done == list(range(1, ends))
    at = seen[1]
    assert at.rate > 0 and at.seconds_to_go == pytest.approx((at.total - at.done) / at.rate)


@pytest.mark.parametrize(
    "name", ["scaffold", slow_case("fedaf"), slow_case("fsl"), slow_case("fedavg_ft")]
)
def test_parts_have_the_collectives_of_a_round(name, long, monkeypatch):
    """XLA must not add collectives of its own, two of which may wait for each other for ever."""
    user_objects, placement = UserObjects(make_user_dataset()), Placement(server_work="shared")
    group = prepare_group([small(name)], user_objects, placement)
    runs = init_group(group, group.prepared_runs)
    runner.init_states(runs)
    cut_, state, inputs = runs.loop_layout, runs.state, runs.build_chunk_inputs(0, 1)
    chunk, stretch = group.program.chunk.program, group.program.partial_round.program
    whole = collectives(chunk.lower(state, inputs))
    part = collectives(stretch.lower(state, inputs, cut_.build_spans(1), cut_.init_carry()))
    assert part == whole and whole


def collectives(lowered):
    text = lowered.compile().as_text()
    kinds = "all-reduce|all-gather|all-to-all|collective-permute"
    return sorted(re.findall(rf" ({kinds})[.\w-]*\(", text))


def test_long_rounds_are_found_by_their_operations(monkeypatch):
    """The operations are of the samples of six clients and of the server, on any devices."""

    def work(**settings):
        settings = {"gradient_gaps": None, "participation": 1.0, **settings}
        one = small("fsl", **settings)
        group = prepare_group([one], UserObjects(make_user_dataset()), placement=Placement(lanes=1))
        runs = init_group(group, group.prepared_runs)
        long = runs.loop_layout is not None
        (samples,) = group.program.samples_per_round.values()
        flops = samples * flops_per_sample(group.program.signature)
        clients = int(group.prepared_runs[0].scheduler.work_counts.samples[0])
        return samples, flops, clients, long

    samples, flops, clients, long = work()
    assert not long
    server = clients / 6
    assert clients + server <= samples <= 4 * (clients + server), "padding, and sizes rounded up"
    assert not work()[3]
    for most, is_long in ((flops - 1, True), (flops, False)):
        monkeypatch.setitem(resumable_rounds.LONG_FLOPS, "cpu", most)
        assert work()[1:] == (flops, clients, is_long)
    longer = work(local_epochs=40)
    assert longer[0] > 1.5 * samples and longer[3]


def test_loop_is_cut_anywhere():
    """1 + 2 + ... + n, and its n-th power: the order of the steps shows."""

    def step(i, carried):
        total, product = carried
        return total + i + 1, (2 * product + i) % 1009

    def run(loops, n):
        return loops.run("sum", n, step, (jnp.int32(0), jnp.int32(1)))

    def part(spans, arguments):
        loops = ResumableLoopRunner(jnp.asarray(spans, jnp.int32), arguments)
        first, second = run(loops, 5), run(loops, 9)
        return (first, second), loops.trace, loops.has_finished_loops()

    plain = run(WHOLE_LOOPS, 5), run(WHOLE_LOOPS, 9)
    carried = [(jnp.int32(7), jnp.int32(7))] * 2  # of no use before the first call
    for spans in ([[0, 2], [0, 0]], [[2, 6], [0, 0]], [[5, 5], [0, 3]], [[5, 5], [3, 8]]):
        _, actual, done = part(spans, carried)
        assert not done
        assert [int(total) for total in actual.totals] == [5, 9]
        carried = actual.carries
    ended, _, done = part([[5, 5], [8, 99]], carried)
    assert done and jax.tree.map(int, ended) == jax.tree.map(int, plain)
    assert int(ended[0][0]) == 15 and int(ended[1][0]) == 45


def test_plain_runner_executes_whole_loops():
    seen = []

    def go(first, last, carried):
        seen.append((first, last))
        return carried + last

    assert WHOLE_LOOPS.run_split("all", 4, go, 1) == 5 and seen == [(0, 4)]
    assert WHOLE_LOOPS.has_finished_loops() is True
