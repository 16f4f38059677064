"""FedBABU against a float64 loop, its constant head and its fine-tuning."""

import jax
import numpy as np
import pytest
from chex import assert_trees_all_equal
from support.algorithm_builders import make_method_federation
from support.reference_loop import ReferenceAdam, flatten_params, name_leaves, run_and_compare
from support.two_layers import ReferenceTwoLayers, make_two_layer_model

from fedjax_het import ConfigError, RunSpec, simulate
from fedjax_het.core.client_algorithm import Batch, ClientContext, ClientInfo
from fedjax_het.core.local_training import ServerMessage
from fedjax_het.core.optimizers import LocalTrainingOptions


def make_federation(options=None, hp=None, **settings):
    settings = {"participation": 0.5, "epochs": 2, "client_test_model": "tuned", **settings}
    hp = {"local_lr": 0.3, "server_lr": 0.7, **(hp or {})}
    return make_method_federation(
        "fedbabu", options, hp=hp, model=make_two_layer_model(), **settings
    )


class ReferenceFedBABU(ReferenceTwoLayers):
    """The head does not step, decay or count in the gradient's norm."""

    def descent_direction(self, model, batch):
        zero, hp = np.zeros_like(model), self.hp
        gradient = self.gradient(model, batch.x, batch.y)
        direction = self.select_layer("hidden", gradient, zero)
        if "local_clip_norm" in hp:
            direction = direction * min(1, hp["local_clip_norm"] / np.linalg.norm(direction))
            body = self.select_layer("hidden", model, zero)
            direction = direction + hp["local_weight_decay"] * body
        return direction


DETAILS = LocalTrainingOptions(
    optional_hyperparameters=("local_clip_norm", "local_weight_decay"), num_steps=3
)


@pytest.mark.parametrize(
    ("averaging", "settings"),
    [
        ("uniform", {}),
        (
            "weighted",
            {"details": DETAILS, "hp": {"local_clip_norm": 0.2, "local_weight_decay": 0.1}},
        ),
    ],
)
def test_rounds_match_float64_loop(averaging, settings):
    federation = make_federation(averaging=averaging, **settings)
    start = federation.global_params(federation.initial_state())
    loop = ReferenceFedBABU(federation)
    state = run_and_compare(loop, 4, atol=2e-6)
    assert loop.count_repeat_clients() >= 2
    assert_trees_all_equal(federation.global_params(state)["head"], start["head"])


# --- fine-tuning -----------------------------------------------------------------------------


TUNED_LAYERS = {"network": ("head", "hidden"), "body": ("hidden",), "head": ("head",)}


@pytest.mark.parametrize("part", TUNED_LAYERS)
def test_tuned_part_trains(part):
    """One client's copy, by Adam, whose moments of a constant layer would move it."""
    lr, num_steps = 0.05, 4
    federation = make_federation({"tuned_part": part}, {"local_lr": lr}, optimizer="adam")
    tuning = federation.algorithm.fine_tuning
    assert (tuning.epochs, tuning.steps) == (5, None)
    state, _ = federation.run(1)
    variables, client = federation.algorithm.global_model(state), tuning.client_algorithm
    message, info = ServerMessage(variables), ClientInfo(0, 7, num_steps, None)
    context = ClientContext(federation.hp, message, info, jax.random.key(0))
    loop = ReferenceFedBABU(federation)
    model, adam = flatten_params(name_leaves(federation.global_params(state))), ReferenceAdam()
    start, zero = model, np.zeros_like(model)
    local = client.begin(context, client.init(federation.hp, variables))
    images, labels = federation.examples
    for step in range(num_steps):
        indices = np.arange(3) + 3 * step
        batch = Batch(images[indices], labels[indices], np.ones(3, np.float32), step)
        local, _ = client.step(context, local, batch)
        gradient, direction = loop.gradient(model, loop.inputs[indices], loop.labels[indices]), zero
        for layer in TUNED_LAYERS[part]:
            direction = loop.select_layer(layer, gradient, direction)
        model = adam.step(model, direction, lr)
    _, copy, _ = client.end(context, local, variables)
    loop.assert_model(jax.tree.map(np.asarray, copy["params"]), model=model, atol=2e-6)
    assert np.abs(model - start).max() > 0.01


SETTINGS = {"model": "mlp", "num_clients": 4, "participation": 1.0, "rounds": 2}


def test_without_tuning_clients_evaluate_global_model():
    tuned, initial = (
        simulate(RunSpec("fedbabu", options={"tuning_epochs": n}, **SETTINGS)) for n in (2, 0)
    )
    jax.tree.map(np.testing.assert_array_equal, tuned.model().variables, initial.model().variables)
    gain = tuned.metrics["client_accuracy"] - initial.metrics["client_accuracy"]
    assert gain.mean() > 0.02


def test_head_layers_are_constant():
    options = {"head_layers": ["hidden2", "head"], "tuning_epochs": 0}
    short, long = (
        simulate(RunSpec("fedbabu", options=options, **{**SETTINGS, "rounds": rounds}))
        for rounds in (1, 3)
    )
    first, last = (result.model().variables["params"] for result in (short, long))
    assert np.abs(first["hidden1"]["kernel"] - last["hidden1"]["kernel"]).max() > 1e-3
    for layer in options["head_layers"]:
        assert_trees_all_equal(first[layer], last[layer])


def test_wrong_layer_is_one_line():
    with pytest.raises(
        ConfigError, match="head_layers = 'head2': expected layers of the"
    ) as raised:
        simulate(RunSpec("fedbabu", options={"head_layers": ["head2"]}, **SETTINGS))
    assert "\n" not in str(raised.value)
