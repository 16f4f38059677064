"""FedRep against a float64 loop, its limits, and the optimizers of its parts."""

import jax
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from support.algorithm_builders import make_method_federation
from support.data import BATCH_SIZE, CLIENT_SIZES
from support.reference_loop import flatten_params
from support.two_layers import (
    ReferenceLocalLayer,
    make_two_layer_model,
    run_and_compare_personal_models,
)

from fedjax_het import RunSpec, simulate
from fedjax_het.core.optimizers import LocalTrainingOptions
from fedjax_het.methods import num_bytes

HEAD_EPOCHS = 2


def make_federation(name="fedrep", options=None, **settings):
    settings = {"participation": 0.5, "epochs": 2, **settings}
    if name == "fedrep":
        options = {"head_epochs": HEAD_EPOCHS, **(options or {})}
        settings["client_test_model"] = "personal"
    settings["hp"] = {"local_lr": 0.3, "server_lr": 0.7, **settings.get("hp", {})}
    return make_method_federation(name, options, model=make_two_layer_model(), **settings)


class ReferenceFedRep(ReferenceLocalLayer):
    """The head steps in the first passes, the body in the others."""

    def trained_layer(self, batch):
        steps_per_pass = -(-self.client_sizes[batch.client] // BATCH_SIZE)
        return "head" if batch.step < HEAD_EPOCHS * steps_per_pass else "hidden"

    def local_step(self, model, batch):
        after = super().local_step(model, batch)
        return self.select_layer(self.trained_layer(batch), after, model)


@pytest.mark.parametrize(
    ("averaging", "settings"),
    [("uniform", {}), ("weighted", {"details": LocalTrainingOptions(num_steps=3)})],
)
def test_rounds_match_float64_loop(averaging, settings):
    federation = make_federation(averaging=averaging, **settings)
    run_and_compare_personal_models(ReferenceFedRep, federation)


class ReferenceWithOptimizers(ReferenceFedRep):
    """Each layer has its momentum, the norm of its gradient and its accumulated gradients."""

    accumulation_steps = 2

    def train_client(self, r, client):
        self.velocities, self.gradients = {"head": 0.0, "hidden": 0.0}, []
        return super().train_client(r, client)

    def local_step(self, model, batch):
        layer, hp = self.trained_layer(batch), self.hp
        zero = np.zeros_like(model)
        self.gradients.append(
            self.select_layer(layer, self.gradient(model, batch.x, batch.y), zero)
        )
        batches = self.minibatches(batch.round, batch.client)
        is_last = batch.step + 1 == len(batches)
        is_last = is_last or self.trained_layer(batches[batch.step + 1]) != layer
        if len(self.gradients) < self.accumulation_steps and not is_last:
            return model
        direction = np.mean(self.gradients, 0)
        self.gradients = []
        direction = direction * min(1, hp["local_clip_norm"] / np.linalg.norm(direction))
        direction = direction + hp["local_weight_decay"] * self.select_layer(layer, model, zero)
        self.velocities[layer] = hp["local_momentum"] * self.velocities[layer] + direction
        return model - hp["local_lr"] * self.velocities[layer]


def test_parts_have_their_own_optimizers():
    """Clients have an odd number of minibatches per pass, which the change of parts cuts off."""
    hp = {"local_momentum": 0.9, "local_weight_decay": 0.1, "local_clip_norm": 0.2}
    names = ("local_clip_norm", "local_weight_decay")
    details = LocalTrainingOptions(optional_hyperparameters=names, accumulation_steps=2)
    sizes = (7, 0, 12, 3, 9, 20)
    federation = make_federation(
        hp={**hp, "local_lr": 0.2}, optimizer="momentum", details=details, sizes=sizes, epochs=1
    )
    assert any(-(-n // BATCH_SIZE) * HEAD_EPOCHS % 2 == 0 for n in sizes)
    run_and_compare_personal_models(ReferenceWithOptimizers, federation, atol=5e-6)


# --- limits ----------------------------------------------------------------------------------


OPTIMIZERS = {
    "sgd": {},
    "adam": {"optimizer": "adam", "keep": True, "hp": {"local_lr": 0.05}},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_head_epochs_body_equals_fedbabu(optimizer):
    settings = OPTIMIZERS[optimizer]
    federation = make_federation(options={"head_epochs": 0}, **settings)
    constant = make_federation("fedbabu", client_test_model="tuned", **settings)
    start = federation.initial_state()
    (state, info), (expected, expected_info) = federation.run(4, start), constant.run(4)
    model = constant.global_params(expected)
    assert_trees_all_equal(federation.personal_model(state, 2), model)
    assert_trees_all_equal(info.train_loss, expected_info.train_loss)
    assert_trees_all_equal(model["head"], federation.personal_model(start, 0)["head"])


def test_without_steps_of_body_heads_train_alone():
    """With server_lr 0 the heads are softmax regressions of constant features."""
    federation = make_federation(hp={"server_lr": 0.0, "local_lr": 0.5}, participation=1.0)
    start = federation.initial_state()
    state, _ = federation.run(3, start)
    first, last = (federation.personal_model(s, 3) for s in (start, state))
    assert_trees_all_equal(first["hidden"], last["hidden"])
    assert np.abs(first["head"]["kernel"] - last["head"]["kernel"]).max() > 0.01


# --- optimizer state and whole runs ----------------------------------------------------------


def test_kept_optimizer_states_are_of_their_parts():
    federation = make_federation(optimizer="adam", keep=True, participation=1.0, epochs=1)
    state, _ = federation.run(1)
    optimizers = state.clients.inner
    model = federation.personal_model(state, 0)
    size = {name: len(flatten_params(layer)) for name, layer in model.items()}
    moments = {part: sum(leaf.size for leaf in jax.tree.leaves(getattr(optimizers, part)))
               for part in ("head", "body")}  # fmt: skip
    counts = len(CLIENT_SIZES)  # of each optimizer's steps
    assert moments["head"] == counts * (2 * size["head"] + 1)
    assert moments["body"] == counts * (2 * size["hidden"] + 1)


def test_batch_norm_statistics_follow_all_minibatches():
    """A step of no length moves the statistics in both parts as FedAvg does in all its passes."""
    settings = {"model": "convnet", "width": 4, "depth": 1, "norm": "batch", "num_clients": 3}
    settings |= {"participation": 1.0, "rounds": 1, "learning_rate": 0.0}
    split = simulate(RunSpec("fedrep", options={"head_epochs": 1}, local_epochs=1, **settings))
    whole = simulate(RunSpec("fedper", local_epochs=2, **settings))
    states = (result.model(1).variables["state"] for result in (split, whole))
    assert_trees_all_close(*states, rtol=1e-6)


def test_head_layers_and_traffic():
    options = {"head_layers": ["hidden2", "head"], "head_epochs": 1}
    settings = {"model": "mlp", "num_clients": 4, "participation": 1.0, "rounds": 2}
    result = simulate(RunSpec("fedrep", options=options, **settings))
    first, second = (result.model(k).variables["params"] for k in (0, 1))
    np.testing.assert_array_equal(first["hidden1"]["kernel"], second["hidden1"]["kernel"])
    assert np.abs(first["hidden2"]["kernel"] - second["hidden2"]["kernel"]).max() > 1e-3
    np.testing.assert_array_equal(result.metrics["bytes_up"], 4 * num_bytes(first["hidden1"]))
