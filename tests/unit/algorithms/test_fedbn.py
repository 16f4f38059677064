"""FedBN against a float64 loop, what it keeps, and how it is scored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from support.data import BATCH_SIZE, CLIENT_SIZES, NUM_CLASSES, make_user_dataset
from support.networks import make_centered_model
from support.reference_loop import ReferenceFedAvg, flatten_params, logit_gradient
from support.small_federation import make_small_federation

from fedjax_het import Placement, simulate
from fedjax_het.algorithms.fedbn import fedbn
from fedjax_het.algorithms.local_parameters import split_parameters
from fedjax_het.config.protocols import PROTOCOLS
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.nn import get_norm_variables, make_model, norm_mask
from fedjax_het.nn.adapters import make_flax_model
from fedjax_het.nn.layers import BatchNorm, InstanceNorm, Linear

LR = 0.3


def replace_norms(model, variables, norms):
    """Return the variables with other normalization layers."""
    split = split_parameters(model, get_norm_variables)
    return split.join(split.drop_local(variables), tuple(norms))


def gradients(p, x, y, mean):
    """In float64."""
    u = x - mean
    features = u * p["scale"] + p["shift"]
    slope = logit_gradient(features @ p["kernel"] + p["bias"], y) / len(y)
    back = slope @ p["kernel"].T
    actual = {"scale": (back * u).sum(0), "shift": back.sum(0)}
    return actual | {"kernel": features.T @ slope, "bias": slope.sum(0)}


NORMS = ("scale", "shift", "mean")


def named(variables):
    """Weights and running mean."""
    first, last = (variables["params"][name] for name in ("first", "last"))
    leaves = {"scale": first["scale"], "shift": first["bias"], **last}
    leaves["mean"] = variables["state"]["first"]["mean"]
    return {name: np.asarray(leaf, np.float64) for name, leaf in leaves.items()}


class OwnLayers(ReferenceFedAvg):
    """Clients keep their model, of which they go on with the layers of `NORMS`."""

    def initial_client_model(self, client):
        return flatten_params(self.scored(client))

    def scored(self, client):
        """The global body with the client's own layers, if it has some."""
        body, own = self.params(self.global_vector), self.client_states[client]
        return body if own is None else body | {name: own[name] for name in NORMS}

    def local_step(self, model, batch):
        p = self.params(model)
        mean = batch.x.mean(0)
        slopes = gradients(p, batch.x, batch.y, mean)
        moved = {name: p[name] - LR * slope for name, slope in slopes.items()}
        return flatten_params(moved | {"mean": p["mean"] + 0.5 * (mean - p["mean"])})

    def finish_client(self, client, model, steps):
        self.client_states[client] = self.params(model)


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_rounds_match_float64_loop(averaging):
    federation = make_small_federation(
        fedbn,
        hp={"local_lr": LR},
        model=make_centered_model(),
        participation=0.5,
        averaging=averaging,
        epochs=2,
        client_test_model="personal",
    )
    start = federation.initial_state()
    loop = OwnLayers(federation, params=named(federation.algorithm.global_model(start)))
    for r in range(4):
        loop.run_round(r)
    assert loop.count_repeat_clients() >= 2 and None in loop.client_states
    state, _ = federation.run(4, start)
    loop.assert_model(named(federation.algorithm.global_model(state)), atol=1e-5)
    for k in range(len(CLIENT_SIZES)):
        actual = named(federation.algorithm.personal_variables(federation.hp, state, k))
        loop.assert_model(actual, model=flatten_params(loop.scored(k)), atol=1e-5)


# --- limits --------------------------------------------------------------------------------


def test_trained_client_ignores_server_norms():
    federation = make_small_federation(fedbn, hp={"local_lr": LR}, model=make_centered_model())
    state, _ = federation.run(1)
    variables = federation.algorithm.global_model(state)
    noise = [
        jnp.full_like(leaf, 7.0) for leaf in get_norm_variables(make_centered_model(), variables)
    ]
    changed = replace_norms(make_centered_model(), variables, noise)
    other, _ = federation.run(1, federation.algorithm.with_global_model(state, changed))
    same, _ = federation.run(1, state)
    assert_trees_all_equal(other.clients, same.clients)
    assert_trees_all_close(other.server, same.server, atol=1e-5)


def test_traffic_excludes_norm_layers():
    federation = make_small_federation(fedbn, hp={"local_lr": LR}, model=make_centered_model())
    body = 4 * (4 * NUM_CLASSES + NUM_CLASSES)
    assert federation.algorithm.traffic(federation.hp, federation.initial_state()) == (
        body,
        body,
        0,
    )


# --- what belongs to normalization layers --------------------------------------------------


def marked(model):
    """-> (numbers of params, numbers of state) that are marked, and the names of the others."""
    variables = jax.eval_shape(model.init, jax.random.key(0))
    mask = norm_mask(model, variables)
    assert jax.tree.structure(mask) == jax.tree.structure(variables)
    sizes = {
        part: sum(
            leaf.size
            for leaf, mark in zip(
                jax.tree.leaves(variables[part]), jax.tree.leaves(mask[part]), strict=True
            )
            if mark
        )
        for part in ("params", "state")
    }
    paths = jax.tree_util.tree_leaves_with_path(mask)
    others = {jax.tree_util.keystr(path[-2:]) for path, mark in paths if not mark}
    return sizes["params"], sizes["state"], others


@pytest.mark.parametrize(
    ("norm", "params", "state"),
    [("batch", 2 * 2 * 6, 2 * 2 * 6), ("instance", 24, 0), ("group", 24, 0), ("none", 0, 0)],
)
def test_norm_variables_of_convnet(norm, params, state):
    actual = marked(make_model("convnet", (8, 8, 1), 3, width=6, depth=2, norm=norm))
    names = {f"['{a}']['{b}']" for a in ("conv1", "conv2", "head") for b in ("kernel", "bias")}
    assert actual == (params, state, names)


def test_norm_variables_of_resnet():
    # A stem, two times two convolutions a stage, and a shortcut in three of four stages.
    channels = 4 + sum(4 * 2**stage * (4 + (stage > 0)) for stage in range(4))
    *sizes, others = marked(make_model("resnet18", (8, 8, 3), 3, width=4))
    assert sizes == [2 * channels, 2 * channels]
    names = {"conv", "conv1", "conv2", "shortcut", "head"}
    assert {name.split("'")[1] for name in others} == names


@pytest.mark.parametrize("model", ["mlp", "cnn", "fsl_cnn"])
def test_networks_without_norm_layers(model):
    assert make_model(model, (16, 16, 1), 3).norm_layers() == frozenset()


def test_layer_kind_decides_not_name():
    import flax.linen as nn

    class Misleading(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = Linear(3, name="batch_norm")(x)
            x = BatchNorm(name="linear1")(x, train)
            return InstanceNorm()(x, train)

    actual = make_flax_model(Misleading(), (4, 4, 2)).norm_layers()
    assert actual == {("linear1",), ("InstanceNorm_0",)}


def test_norm_variables_round_trip():
    model = make_model("convnet", (4, 4, 1), 3, width=2, depth=1, norm="batch")
    one, other = (model.init(jax.random.key(k)) for k in range(2))
    other = jax.tree.map(lambda leaf: leaf + 1, other)
    mixed = replace_norms(model, one, get_norm_variables(model, other))
    for part, layer in (("params", "norm1"), ("state", "norm1")):
        assert_trees_all_equal(mixed[part][layer], other[part][layer])
    for layer in ("conv1", "head"):
        assert_trees_all_equal(mixed["params"][layer], one["params"][layer])


# --- runs ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [12, "all"])
def test_client_test_uses_own_norms(count):
    """By hand, on a run with local tests, or with all tests for everyone."""
    settings = {"num_clients": 3, "rounds": 2, "partition": "classes_per_client", "classes": 2}
    settings |= {"participation": 0.7, "local_epochs": 1, "batch_size": BATCH_SIZE}
    settings |= {"test_per_client": count, "model": "convnet", "width": 2, "depth": 1}
    spec = RunSpec("fedbn", "user", protocol="fedamp", norm="batch", **settings)
    assert spec.resolved().evaluated_model == "personal"
    data = make_user_dataset()
    result = simulate(spec, dataset=data, placement=Placement(lanes=1, devices=1))
    model = make_model("convnet", (2, 2, 1), NUM_CLASSES, width=2, depth=1, norm="batch")
    server, clients = result.state.server.variables, result.state.clients
    assert sorted(clients.has_trained.tolist()) == [0, 1, 1] or clients.has_trained.all()
    mean, std = np.asarray(data.mean), np.asarray(data.std)
    for k in range(3):
        variables = server
        if clients.has_trained[k]:
            variables = replace_norms(model, server, [leaf[k] for leaf in clients.norms])
        mine = result.tests.client_indices(k)
        assert len(mine) == (len(data.test_labels) if count == "all" else count)
        x = jnp.float32((data.test_inputs[mine] - mean) / std)
        right = model.apply(variables, x, train=False)[0].argmax(1) == data.test_labels[mine]
        actual = result.metrics["client_accuracy"][-1, k]
        np.testing.assert_allclose(actual, right.mean(), atol=1e-6)
    assert np.isfinite(result.metrics["test_accuracy"]).all()  # of the body with mean layers


def test_state_paging_unless_personal_evaluation():
    for test_model in ("global", "personal"):
        federation = make_small_federation(
            fedbn, hp={"local_lr": LR}, model=make_centered_model(), client_test_model=test_model
        )
        assert federation.algorithm.can_page_state == (test_model == "global")
        assert (federation.algorithm.personal_variables is None) == (test_model == "global")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_protocols_evaluate_personal_models(protocol):
    one = RunSpec("fedbn", "digits", protocol=protocol, client_tests=True).resolved()
    assert one.evaluated_model == "personal"
    other = RunSpec(
        "fedbn", "digits", protocol=protocol, client_tests=True, client_test_model="global"
    )
    assert other.resolved().evaluated_model == "global"
    if protocol not in ("fedamp", "pfllib"):
        assert not RunSpec("fedbn", "digits", protocol=protocol).resolved().has_client_tests


def test_fedaf_domains_use_own_norms():
    one = RunSpec("fedbn", "domainnet", protocol="fedaf").resolved()
    assert one.has_client_tests and one.evaluated_model == "personal"
    assert not RunSpec("moon", "domainnet", protocol="fedaf").resolved().has_client_tests
