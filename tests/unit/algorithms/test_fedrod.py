"""FedRoD against a float64 loop, and its models."""

import flax.linen as nn
import numpy as np
import pytest
from support.algorithm_builders import make_method_federation
from support.reference_loop import ReferenceFedAvg, flatten_params, logit_gradient
from support.two_layers import (
    backpropagate,
    compute_features,
    compute_logits,
    make_two_layer_model,
)

from fedjax_het import ConfigError, RunSpec, simulate

HEAD = ("head/bias", "head/kernel")


class ReferenceFedRoD(ReferenceFedAvg):
    """The client's state is its own head, by the names of the layer's weights."""

    def init_client_state(self, client):
        params = self.params(self.global_vector)
        return {name: params[name] for name in HEAD}

    def local_step(self, model, batch):
        params, own = self.params(model), self.client_states[batch.client]
        features, logits = (f(params, batch.x) for f in (compute_features, compute_logits))
        n, lr = len(batch.y), self.hp["local_lr"]
        personal = logits + features @ own["head/kernel"] + own["head/bias"]
        rows = logit_gradient(personal, batch.y) / n
        gradient = {"head/kernel": features.T @ rows, "head/bias": rows.sum(0)}
        self.client_states[batch.client] = {name: own[name] - lr * gradient[name] for name in HEAD}
        with np.errstate(divide="ignore"):
            balanced = logits + np.log(self.class_counts(batch.client))
        rows = logit_gradient(balanced, batch.y) / n
        return model - lr * flatten_params(backpropagate(params, batch.x, rows))

    def personal_vector(self, client):
        params, own = self.params(self.global_vector), self.client_states[client]
        return flatten_params({n: params[n] + own[n] if n in HEAD else params[n] for n in params})


def make_federation(**settings):
    settings = {"model": make_two_layer_model(), "client_test_model": "personal"} | settings
    return make_method_federation("fedrod", hp={"local_lr": 0.3, "server_lr": 0.7}, **settings)


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_rounds_match_float64_loop(averaging):
    federation = make_federation(participation=0.5, averaging=averaging, epochs=2)
    loop = ReferenceFedRoD(federation)
    for r in range(4):
        loop.run_round(r)
    assert loop.count_repeat_clients() >= 2
    state, _ = federation.run(4)
    loop.assert_model(federation.global_params(state), atol=2e-6)
    for k in range(len(loop.client_sizes)):
        actual = federation.personal_model(state, k)
        loop.assert_model(actual, model=loop.personal_vector(k), atol=4e-6)


def test_personal_heads_do_not_change_global_model():
    personal, shared = (
        make_federation(epochs=2, client_test_model=name) for name in ("personal", "global")
    )
    start = personal.initial_state()
    state = personal.run(3, start)[0]
    expected = shared.run(3, start)[0]
    assert shared.algorithm.personal_variables is None
    for name, leaf in personal.global_params(state)["head"].items():
        np.testing.assert_array_equal(leaf, shared.global_params(expected)["head"][name])
    first, second = (personal.personal_model(state, k)["head"]["kernel"] for k in (0, 2))
    assert np.abs(first - second).max() > 0.1


@pytest.mark.parametrize("keep", [True, False])
def test_optimizer_of_head_is_kept_or_reset(keep):
    federation = make_federation(optimizer="adam", keep=keep)
    state, _ = federation.run(2)
    assert (state.clients.memory.optimizer != ()) == keep


def test_network_without_head_is_one_line():
    class Pooled(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(10, (3, 3))(x).mean((1, 2))

    with pytest.raises(ConfigError, match=r"^network has no known `embed`") as raised:
        simulate(RunSpec("fedrod", num_clients=4, rounds=1), network=Pooled())
    assert "\n" not in str(raised.value)
