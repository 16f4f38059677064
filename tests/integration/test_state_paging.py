"""Client states on the host: the same bits as on the devices, in less memory."""

import contextlib
import re

import jax
import numpy as np
import pytest
from support.data import make_user_dataset
from support.markers import slow_case
from support.small_runs import (
    KilledError,
    assert_results_equal,
    make_killing_callback,
    make_spec,
    run_spec,
    with_placement,
)

from fedjax_het import ConfigError, Placement, cli, sweep
from fedjax_het.algorithms import METHODS
from fedjax_het.core.state_paging import HostClientStates
from fedjax_het.runtime import checkpointing, group_state, placement, sweep_log
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.checkpointing import CheckpointWriter, read_checkpoint_record
from fedjax_het.runtime.compiled_programs import compute_client_state_bytes
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.group_state import init_group, measure_required_memory
from fedjax_het.runtime.placement import choose_client_state
from fedjax_het.runtime.runner import finish_runs, start_runs

CLIENTS = 12


def stateful(algorithm="scaffold", **settings):
    """Three of twelve clients a round; Adam's moments are kept."""
    return make_spec(algorithm, **{"num_clients": CLIENTS, "participation": 0.25, **settings})


@pytest.fixture
def short(monkeypatch):
    """Chunks of two rounds: so few clients have rows."""
    monkeypatch.setattr(group_state, "MAX_ROUNDS_PER_CHUNK", 2)


def all_clients(made):
    """Every client's state, wherever it is: `[K, ...]`."""
    clients = made.state.clients
    if not isinstance(clients, HostClientStates):
        return jax.tree.map(np.asarray, clients)
    return jax.tree.map(lambda *rows: np.stack(rows), *map(clients.get_client, range(CLIENTS)))


def assert_same_run(host, device):
    assert_results_equal(host, device)
    assert isinstance(host.state.clients, HostClientStates)
    assert not isinstance(device.state.clients, HostClientStates)
    jax.tree.map(np.testing.assert_array_equal, host.state.server, device.state.server)
    jax.tree.map(np.testing.assert_array_equal, all_clients(host), all_clients(device))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lanes"), [("scaffold", 1), ("scaffold", 2), ("fedavg", 1)])
def test_a_run_is_the_same_bits(name, lanes, short):
    one = stateful(name)
    host, device = (run_spec(one, client_state=where, lanes=lanes) for where in ("host", "device"))
    assert_same_run(host, device)
    moved = [len(np.unique(leaf, axis=0)) for leaf in jax.tree.leaves(all_clients(host))]
    assert max(moved) > 6, "clients of several chunks must have states of their own"


def test_the_devices_hold_no_more_than_the_clients_of_a_chunk(short):
    one = stateful("fedavg")
    group = prepare_group(
        [one], UserObjects(make_user_dataset()), placement=Placement(client_state="host")
    )
    made = init_group(group, group.prepared_runs)
    start_runs(made, CheckpointWriter())
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(made.state.clients)}
    assert rows == {made.limits.num_rows} == {6}
    device = prepare_group(
        [one], UserObjects(make_user_dataset()), placement=Placement(client_state="device")
    )
    row = compute_client_state_bytes(group.program, group.prepared_runs[0].spec)
    everyones = init_group(device, device.prepared_runs)
    assert measure_required_memory(everyones) - measure_required_memory(made) >= 6 * row


def test_a_table_too_large_makes_chunks_shorter(monkeypatch):
    group = prepare_group(
        [stateful()], UserObjects(make_user_dataset()), placement=Placement(client_state="host")
    )
    row = compute_client_state_bytes(group.program, group.prepared_runs[0].spec)
    model = 4 * sum(a * b + b for a, b in ((4, 128), (128, 128), (128, 3)))
    assert row == 3 * model + 4, "a control, Adam's two moments, and its count"
    for rounds, limit in ((1, 0), (1, 6 * row - 1), (2, 6 * row), (3, 9 * row)):
        monkeypatch.setattr(group_state, "MAX_CLIENT_TABLE_BYTES", limit)
        assert init_group(group, group.prepared_runs).limits[:2] == (rounds, 3 * rounds)


def test_the_programs_of_a_run_on_the_host_compile_once(short, no_program_eviction):
    one = stateful(local_epochs=3, rounds=5)  # no other test's program
    group = prepare_group(
        [one], UserObjects(make_user_dataset()), placement=Placement(client_state="host")
    )
    made = init_group(group, group.prepared_runs)
    start_runs(made, CheckpointWriter())
    finish_runs(made, CheckpointWriter())
    assert group.program.chunk.program._cache_size() == 1


@pytest.mark.slow
def test_vmapped_federations_are_the_same_bits(short):
    more = {"partition": "dirichlet", "alpha": 0.7, "rounds": 5}
    specs = [stateful("fedavg", seed=s, **more) for s in range(2 * len(jax.devices()) + 1)]
    settings = {"dataset": make_user_dataset(), "progress": lambda line: None}
    settings |= {"spread": "runs", "width": 2}
    host, device = (
        sweep(specs, **with_placement(settings | {"client_state": where})).results
        for where in ("host", "device")
    )
    for one, other in zip(host, device, strict=True):
        assert_results_equal(one, other)


RESUMED = [
    ("scaffold", "host", "host"),
    ("scaffold", "host", "device"),
    ("scaffold", "device", "host"),
    slow_case("scaffold", "device", "split"),
    slow_case("scaffold", "split", "host"),
    slow_case("dynafed", "split", "split"),
    slow_case("dynafed", "host", "host"),  # killed in its synthesis
]


@pytest.mark.parametrize(("name", "before", "after"), RESUMED)
def test_a_killed_run_resumes_to_the_same_bits(name, before, after, tmp_path, short, monkeypatch):
    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(
        "fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0
    )  # one round or iteration at a time
    whole = run_spec(stateful(name), client_state="device")
    with pytest.raises(KilledError):
        run_spec(
            stateful(name),
            output_dir=tmp_path,
            client_state=before,
            progress=make_killing_callback(5),
        )
    resumed = run_spec(stateful(name), output_dir=tmp_path, resume=True, client_state=after)
    assert_results_equal(resumed, whole)
    jax.tree.map(np.testing.assert_array_equal, all_clients(resumed), all_clients(whole))


@pytest.mark.slow
def test_a_killed_sweep_goes_on_to_the_bits_of_states_on_the_devices(tmp_path, short, monkeypatch):
    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 0.0)
    specs = [stateful(seed=s) for s in range(len(jax.devices()))]
    settings = {"dataset": make_user_dataset(), "progress": lambda line: None}
    settings |= {"spread": "runs"}
    whole = sweep(specs, **with_placement(settings | {"client_state": "device"})).results
    show = make_killing_callback(3)
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(sweep_log, "show_progress", lambda *a, **k: contextlib.nullcontext(show))
        sweep(specs, tmp_path, **with_placement(settings | {"client_state": "host"}))
    assert len(list((tmp_path / "unfinished").iterdir())) == len(specs)
    made = sweep(specs, tmp_path, **with_placement(settings | {"client_state": "host"})).results
    for one, other in zip(made, whole, strict=True):
        assert one.summary["client_state"] == "host"
        assert_results_equal(one, other)


def test_a_checkpoint_holds_the_clients_that_trained_and_no_other(tmp_path, short, monkeypatch):
    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0)
    with pytest.raises(KilledError):
        run_spec(
            stateful(), output_dir=tmp_path, client_state="host", progress=make_killing_callback(2)
        )
    path = tmp_path / "checkpoint.npz"
    rounds = read_checkpoint_record(path)["round"]
    group = prepare_group([stateful()], UserObjects(make_user_dataset()))
    scheduler = group.prepared_runs[0].scheduler
    trained = np.unique(np.concatenate([scheduler.draw_cohort(r) for r in range(rounds)]))
    assert 0 < len(trained) < CLIENTS
    with np.load(path) as data:
        assert any(
            data[name].dtype == np.int64 and np.array_equal(np.sort(data[name]), trained)
            for name in data.files
        )
        lengths = {data[name].shape[0] for name in data.files if ".clients" in name}
        assert lengths == {len(trained)}


def test_rows_that_were_never_written_are_the_first_row():
    state = HostClientStates({"w": np.full(2, 5.0)}, 6)
    state.scatter_states(np.array([4, 1]), {"w": np.array([[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]])})
    out = {"w": np.empty((4, 2))}
    state.gather_states(np.array([1, 2, 4]), out)
    np.testing.assert_array_equal(out["w"], [[3, 4], [5, 5], [1, 2], [5, 5]])
    state.gather_states(np.array([4, 1]), out)
    np.testing.assert_array_equal(out["w"], [[1, 2], [3, 4], [5, 5], [5, 5]])
    np.testing.assert_array_equal(state.written_client_ids, [4, 1])
    np.testing.assert_array_equal(state.rows["w"], [[1, 2], [3, 4]])
    state.scatter_states(np.array([1, 3]), {"w": np.array([[0.0, 1.0], [6.0, 7.0]])})
    np.testing.assert_array_equal(state.rows["w"], [[1, 2], [0, 1], [6, 7]])
    np.testing.assert_array_equal(state.get_client(3)["w"], [6, 7])
    np.testing.assert_array_equal(state.get_client(0)["w"], [5, 5])
    np.testing.assert_array_equal(state.get_client(4)["w"], [1, 2])


@pytest.mark.slow
def test_saving_takes_no_more_than_its_share_of_the_time(tmp_path, monkeypatch):
    group = prepare_group([stateful()], UserObjects(make_user_dataset()))
    made, files = init_group(group, group.prepared_runs), CheckpointWriter([tmp_path])
    start_runs(made, files)
    now, saved = [files._saved_at], []

    def slow_save(path, tree, meta):
        saved.append(now[0])
        now[0] += 30.0

    monkeypatch.setattr(checkpointing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(checkpointing, "save_checkpoint", slow_save)
    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 20.0)
    begin = now[0]
    for _ in range(400):
        now[0] += 1.0
        files.save(made)
    assert [t - begin for t in saved] == [20.0, 350.0]  # 300 s after the first was written


# --- where they are --------------------------------------------------------------------------


def where(one, **settings):
    return prepare_group(
        [one], UserObjects(make_user_dataset()), placement=Placement(**settings)
    ).client_state


def test_auto_asks_how_much_memory_there_is(monkeypatch):
    model = 4 * sum(a * b + b for a, b in ((4, 128), (128, 128), (128, 3)))
    needed = CLIENTS * (3 * model + 4)
    assert where(stateful(), memory=8 * needed) == "device"
    assert where(stateful(), memory=8 * needed - 1) == "host"
    assert where(stateful()) == "device"
    monkeypatch.setattr(placement, "usable_free_bytes", lambda devices: 8 * needed - 1)
    assert where(stateful()) == "host"
    assert where(stateful(), client_state="device") == "device"
    monkeypatch.setattr(placement, "usable_free_bytes", lambda devices: None)
    assert where(stateful()) == "device"


def test_auto_counts_the_federations_of_a_device():
    devices = len(jax.devices())
    specs = [stateful(seed=s) for s in range(2 * devices)]
    memory = 12 * CLIENTS * 3 * 70_000

    def where_of(width):
        placement = Placement(spread="runs", memory=memory, width=width)
        return prepare_group(
            specs, UserObjects(make_user_dataset()), placement=placement
        ).client_state

    found = {width: where_of(width) for width in (1, 2)}
    assert found == {1: "device", 2: "host"}


def test_auto_leaves_on_the_devices_what_would_not_gain():
    little = 4 * CLIENTS * 3 * 70_000  # an eighth of it is less than the states
    assert where(stateful(), memory=little) == "host"
    assert where(stateful(participation=1.0), memory=little) == "device"
    assert where(stateful(local_optimizer="sgd", algorithm="fedprox"), memory=little) == "device"
    assert where(stateful("fedamp"), memory=little) == "device"


def test_a_method_without_state_has_nothing_to_put_anywhere():
    plain = stateful("fedavg", local_optimizer="sgd")
    assert where(plain, client_state="host") == "device"


ALL_AT_ONCE = ("separate", "fedamp", "heurfedamp", "apfl", "ditto", "pfedme", "feddm", "fedaf")


@pytest.mark.parametrize("name", ALL_AT_ONCE)
def test_methods_that_need_all_states_at_once_say_so(name):
    told = rf"client_state = 'host': expected 'device'.*: {name} needs"
    with pytest.raises(ConfigError, match=told):
        run_spec(stateful(name), client_state="host")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(METHODS) - {*ALL_AT_ONCE, "scaffold", "fedavg"}))
def test_every_other_method_is_the_same_bits(name, short):
    kept = stateful(name, local_optimizer="adam", optimizer_state="keep", rounds=5)
    host, device = (run_spec(kept, client_state=where) for where in ("host", "device"))
    assert_same_run(host, device)


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(ALL_AT_ONCE)))
def test_a_clients_first_state_does_not_depend_on_the_model(name):
    kept = stateful(name, local_optimizer="adam", optimizer_state="keep")
    group = prepare_group([kept], UserObjects(make_user_dataset()), placement=Placement(lanes=1))
    task, algorithm = group.program.signature.training.task, group.program.algorithm
    hp = group.prepared_runs[0].spec.hp
    one, other = (
        algorithm.init(hp, jax.random.key(0), task.model.init(jax.random.key(seed)), 2).clients
        for seed in (0, 1)
    )
    assert algorithm.can_page_state and jax.tree.leaves(one)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_clients_whose_own_models_are_scored_stay_on_the_devices():
    own = stateful(local_tests=True, scored="client")
    with pytest.raises(ConfigError, match=r"client_state.*to score their own models"):
        run_spec(own, client_state="host")


@pytest.mark.parametrize("bad", ["gpu", "", None])
def test_a_place_that_does_not_exist(bad):
    with pytest.raises(ConfigError, match="client_state"):
        run_spec(stateful(), client_state=bad)
    with pytest.raises(ConfigError, match="client_state"):
        sweep([stateful()], dataset=make_user_dataset(), placement=Placement(client_state=bad))


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_the_command_line_says_where(command, tmp_path, capsys, monkeypatch):
    given = []

    def interrupt(group, *args, **settings):
        given.append(group)
        raise KeyboardInterrupt

    monkeypatch.setattr("fedjax_het.runtime.session.init_group", interrupt)
    monkeypatch.setattr("fedjax_het.runtime.sweep.init_group", interrupt)
    monkeypatch.setattr("fedjax_het.runtime.sweep._fit_to_memory", lambda group, memory: group)
    words = f"{command} --algorithm scaffold --dataset digits --model mlp --rounds 2 --lanes 1"
    words = [*words.split(), "--num-clients", "20", "--participation", "0.1"]
    words += ["--output-dir", str(tmp_path)]
    assert cli.main([*words, "--client-state", "host"]) == 130
    assert cli.main(words) == 130
    assert [group.client_state for group in given] == ["host", "device"]
    assert cli.main([*words, "--client-state", "disk"]) == 2
    assert "--client-state = 'disk'" in capsys.readouterr().err


# --- split over the devices ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lanes"),
    [("scaffold", 1), slow_case("scaffold", 2), slow_case("fedavg", 1), slow_case("feddyn", 1)],
)
def test_split_over_the_devices_it_is_the_same_bits(name, lanes):
    one = stateful(name)
    split, device = (
        run_spec(one, client_state=where, lanes=lanes) for where in ("split", "device")
    )
    assert_results_equal(split, device)
    jax.tree.map(np.testing.assert_array_equal, split.state.server, device.state.server)
    jax.tree.map(np.testing.assert_array_equal, all_clients(split), all_clients(device))


def test_each_device_holds_the_states_of_a_part_of_the_clients():
    group = prepare_group(
        [stateful()], UserObjects(make_user_dataset()), placement=Placement(client_state="split")
    )
    made, devices = init_group(group, group.prepared_runs), len(jax.devices())
    start_runs(made, CheckpointWriter())

    def held():
        leaves = jax.tree.leaves(made.state.clients)
        return {shard.data.shape[0] for leaf in leaves for shard in leaf.addressable_shards}

    assert held() == {CLIENTS // devices}
    finish_runs(made, CheckpointWriter())
    assert held() == {CLIENTS // devices}
    program, inputs = made.list_programs()["rounds"]
    text = program.lower(*inputs).compile().as_text()
    sent = re.findall(r"= \S+ (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(", text)
    # Which rows are wanted, the rows, what they have become with the sums, and the evaluation's:
    # no others.
    expected = ["all-gather", "reduce-scatter", "all-gather", "all-reduce"]
    assert sorted(sent) == sorted(expected) or devices == 1


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (stateful(num_clients=CLIENTS - 1), "devices divide (there are 11)"),
        (stateful("fedamp"), "fedamp needs the states of all clients at once"),
    ],
)
def test_states_that_cannot_be_split_are_refused(one, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        prepare_group(
            [one], UserObjects(make_user_dataset()), placement=Placement(client_state="split")
        )


def test_accelerators_split_what_is_too_much_for_each(monkeypatch):
    one = stateful()
    group = prepare_group([one], UserObjects(make_user_dataset()))
    spec, program = group.prepared_runs[0].spec, group.program
    everyones = compute_client_state_bytes(program, spec) * CLIENTS

    def chosen(memory):
        return choose_client_state(Placement(memory=int(memory)), program, spec)

    share, devices = placement.MAX_STATE_FRACTION, len(jax.devices())
    assert chosen(2 * everyones / share) == "device"
    assert chosen(0.9 * everyones / share) == "host"  # CPU devices share their memory
    monkeypatch.setattr(type(program.plan), "platform", "gpu")
    assert chosen(2 * everyones / share) == "device"
    assert chosen(0.9 * everyones / share) == ("split" if devices > 1 else "host")
    assert chosen(0.9 * everyones / share / devices) == "host"
