"""Floating-point operations of whole runs, against counts by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.markers import method_cases

from fedjax_het import RunSpec
from fedjax_het.config.settings import drop_unused_settings
from fedjax_het.core.flops_interpreter import FlopCounter
from fedjax_het.data import dataset_from_arrays
from fedjax_het.nn import count_training_flops, make_model
from fedjax_het.runtime.run_flops import RunFlops, ServerStageFlops, count_flops

# 64 images of 4x4, two classes: four clients of 16, so that no batch of 8 is filled up.
RANDOM = np.random.default_rng(0)
LABELS = np.arange(64) % 2
IMAGES = RANDOM.integers(0, 256, (64, 4, 4, 1), np.uint8)
DATA = dataset_from_arrays(IMAGES, LABELS, IMAGES, LABELS)
FIRST, LAST = 16 * 5, 5 * 2  # multiply-adds of the layers of an MLP, for an image
FORWARD, TRAINED = (
    2 * (FIRST + LAST),
    count_training_flops(make_model("mlp", (4, 4, 1), 2, hidden=(5,))),
)
SAMPLES = 4 * 16  # that clients train on in a round
SPEC = RunSpec(
    dataset="user",
    model="mlp",
    network_options={"hidden": [5]},
    partition="iid",
    num_clients=4,
    participation=1.0,
    local_epochs=1,
    batch_size=8,
    rounds=2,
)


def of(method, lanes=1, **settings):
    return count_flops(dataclasses.replace(SPEC, algorithm=method, **settings), DATA, lanes=lanes)


def flops_of(function, *arguments, required=()):
    """-> (required outputs, count) of a traced function."""
    counter = FlopCounter(jax.make_jaxpr(function)(*arguments))
    return counter.run(jax.tree.leaves(arguments), required)


X = jnp.ones((3, 3))
ONE = 2 * 27  # of a product of X with itself


@pytest.mark.parametrize("times", [0, 5])
def test_flops_of_loop(times):
    def power(x, n):
        return jax.lax.fori_loop(0, n, lambda i, a: a @ x, x)

    assert flops_of(power, X, times) == ([], times * ONE)


@pytest.mark.parametrize("taken, products", [(0, 0), (1, 2), (2, 1)])
def test_flops_of_branch(taken, products):
    def chosen(x, which):
        return jax.lax.switch(which, [jnp.tanh, lambda a: a @ x @ x, lambda a: a @ x], x)

    assert flops_of(chosen, X, taken)[1] == products * ONE


def test_flops_of_nested_loops():
    """The inner loop's length is a row of the outer's, and what the outer one has carried."""

    def work(x, lengths):
        def outer(carry, length):
            x, done = carry
            x = jax.lax.fori_loop(0, length + done, lambda i, a: a @ a, x)
            return (x, done + 1), x.sum()

        return jax.lax.scan(outer, (x, 0), lengths)

    assert flops_of(work, X, jnp.array([2, 0, 4]))[1] == (2 + 1 + 6) * ONE


def test_flops_exclude_dead_code():
    def work(x, n):
        unused = x @ x

        def step(i, carry):
            a, b = carry
            return a @ x, b + 1 + 0 * (unused @ a).shape[0]

        a, b = jax.lax.fori_loop(0, n, step, (x, 0))
        return b, jax.lax.scan(lambda c, _: (c @ x, c), a, None, length=4)[1]

    assert flops_of(work, X, 3)[1] == (3 + 4) * ONE


def test_flops_with_required_outputs():
    def work(x, n):
        return n + 1, jax.lax.fori_loop(0, n, lambda i, a: a @ x, x), (x @ x).sum()

    actual, flops = flops_of(work, X, 2, required=(True, False, True))
    assert flops == 3 * ONE and [float(actual[0]), actual[1], float(actual[2])] == [3, None, 27]


def test_flops_of_custom_derivatives():
    @jax.custom_jvp
    def jvp(x, n):
        return jax.lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] @ c[0], c[1] + 1), (x, 0))[0]

    @jax.custom_vjp
    def vjp(x):
        return x @ x

    jvp.defjvp(lambda primals, tangents: (jvp(*primals), tangents[0]))
    vjp.defvjp(lambda x: (x @ x, x), lambda x, g: (g,))

    def work(x, n):
        return jax.checkpoint(jax.jit(jvp))(x, n) + vjp(x)

    assert flops_of(work, X, 6)[1] == 7 * ONE


def test_flops_of_gradient():
    def loss(x, w):
        return jnp.square(jnp.tanh(x @ w) @ w).sum()

    # Forward 2, back to w 2, back to the first product 1, to x none.
    assert flops_of(jax.grad(loss, 1), X, X)[1] == 5 * ONE


def test_flops_beyond_32_bits():
    def work(x, n):
        return jax.lax.fori_loop(0, n, lambda i, a: jnp.tanh(a @ x), x)

    big = jax.ShapeDtypeStruct((1001, 1001), jnp.float32)
    counter = FlopCounter(jax.make_jaxpr(work)(big, 1))
    assert counter.run([None, np.int32(99_999)])[1] == 99_999 * 2 * 1001**3


def test_flops_reject_unknown_operation():
    mesh = jax.make_mesh((1,), ("a",))
    spec = jax.sharding.PartitionSpec()
    work = jax.shard_map(lambda x: x @ x, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(NotImplementedError, match="shard_map"):
        FlopCounter(jax.make_jaxpr(work)(X))


# --- of runs --------------------------------------------------------------------------------------


CONVNET = {"model": "convnet", "network_options": {"width": 3, "depth": 2}}
CONV_FIRST, CONV_LATER = 16 * 9 * 1 * 3, 4 * 9 * 3 * 3 + 3 * 2
SERVER = {"server_data": "iid", "server_options": {"size": 8}}


@pytest.mark.parametrize(
    "method, settings, expected",
    [
        ("fedavg", {}, SAMPLES * TRAINED),
        # 16 images are 3 batches of 6; two clients of four take part.
        (
            "fedavg",
            {"batch_size": 6, "participation": 0.5, "local_epochs": 2},
            2 * 2 * 18 * TRAINED,
        ),
        ("fedavg", CONVNET, SAMPLES * 2 * (2 * CONV_FIRST + 3 * CONV_LATER)),
        ("fedavg", {"lanes": 2}, SAMPLES * TRAINED),
        # Of three lanes two have nothing to do while the last client trains.
        ("fedavg", {"lanes": 3}, 6 * 16 * TRAINED),
        ("ditto", {}, 2 * SAMPLES * TRAINED),
        # Features alone of the global model's and the client's last network.
        ("moon", {}, SAMPLES * (TRAINED + 2 * 2 * FIRST)),
        # The server trains two epochs, as many as clients' samples come to.
        ("fsl", SERVER, (SAMPLES + 2 * 8) * TRAINED),
    ],
)
def test_flops_per_round(method, settings, expected):
    assert TRAINED == 2 * (2 * FIRST + 3 * LAST)
    actual = of(method, **settings)
    assert actual.rounds.tolist() == [expected] * 2
    assert (actual.server_stages == ()) == (method != "fsl")  # which trains before the first round


def test_flops_of_feddm():
    condense = {"ipc": 3, "steps": 7, "server_epochs": 0}
    settings = {"local_epochs": None, "batch_size": 4, "num_clients": 2}
    # A step: a batch of real images forward; the synthetic ones forward and back to their pixels.
    step = FORWARD * (4 + 2 * 3)
    actual = of("feddm", options=condense, **settings).rounds
    assert actual.tolist() == [2 * 2 * 7 * step] * 2
    # The server learns from 12 images, a batch an epoch.
    server = {"server_epochs": 5, "server_batch_size": 12}
    more = of("feddm", options={**condense, **server}, **settings).rounds - actual
    assert more.tolist() == [5 * 12 * TRAINED] * 2


def test_flops_of_pretraining():
    actual = of("fsl", **SERVER, pretrain_epochs=3)
    assert actual.server_stages == (ServerStageFlops("pretraining", 0, 3 * 8 * TRAINED),)


def test_flops_of_dynafed():
    """DynaFed's: unrolled steps forward, and back through each by a derivative of its gradient
    along one direction, of which the gradient itself is not used."""
    options = {"trajectory_rounds": 2, "segment_length": 2, "preset": "code"}
    options |= {
        "samples_per_class": 9,  # more samples than inputs: steps without the Gram matrix
        "num_iterations": 3,
        "inner_steps": 4,
        "augment_strategy": "none",
    }
    actual = of("dynafed", options={**options, "fine_tune_epochs": 2}, rounds=3)
    # Of the first layer: its output; the tangents of output, of weights and twice of the images.
    # Of the last: output and gradient of its input; two tangents of each of three products.
    back = 2 * (5 * FIRST + 8 * LAST)
    target = 2 * 3 * (FIRST + 5 + LAST + 2)  # a mean of the three models that are kept
    assert actual.server_stages == (
        ServerStageFlops("synthesis", 2, 3 * (4 * 18 * (TRAINED + back) + target)),
    )
    assert actual.rounds.tolist() == [*[SAMPLES * TRAINED] * 2, (SAMPLES + 2 * 18) * TRAINED]


def test_flops_of_tuning():
    arguments = {"client_tests": True, "test_per_client": 4, "participation": 0.5}
    actual = of("fedavg_ft", options={"tuning_epochs": 3}, **arguments)
    assert actual.rounds.tolist() == of("fedavg", **arguments).rounds.tolist()
    assert actual.tuning == 3 * SAMPLES * TRAINED  # of all clients, not of the round's
    assert of("fedavg", **arguments).tuning == 0
    assert of("per_fedavg", **arguments).tuning == 4 * 8 * TRAINED  # a minibatch of each


# Of the others, each way in which methods work is in the tests above.
@pytest.mark.parametrize("method", method_cases(quick=["fedgen"]))
def test_flops_of_every_method(method):
    few = {"ipc": 2, "steps": 2, "server_epochs": 1} if method in ("feddm", "fedaf") else {}
    settings = drop_unused_settings(method, {"local_epochs": 1})
    spec = dataclasses.replace(SPEC, algorithm=method, local_epochs=None, options=few, rounds=1)
    actual = count_flops(dataclasses.replace(spec, **settings), DATA)
    assert np.isfinite(actual.rounds).all() and (actual.rounds > 0).all()


def test_flops_sums():
    actual = RunFlops(
        np.array([5.0, 7.0, 9.0]), (ServerStageFlops("a", 0, 100), ServerStageFlops("b", 2, 1000))
    )
    assert actual.total == 1121
    assert actual.cumulative.tolist() == [105, 112, 1121]
