"""Client states of every type that jax has: the same on the host, on disk and in company."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.data import make_user_dataset
from support.small_runs import KilledError, make_killing_callback, with_placement

from fedjax_het import ConfigError, Result, RunSpec, simulate
from fedjax_het.algorithms import register_method
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.core.client_algorithm import ClientUpdate
from fedjax_het.core.local_training import make_local_sgd
from fedjax_het.core.state_paging import HostClientStates
from fedjax_het.runtime import checkpointing, group_state
from fedjax_het.runtime.checkpointing import load_checkpoint, save_checkpoint
from fedjax_het.utils.arrays import decode_arrays, encode_arrays, fetch_to_host, stack_on_host

CLIENTS = 12


class Odd(NamedTuple):
    """One leaf of each kind."""

    flag: Any
    count: Any
    trace: Any
    eighths: Any
    key: Any


def first_state():
    return Odd(
        jnp.array(False),
        jnp.int8(124),
        jnp.ones(3, jnp.bfloat16),
        jnp.full((2, 2), 0.5, jnp.float8_e4m3fn),
        jax.random.key(7),
    )


def odd(training, plan):
    """FedAvg whose clients start off the model that they received, by what their state says."""
    base = make_local_sgd(training)

    def begin(context, state):
        off = 0.01 * jax.random.normal(state.key) + jnp.where(state.flag, 0.02, -0.02)
        off += 1e-4 * state.count + 1e-3 * state.trace.astype(jnp.float32).sum()
        off += 1e-3 * state.eighths.astype(jnp.float32).sum()
        local = base.begin(context, ())
        params = jax.tree.map(lambda a: a + off, local.variables["params"])
        return local._replace(variables=local.variables | {"params": params})

    def end(context, local, state):
        upload, _, output = base.end(context, local, ())
        moved = sum(jnp.abs(leaf).mean() for leaf in jax.tree.leaves(upload.mean["params"]))
        new = Odd(
            ~state.flag,
            state.count + jnp.int8(3),  # wraps around
            (state.trace + moved).astype(jnp.bfloat16),
            (state.eighths * 0.75).astype(jnp.float8_e4m3fn),
            jax.random.fold_in(state.key, context.client.num_steps),
        )
        return ClientUpdate(mean=upload.mean, sum=state.flag), new, output

    client = base._replace(init=lambda hp, variables: first_state(), begin=begin, end=end)
    algorithm = build_federated_algorithm(training, plan, client)
    return algorithm._replace(
        artifacts=lambda state: {"trace": jnp.full(2, 1.5, jnp.bfloat16), "key": first_state().key}
    )


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    register_method("odd", odd)
    monkeypatch.setattr(group_state, "MAX_ROUNDS_PER_CHUNK", 2)


def spec(**settings):
    common = {
        "dataset": "user",
        "partition": "iid",
        "model": "mlp",
        "num_clients": CLIENTS,
        "participation": 0.25,
        "batch_size": 4,
        "rounds": 6,
        "local_optimizer": "sgd",
        "optimizer_state": "reset",
    }
    return RunSpec("odd", **common | settings)


def run(one=None, *, output_dir=None, resume=False, progress=None, **placement):
    arguments = {"output_dir": output_dir, "resume": resume, "progress": progress}
    return simulate(
        one or spec(), dataset=make_user_dataset(), **arguments, **with_placement(placement)
    )


def all_clients(result):
    """Every client's state, `[K, ...]`; keys by their data."""
    clients = result.state.clients
    if isinstance(clients, HostClientStates):
        rows = map(clients.get_client, range(CLIENTS))
        clients = jax.tree.map(lambda *leaves: stack_on_host(leaves), *rows)
    return clients


def assert_same_run(one, other):
    """Equal curves, and equal states of equal types."""
    assert one.metrics.keys() == other.metrics.keys()
    for name in one.metrics:
        np.testing.assert_array_equal(one.metrics[name], other.metrics[name], err_msg=name)
    for name, a, b in zip(Odd._fields, all_clients(one), all_clients(other), strict=True):
        assert a.dtype == b.dtype == getattr(first_state(), name).dtype, name
        plain = (jax.random.key_data(x) if name == "key" else x for x in (a, b))
        np.testing.assert_array_equal(*map(np.asarray, plain), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("device", "device"), ("host", "device"), ("device", "host")]
)
def test_killed_run_resumes_bitwise(before, after, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0)
    whole = run(client_state="device")
    with pytest.raises(KilledError):
        run(client_state=before, output_dir=tmp_path, progress=make_killing_callback(3))
    resumed = run(client_state=after, output_dir=tmp_path, resume=True)
    assert_same_run(resumed, whole)


@pytest.mark.slow
def test_two_devices_equal_one_bitwise():
    """Two blocks on either, so that sums are taken in one order."""
    devices = min(2, len(jax.devices()))
    one, two = (run(devices=count, blocks=2) for count in (1, devices))
    assert_same_run(one, two)


def test_result_round_trip(tmp_path):
    result = run(spec(rounds=2), output_dir=tmp_path)
    (path,) = tmp_path.glob("*.json")
    actual = Result.load(path).artifacts
    assert actual["trace"].dtype == jnp.bfloat16 and actual["key"].dtype == first_state().key.dtype
    np.testing.assert_array_equal(actual["trace"], result.artifacts["trace"])
    assert bool(actual["key"] == result.artifacts["key"])


LEAVES = {
    "bool": np.array([True, False]),
    "int4": np.arange(-3, 3).astype(jnp.int4),
    "uint64": np.array([2**63], np.uint64),
    "complex": np.array([1 - 2j], np.complex64),
    "half": np.float16(0.1),
    "bfloat16": np.linspace(-1, 1, 7).astype(jnp.bfloat16).reshape(7, 1),
    "float8": np.array(np.nan).astype(jnp.float8_e5m2),
    "empty": np.zeros((0, 3), jnp.bfloat16),
}


def test_encode_arrays_round_trip(tmp_path):
    keys = {"keys": jax.random.split(jax.random.key(3), 4), "rbg": jax.random.key(1, impl="rbg")}
    path = tmp_path / "arrays.npz"
    np.savez(path, **encode_arrays(LEAVES | keys))
    with np.load(path, allow_pickle=False) as data:
        actual = decode_arrays(data)
    assert actual.keys() == (LEAVES | keys).keys()
    for name, leaf in LEAVES.items():
        assert actual[name].dtype == leaf.dtype and actual[name].shape == leaf.shape, name
        assert actual[name].tobytes() == leaf.tobytes(), name
    for name, key in keys.items():
        assert actual[name].dtype == key.dtype and bool((actual[name] == key).all())


def test_checkpoint_of_other_dtype_is_refused(tmp_path):
    path = tmp_path / "checkpoint.npz"
    tree = {"a": np.ones(2, jnp.bfloat16)}
    save_checkpoint(path, tree, {})
    assert load_checkpoint(path, tree)["a"].dtype == jnp.bfloat16
    for like in (np.ones(2, np.uint16), np.ones(2, np.float16), np.ones(2, np.float32)):
        with pytest.raises(ConfigError, match="the checkpoint has another"):
            load_checkpoint(path, {"a": like})
    keys = {"a": jax.random.split(jax.random.key(0))}
    save_checkpoint(path, keys, {})
    other = {"a": jax.random.split(jax.random.key(0, impl="rbg"))}
    with pytest.raises(ConfigError, match="the checkpoint has another"):
        load_checkpoint(path, other)


def test_fetch_to_host_keeps_keys():
    keys = jax.random.split(jax.random.key(3), 4)
    assert fetch_to_host(keys).dtype == keys.dtype and bool((fetch_to_host(keys) == keys).all())
    assert isinstance(fetch_to_host(jnp.ones(2, jnp.bfloat16)), np.ndarray)
