"""Training examples on the host or in a file: bit-equal to examples on the devices."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support.data import make_user_dataset
from support.markers import slow_case
from support.small_runs import (
    KilledError,
    assert_all_equal,
    assert_results_equal,
    make_killing_callback,
    make_spec,
    run_spec,
    run_sweep,
)

from fedjax_het import ConfigError, Placement, cli, simulate
from fedjax_het.core.client_loop import Examples
from fedjax_het.runtime import group_state
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.checkpointing import CheckpointWriter
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.group_init import init_group
from fedjax_het.runtime.runner import advance_runs, start_runs


def few_clients(algorithm="fedavg", **settings):
    """Three of twelve clients a round."""
    defaults = {"num_clients": 12, "participation": 0.25, "rounds": 5}
    return make_spec(algorithm, **{**defaults, **settings})


def in_file(dataset, folder):
    """The data set with training inputs that are mapped into memory from a file."""

    path = folder / "inputs.npy"
    np.save(path, dataset.train_inputs)
    return dataclasses.replace(dataset, train_inputs=np.load(path, mmap_mode="r"))


@pytest.mark.parametrize(
    ("name", "settings", "lanes"),
    [
        ("scaffold", {}, 2),
        ("fedavg", {"client_tests": True, "skew": "drift"}, 1),
        slow_case("fedaf", {}, 1),  # reads all examples of a round's clients, and starts from some
        slow_case("feddm", {}, 2),
        slow_case("fedavg", {"local_steps": 3, "local_epochs": None, "averaging": "weighted"}, 1),
        slow_case("fedavg", {"system": "dropout:probability=0.3"}, 1),
    ],
)
def test_results_are_bit_equal_to_examples_on_devices(name, settings, lanes, eager, tmp_path):
    spec = few_clients(name, **settings)
    device = run_spec(spec, lanes=lanes)
    dataset = in_file(make_user_dataset(), tmp_path)
    placement = Placement(lanes=lanes)
    assert prepare_group([spec], UserObjects(dataset), placement).client_data == "host"
    for result in (
        run_spec(spec, client_data="host", lanes=lanes),
        simulate(spec, dataset=dataset, placement=placement),
    ):
        assert_results_equal(result, device)
        assert result.digest() == device.digest()


def test_devices_hold_the_examples_of_a_chunk(short_chunks, monkeypatch, no_program_eviction):
    spec, tables = few_clients(local_epochs=3, partition="dirichlet", alpha=0.5), []
    place = group_state._place_examples
    monkeypatch.setattr(
        group_state, "_place_examples", lambda *args: tables.append(place(*args)) or tables[-1]
    )
    group = prepare_group([spec], UserObjects(make_user_dataset()), Placement(client_data="host"))
    state = init_group(group, group.prepared_runs)
    num_examples, scheduler = state.limits.num_examples, group.prepared_runs[0].scheduler
    sizes = scheduler.partition.sizes
    held = [int(sizes[scheduler.draw_cohort(r)].sum()) for r in range(spec.rounds)]
    assert scheduler.max_cohort_examples == max(held)
    assert 2 * max(held) + 1 <= num_examples < sizes.sum()
    assert "examples" not in group.shared_inputs
    start_runs(state, CheckpointWriter())
    list(advance_runs(state, CheckpointWriter()))
    assert {len(table.labels) for table in tables} == {num_examples} and len(tables) > 3
    assert group.program.chunk.program._cache_size() == 1


def test_large_table_shortens_chunks(monkeypatch):
    group = prepare_group(
        [few_clients()], UserObjects(make_user_dataset()), Placement(client_data="host")
    )
    held, bytes_each = group.prepared_runs[0].scheduler.max_cohort_examples, 2 * 2 * 4 + 4
    for rounds, limit in ((1, 0), (1, 2 * held - 1), (2, 2 * held), (3, 3 * held)):
        monkeypatch.setattr(group_state, "MAX_EXAMPLE_TABLE_BYTES", limit * bytes_each)
        assert init_group(group, group.prepared_runs).limits.max_rounds == rounds


@pytest.mark.slow
def test_vmapped_runs_are_bit_equal(short_chunks):
    more = {"partition": "dirichlet", "alpha": 0.7, "num_clients": 16, "participation": 0.07}
    specs = [few_clients(seed=s, **more) for s in range(2 * len(jax.devices()) + 1)]
    host, device = (
        run_sweep(specs, spread="runs", width=2, client_data=p).results for p in ("host", "device")
    )
    assert_all_equal(host, device)


@pytest.mark.parametrize("places", [("host", "host"), ("host", "device"), ("device", "host")])
def test_killed_run_resumes_bit_equal(places, tmp_path, eager, monkeypatch):
    monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0)  # a round at a time
    spec, (before, after) = few_clients("scaffold"), places
    whole = run_spec(spec)
    with pytest.raises(KilledError):
        kill = make_killing_callback(3)
        run_spec(spec, output_dir=tmp_path, client_data=before, progress=kill)
    resumed = run_spec(spec, output_dir=tmp_path, resume=True, client_data=after)
    assert_results_equal(resumed, whole)


def test_table_holds_padding_behind_the_examples(short_chunks):
    dataset = make_user_dataset()
    group = prepare_group([few_clients()], UserObjects(dataset), Placement(client_data="host"))
    state = init_group(group, group.prepared_runs)
    positions = np.array([2, 3, 11])
    table = group_state._place_examples(state, positions)
    assert isinstance(table, Examples) and len(table.labels) == state.limits.num_examples
    np.testing.assert_array_equal(table.inputs[:3], dataset.train_inputs[positions])
    np.testing.assert_array_equal(table.labels[:3], dataset.train_labels[positions])
    assert not np.asarray(table.inputs[3:]).any()


@pytest.mark.parametrize(
    ("spec", "reader"),
    [
        (functools.partial(few_clients, "fedmix"), "method fedmix"),
        (functools.partial(few_clients, validation=0.3), "validation"),
        (functools.partial(few_clients, skew="noise:std=0.3"), "skew of labels or images"),
        (functools.partial(few_clients, held_out_clients=2), "held_out_clients"),
        (
            functools.partial(few_clients, system="power_of_choice"),
            "selection of clients by losses",
        ),
        (functools.partial(few_clients, "fsl"), "method fsl"),
    ],
)
def test_runs_that_need_all_examples(spec, reader, tmp_path):
    spec = spec()
    with pytest.raises(ConfigError, match=rf"^client_data = 'host': .*: {reader} needs all"):
        prepare_group([spec], UserObjects(make_user_dataset()), Placement(client_data="host"))
    group = prepare_group([spec], UserObjects(in_file(make_user_dataset(), tmp_path)))
    assert group.client_data == "device"


def test_command_line_sets_the_place(tmp_path, capsys, monkeypatch):
    groups = []

    def interrupt(group, *args, **settings):
        groups.append(group)
        raise KeyboardInterrupt

    monkeypatch.setattr("fedjax_het.runtime.session.init_group", interrupt)
    words = ["run", "--dataset", "digits", "--model", "mlp", "--rounds", "2", "--lanes", "1"]
    assert cli.main([*words, "--client-data", "host"]) == 130
    assert cli.main(words) == 130
    assert [group.client_data for group in groups] == ["host", "device"]
    assert cli.main([*words, "--client-data", "disk"]) == 2
    assert "--client-data = 'disk'" in capsys.readouterr().err
