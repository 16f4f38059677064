"""Client states on the host, on disk, or split over devices: bit-equal, in less memory."""

import errno
import os
import re
from types import SimpleNamespace

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

from fedjax_het import ConfigError, Placement, cli
from fedjax_het.algorithms import METHODS
from fedjax_het.core.state_paging import HostClientStates
from fedjax_het.runtime import checkpointing, group_state, memory_limits, placement
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.checkpointing import CheckpointWriter, read_checkpoint_record
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.group_init import init_group, list_programs
from fedjax_het.runtime.placement import choose_client_state
from fedjax_het.runtime.program_memory import measure_required_memory
from fedjax_het.runtime.runner import advance_runs, start_runs
from fedjax_het.utils.arrays import to_numpy_bits

CLIENTS = 12
# Bytes of a client of SCAFFOLD: a control, two moments of Adam, and its count.
ROW_BYTES = 4 + 3 * 4 * sum(a * b + b for a, b in ((4, 128), (128, 128), (128, 3)))


def stateful(algorithm="scaffold", **settings):
    """Three of twelve clients a round; Adam's moments are kept."""
    return make_spec(algorithm, **{"num_clients": CLIENTS, "participation": 0.25, **settings})


def prepare(*specs, **settings):
    return prepare_group(specs, UserObjects(make_user_dataset()), Placement(**settings))


def place(spec, **settings):
    return prepare(spec, **settings).client_state


def all_clients(result):
    """Every client's state, wherever it is: `[K, ...]`."""
    clients = result.state.clients
    if not isinstance(clients, HostClientStates):
        return jax.tree.map(np.asarray, clients)
    return jax.tree.map(lambda *rows: np.stack(rows), *map(clients.get_client, range(CLIENTS)))


def assert_equal_states(result, other):
    jax.tree.map(np.testing.assert_array_equal, result.state.server, other.state.server)
    jax.tree.map(np.testing.assert_array_equal, all_clients(result), all_clients(other))


ALL_AT_ONCE = (
    "separate",
    "fedamp",
    "heurfedamp",
    "apfl",
    "ditto",
    "pfedme",
    "feddm",
    "fedaf",
    "fedrod",
    "fedproto",
    "fedala",
    "ifca",
)
ALL_AT_ONCE += tuple(name for name in METHODS if METHODS[name].local_parameters is not None)
OTHERS = sorted(set(METHODS) - {*ALL_AT_ONCE, "scaffold", "fedavg"})
KEEP_ADAM = {"local_optimizer": "adam", "optimizer_state": "keep"}


@pytest.mark.parametrize(
    ("name", "place", "lanes"),
    [
        ("scaffold", "split", 1),
        ("scaffold", "disk", 1),
        *method_cases(("scaffold", "fedavg", *OTHERS), "host", 1, quick=()),
        *(slow_case(name, "split", 1) for name in ("fedavg", "feddyn")),
        *(slow_case("scaffold", place, 2) for place in ("host", "disk", "split")),
    ],
)
def test_results_are_bit_equal_to_states_on_devices(name, place, lanes, short_chunks):
    more = {**KEEP_ADAM, "rounds": 5} if name in OTHERS and place == "host" else {}
    spec = stateful(name, **more)
    moved, device = (run_spec(spec, client_state=p, lanes=lanes) for p in (place, "device"))
    assert_results_equal(moved, device)
    is_paged = isinstance(moved.state.clients, HostClientStates)
    assert is_paged == (place in ("host", "disk"))
    assert not is_paged or moved.state.clients.is_on_disk == (place == "disk")
    assert not isinstance(device.state.clients, HostClientStates)
    assert_equal_states(moved, device)
    if not more:
        num_states = [len(np.unique(a, axis=0)) for a in jax.tree.leaves(all_clients(moved))]
        assert max(num_states) > 6, "clients of several chunks must have states of their own"


def test_devices_hold_the_states_of_a_chunk(short_chunks):
    group, device = (prepare(stateful("fedavg"), client_state=p) for p in ("host", "device"))
    state = init_group(group, group.prepared_runs)
    start_runs(state, CheckpointWriter())
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(state.state.clients)}
    assert rows == {state.limits.num_rows} == {6}
    row = group.state_bytes
    required = measure_required_memory(init_group(device, device.prepared_runs))
    assert required - measure_required_memory(state) >= 6 * row


def test_large_table_shortens_chunks(monkeypatch):
    group = prepare(stateful(), client_state="host")
    row = group.state_bytes
    assert row == ROW_BYTES, "a control, Adam's two moments, and its count"
    for rounds, limit in ((1, 0), (1, 6 * row - 1), (2, 6 * row), (3, 9 * row)):
        monkeypatch.setattr(group_state, "MAX_CLIENT_TABLE_BYTES", limit)
        assert init_group(group, group.prepared_runs).limits[:2] == (rounds, 3 * rounds)


def test_programs_of_states_on_the_host_compile_once(short_chunks, no_program_eviction):
    spec = stateful(local_epochs=3, rounds=5)  # no other test's program
    group = prepare(spec, client_state="host")
    state = init_group(group, group.prepared_runs)
    start_runs(state, CheckpointWriter())
    list(advance_runs(state, CheckpointWriter()))
    assert group.program.chunk.program._cache_size() == 1


@pytest.mark.slow
def test_vmapped_runs_are_bit_equal(short_chunks):
    more = {"partition": "dirichlet", "alpha": 0.7, "rounds": 5}
    specs = [stateful("fedavg", seed=s, **more) for s in range(2 * len(jax.devices()) + 1)]
    host, device = (
        run_sweep(specs, spread="runs", width=2, client_state=p).results for p in ("host", "device")
    )
    assert_all_equal(host, device)


RESUMED = [
    ("scaffold", "disk", "disk"),
    ("scaffold", "host", "host"),
    slow_case("scaffold", "disk", "device"),
    slow_case("scaffold", "device", "disk"),
    ("scaffold", "host", "device"),
    ("scaffold", "device", "host"),
    slow_case("scaffold", "device", "split"),
    slow_case("scaffold", "split", "host"),
    slow_case("dynafed", "split", "split"),
    slow_case("dynafed", "host", "host"),  # killed in its synthesis
]


@pytest.mark.parametrize(("name", "before", "after"), RESUMED)
def test_killed_run_resumes_bit_equal(name, before, after, tmp_path, eager, monkeypatch):
    # One round or iteration at a time.
    monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0)
    if "disk" in (before, after):  # such a checkpoint is not read into memory
        monkeypatch.setattr(checkpointing, "_MAX_READ_BYTES", 100)
    spec, kill = stateful(name), make_killing_callback(5)
    whole = run_spec(spec, client_state="device")
    with pytest.raises(KilledError):
        run_spec(spec, output_dir=tmp_path, client_state=before, progress=kill)
    resumed = run_spec(spec, output_dir=tmp_path, resume=True, client_state=after)
    assert_results_equal(resumed, whole)
    jax.tree.map(np.testing.assert_array_equal, all_clients(resumed), all_clients(whole))


def test_checkpoint_holds_clients_that_trained(tmp_path, eager, monkeypatch):
    monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0)
    with pytest.raises(KilledError):
        kill = make_killing_callback(2)
        run_spec(stateful(), output_dir=tmp_path, client_state="host", progress=kill)
    path = tmp_path / "checkpoint.npz"
    rounds = read_checkpoint_record(path)["round"]
    scheduler = prepare(stateful()).prepared_runs[0].scheduler
    trained = np.unique(np.concatenate([scheduler.draw_cohort(r) for r in range(rounds)]))
    assert 0 < len(trained) < CLIENTS
    with np.load(path) as data:
        assert any(
            data[name].dtype == np.int64 and np.array_equal(np.sort(data[name]), trained)
            for name in data.files
        )
        lengths = {data[name].shape[0] for name in data.files if ".clients" in name}
        assert lengths == {len(trained)}


@pytest.mark.parametrize("on_disk", [False, True])
def test_states_of_any_type_are_stored(on_disk):
    """More clients are written than expected, from a table with padding; a copy does not change."""
    first = {
        "key": jax.random.key(3),
        "low": jnp.full((2, 3), 0.5, jnp.bfloat16),
        "count": np.int32(4),
        "none": np.zeros((0, 2)),
    }
    state = HostClientStates(first, 9, max_written=1, on_disk=on_disk)
    keys = jax.random.split(jax.random.key(9), 4)
    rows = {
        "key": keys,
        "low": jnp.arange(24, dtype=jnp.bfloat16).reshape(4, 2, 3),
        "count": np.arange(4, dtype=np.int32),
        "none": np.zeros((4, 0, 2)),
    }

    def assert_equal(tree, other):
        assert jax.tree.structure(tree) == jax.tree.structure(other)
        for leaf, expected in zip(*map(jax.tree.leaves, (tree, other)), strict=True):
            np.testing.assert_array_equal(to_numpy_bits(leaf), to_numpy_bits(expected))

    assert_equal(state.rows, jax.tree.map(lambda a: a[:0], rows))
    state.scatter_states(np.array([7]), rows)
    state.scatter_states(np.array([2, 7, 8]), rows)
    copy = state.copy()
    state.scatter_states(np.array([0]), rows)
    for states in (state, copy):
        assert states.is_on_disk == on_disk
        for row, client in enumerate((2, 7, 8)):
            assert_equal(states.get_client(client), jax.tree.map(lambda a, row=row: a[row], rows))
        assert_equal(states.rows["count"][:3], np.array([1, 0, 2]))
    assert_equal(copy.get_client(0), first)
    assert_equal(state.get_client(0), jax.tree.map(lambda a: a[0], rows))
    state.prefetch(np.array([0, 1, 7]))
    out = state.allocate_table((3,))
    state.gather_states(np.array([8, 1]), out)
    np.testing.assert_array_equal(out["count"], [2, 4, 4])


def test_full_disk_is_reported(monkeypatch):
    states = HostClientStates({"w": np.zeros(4)}, 3, on_disk=True)

    class FullFile:
        def seek(self, position):
            pass

        def write(self, content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    states._rows["w"]._file = FullFile()
    expected = (
        r"^client_state = 'disk': expected room in the folder .* \(No space left on device\)$"
    )
    with pytest.raises(ConfigError, match=expected):
        states.scatter_states(np.array([1]), {"w": np.ones((1, 4))})


def test_states_that_exceed_the_disk_are_rejected(monkeypatch):
    usage = SimpleNamespace(free=6 * ROW_BYTES)
    monkeypatch.setattr(memory_limits.shutil, "disk_usage", lambda folder: usage)
    expected = "^num_clients = 12: expected at most 6, as the run needs at least .* are free in the"
    with pytest.raises(ConfigError, match=expected):
        prepare(stateful(), client_state="disk")
    assert place(stateful("fedavg", local_optimizer="sgd"), client_state="disk") == "device"


@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_never_written_equal_the_first_row(on_disk):
    state = HostClientStates({"w": np.full(2, 5.0)}, 6, on_disk=on_disk)
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
def test_checkpoints_take_a_bounded_share_of_time(tmp_path, monkeypatch):
    group = prepare(stateful())
    state_of_group, files = init_group(group, group.prepared_runs), CheckpointWriter([tmp_path])
    start_runs(state_of_group, files)
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
        files.save(state_of_group)
    assert [t - begin for t in saved] == [20.0, 350.0]  # 300 s after the first was written


# --- the place of the states


def test_auto_depends_on_memory_and_gain(monkeypatch):
    needed = 8 * CLIENTS * ROW_BYTES
    assert place(stateful(), memory=needed) == "device"
    assert place(stateful(), memory=needed - 1) == "host"
    # Full participation, no state, and a method that reads all states gain nothing.
    assert place(stateful(participation=1.0), memory=needed // 2) == "device"
    stateless = stateful(local_optimizer="sgd", algorithm="fedprox")
    assert place(stateless, memory=needed // 2) == "device"
    assert place(stateful("fedavg", local_optimizer="sgd"), client_state="host") == "device"
    assert place(stateful("fedamp"), memory=needed // 2) == "device"
    assert place(stateful()) == "device"
    monkeypatch.setattr(placement, "usable_free_bytes", lambda devices: needed - 1)
    assert place(stateful()) == "host"
    assert place(stateful(), client_state="device") == "device"
    trained = min(CLIENTS, 9 * 3) * ROW_BYTES
    for free, expected in ((2 * trained - 1, "disk"), (2 * trained, "host"), (None, "host")):
        monkeypatch.setattr(placement, "free_host_bytes", lambda free=free: free)
        assert place(stateful()) == expected
    monkeypatch.setattr(placement, "usable_free_bytes", lambda devices: None)
    assert place(stateful()) == "device"


def test_auto_counts_the_runs_of_a_device():
    specs = [stateful(seed=s) for s in range(2 * len(jax.devices()))]
    settings = {"spread": "runs", "memory": 12 * CLIENTS * 3 * 70_000}
    places = [prepare(*specs, width=width, **settings).client_state for width in (1, 2)]
    assert places == ["device", "host"]


@pytest.mark.parametrize(
    ("spec", "place", "message"),
    [
        *((stateful(name), "host", f"'device'.*: {name} needs") for name in ALL_AT_ONCE),
        (
            stateful(client_tests=True, client_test_model="client"),
            "host",
            "to evaluate their own models",
        ),
        (stateful(num_clients=CLIENTS - 1), "split", r"devices as num_clients \(now 11\)"),
        (stateful("fedamp"), "split", "fedamp needs the states of all clients at once"),
        *((stateful(), name, "") for name in ("gpu", "", None)),
    ],
)
def test_invalid_places_are_rejected(spec, place, message):
    with pytest.raises(ConfigError, match=f"client_state = .*{message}"):
        prepare(spec, client_state=place)


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(ALL_AT_ONCE)))
def test_initial_client_state_is_independent_of_the_model(name):
    group = prepare(stateful(name, **KEEP_ADAM), lanes=1)
    model, algorithm = group.program.signature.training.task.model, group.program.algorithm
    hp, key = group.prepared_runs[0].spec.hyperparameters, jax.random.key(0)
    one, other = (
        algorithm.init(hp, key, model.init(jax.random.key(seed)), 2).clients for seed in (0, 1)
    )
    assert algorithm.can_page_state and jax.tree.leaves(one)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_command_line_sets_the_place(command, tmp_path, capsys, monkeypatch):
    groups = []

    def interrupt(group, *args, **settings):
        groups.append(group)
        raise KeyboardInterrupt

    monkeypatch.setattr("fedjax_het.runtime.session.init_group", interrupt)
    monkeypatch.setattr("fedjax_het.runtime.sweep.init_group", interrupt)
    monkeypatch.setattr("fedjax_het.runtime.sweep._fit_to_memory", lambda group, memory: group)
    words = f"{command} --algorithm scaffold --dataset digits --model mlp --rounds 2 --lanes 1"
    words = [*words.split(), "--num-clients", "20", "--participation", "0.1"]
    words += ["--output-dir", str(tmp_path)]
    assert cli.main([*words, "--client-state", "host"]) == 130
    assert cli.main(words) == 130
    assert [group.client_state for group in groups] == ["host", "device"]
    assert cli.main([*words, "--client-state", "tape"]) == 2
    assert "--client-state = 'tape'" in capsys.readouterr().err


# --- states split over the devices


def test_each_device_holds_a_part_of_the_states():
    group = prepare(stateful(), client_state="split")
    state_of_group, devices = init_group(group, group.prepared_runs), len(jax.devices())
    start_runs(state_of_group, CheckpointWriter())

    def held():
        leaves = jax.tree.leaves(state_of_group.state.clients)
        return {shard.data.shape[0] for leaf in leaves for shard in leaf.addressable_shards}

    assert held() == {CLIENTS // devices}
    list(advance_runs(state_of_group, CheckpointWriter()))
    assert held() == {CLIENTS // devices}
    program, inputs = list_programs(state_of_group)["rounds"]
    text = program.lower(*inputs).compile().as_text()
    sent = re.findall(r"= \S+ (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(", text)
    # Which rows are wanted, the rows, what they have become with the sums, and the evaluation's:
    # no others.
    expected = ["all-gather", "reduce-scatter", "all-gather", "all-reduce"]
    assert sorted(sent) == sorted(expected) or devices == 1


def test_accelerators_split_states_that_are_too_large(monkeypatch):
    group = prepare(stateful())
    spec, program = group.prepared_runs[0].spec, group.program
    everyones = group.state_bytes * CLIENTS

    def chosen(memory):
        return choose_client_state(Placement(memory=int(memory)), program, spec, group.state_bytes)

    share, devices = placement.MAX_STATE_FRACTION, len(jax.devices())
    assert chosen(2 * everyones / share) == "device"
    assert chosen(0.9 * everyones / share) == "host"  # CPU devices share their memory
    monkeypatch.setattr(type(program.plan), "platform", "gpu")
    assert chosen(2 * everyones / share) == "device"
    assert chosen(0.9 * everyones / share) == ("split" if devices > 1 else "host")
    assert chosen(0.9 * everyones / share / devices) == "host"
