"""Methods with compressed uploads against float64 loops, and the parts that are not compressed."""

import chex
import jax
import numpy as np
import pytest
from support.algorithm_builders import default_hyper_parameters
from support.networks import make_centered_model
from support.reference_loop import ReferenceFedAvg, flatten_params, name_leaves, run_and_compare
from support.small_federation import make_small_federation, round_key
from support.two_layers import make_two_layer_model

from fedjax_het.algorithms import get_algorithm_spec
from fedjax_het.compression import QSGD, Sign, TopK, Uniform
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.rng import Purpose, fold_in_purpose

NUM_WEIGHTS = 15  # softmax regression on 4 pixels and 3 classes


def make_compressed(name="fedavg", compressor=None, hp=None, options=None, **settings):
    """A small federation of a registered method with a compressor."""
    entry, options = get_algorithm_spec(name, options or {}), options or {}
    hp = {**default_hyper_parameters(entry, options), "local_lr": 0.2, **(hp or {})}

    def build(training, plan):
        training = training._replace(compressor=compressor)
        return entry.build_algorithm(training, plan, entry.complete_options(options))

    return make_small_federation(build, hp=hp, **settings)


class CompressedLoop(ReferenceFedAvg):
    """FedAvg whose clients send C(p), p = change + e_k, and keep e_k = p - C(p)."""

    has_memory = True

    def init_client_state(self, client):
        return np.zeros_like(self.global_vector)

    def update_server(self, r, clients, models):
        sent = []
        for client, model in zip(clients, models, strict=True):
            total = model - self.global_vector + self.client_states[client] * self.has_memory
            decoded = self.compress(r, client, total)
            self.client_states[client] = total - decoded
            sent.append(self.global_vector + decoded)
        super().update_server(r, clients, sent)

    def by_tensor(self, vector, compress):
        tensors = self.params(vector)
        return np.concatenate(
            [compress(i, tensors[n].ravel()) for i, n in enumerate(sorted(tensors))]
        )


class TopKLoop(CompressedLoop):
    def compress(self, r, client, vector):
        is_sent = np.abs(vector) >= np.sort(np.abs(vector))[-4]  # 0.25 of 15 is 3.75
        return np.where(is_sent, vector, 0)


class SignLoop(CompressedLoop):
    def compress(self, r, client, vector):
        return self.by_tensor(vector, lambda i, v: np.abs(v).mean() * np.where(v >= 0, 1, -1))


class UniformLoop(CompressedLoop):
    has_memory = False

    def compress(self, r, client, vector):
        return self.by_tensor(
            vector, lambda i, v: np.round(v / np.abs(v).max() * 127) * np.abs(v).max() / 127
        )


class QSGDLoop(CompressedLoop):
    """The probabilities of the levels, at the package's draws."""

    has_memory = False

    def compress(self, r, client, vector):
        key = fold_in_purpose(jax.random.fold_in(round_key(r), client), Purpose.COMPRESSION)

        def round_up(i, v):
            draws = np.asarray(jax.random.uniform(jax.random.fold_in(key, i), v.shape))
            level = 5 * np.abs(v) / np.linalg.norm(v)
            return np.linalg.norm(v) * np.sign(v) * np.floor(level + 1 - draws) / 5

        return self.by_tensor(vector, round_up)


@pytest.mark.parametrize(
    ("loop", "compressor"),
    [
        (TopKLoop, TopK(fraction=0.25)),
        (SignLoop, Sign()),
        (UniformLoop, Uniform()),
        (QSGDLoop, QSGD(levels=5)),
    ],
)
def test_fedavg_equals_the_loop(loop, compressor):
    """Half of the clients take part in a round, so most memories are older than a round."""
    settings = {"participation": 0.5, "averaging": "weighted", "epochs": 2}
    federation = make_compressed(compressor=compressor, hp={"server_lr": 0.8}, **settings)
    reference = loop(federation)
    state = run_and_compare(reference, 5, atol=5e-6)
    assert reference.count_repeat_clients() > 3
    if not compressor.error_feedback:
        assert not jax.tree.leaves(state.clients)
        return
    for k, expected in enumerate(reference.client_states):
        row = jax.tree.map(lambda a, k=k: a[k], state.clients.memory)
        np.testing.assert_allclose(flatten_params(name_leaves(row)), expected, atol=5e-6)
    assert np.abs(reference.client_states[0]).max() > 1e-2


def test_results_do_not_depend_on_lanes():
    plan = make_execution_plan(1, 3, mesh_axis=None)
    for compressor in (TopK(fraction=0.3), QSGD(levels=2)):
        federations = [
            make_compressed(compressor=compressor, **settings) for settings in ({}, {"plan": plan})
        ]
        models = [flatten_params(name_leaves(f.train(3))) for f in federations]
        np.testing.assert_allclose(*models, atol=1e-5)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fednova", "fedadam", "fedexp", "feddyn"])
def test_all_entries_equal_the_plain_method(name):
    plain, compressed = (
        make_compressed(name, compressor, participation=0.5).train(3)
        for compressor in (None, TopK(fraction=1.0))
    )
    jax.tree.map(np.testing.assert_array_equal, plain, compressed)


def count_upload(federation):
    state = federation.initial_state()
    return federation.algorithm.traffic(federation.hp, state)


def test_traffic():
    top = TopK(fraction=0.2)  # 3 entries of 32 bits, with positions of 4 bits
    plain, fedavg = count_upload(make_compressed()), count_upload(make_compressed(compressor=top))
    assert (plain.up, fedavg.up, fedavg.down) == (60, 14, 60)
    assert count_upload(make_compressed("scaffold", top)).up == 14 + 60  # the control is not
    assert count_upload(make_compressed("fednova", top)).up == 14
    assert count_upload(make_compressed("fedexp", top)).up == 14 + 4


def test_only_the_model_is_compressed():
    """SCAFFOLD's controls and running statistics of layers are sent as they are."""
    states = [
        make_compressed("scaffold", compressor, model=make_centered_model()).run(1)[0].server
        for compressor in (None, Sign())
    ]
    for part in (lambda server: server.extra, lambda server: server.variables["state"]):
        chex.assert_trees_all_close(*map(part, states), atol=1e-6)
    models = [flatten_params(name_leaves(server.variables["params"])) for server in states]
    assert np.abs(np.subtract(*models)).max() > 1e-2


@pytest.mark.parametrize(
    ("name", "model", "sent"),
    [
        ("fedper", make_two_layer_model, "hidden"),
        ("fedbabu", make_two_layer_model, "hidden"),
        ("fedbn", make_centered_model, "last"),
    ],
)
def test_parts_that_are_not_sent(name, model, sent):
    settings = {
        "model": model(),
        "client_test_model": get_algorithm_spec(name, {}).evaluated_models[0],
    }
    federation = make_compressed(name, TopK(fraction=1 / 4), **settings)
    state, _ = federation.run(2)
    memory = jax.tree.map(lambda a: a[0], state.clients.memory)
    leaves = name_leaves({n: part for n, part in memory.items() if jax.tree.leaves(part)})
    assert leaves and all(leaf.startswith(sent) for leaf in leaves), leaves
    size = sum(leaf.size for leaf in leaves.values())
    bits = round(size / 4) * (32 + (size - 1).bit_length())
    plain = count_upload(make_compressed(name, None, **settings))
    assert plain.up == 4 * size and plain.down == plain.up
    assert count_upload(federation).up == -(-bits // 8)
    assert federation.personal_model(state, 0)


def test_personal_models_and_artifacts_have_their_own_states():
    settings = {"client_test_model": "personal", "hp": {"apfl_alpha": 0.5}}
    federation = make_compressed("apfl", TopK(fraction=0.5), **settings)
    state, _ = federation.run(2)
    personal, algorithm = federation.personal_model(state, 0), federation.algorithm
    plain = make_compressed("apfl", TopK(fraction=1.0), **settings)
    assert (
        max(np.abs(personal[n] - plain.personal_model(plain.run(2)[0], 0)[n]).max() for n in "bw")
        > 0
    )
    assert algorithm.artifacts(state)["apfl_alpha"].shape == (6,)
