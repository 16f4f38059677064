"""DynaFed's controls: rounds that are tuned on data which nothing has matched."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.algorithm_builders import bind_options
from support.data import NUM_CLASSES, make_user_dataset
from support.reference_loop import (
    ReferenceAdam,
    ReferenceFedAvg,
    flatten_inputs,
    run_and_compare,
    softmax,
)
from support.small_federation import make_small_federation
from support.small_runs import SYNTHESIS_OPTIONS, make_spec, run_spec
from support.x64 import enable_x64

from fedjax_het import ConfigError, RunSpec
from fedjax_het.algorithms import get_algorithm_spec
from fedjax_het.algorithms.dynafed import dynafed
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.condensation.downstream_eval import random_subset
from fedjax_het.core.rng import Stream, make_host_rng

LAST, EPOCHS, SAMPLES, RATE = 2, 3, 6, 0.05
OPTIONS = {
    "trajectory_rounds": LAST,
    "segment_length": 1,
    "target_counts": (1,),
    "target_end": "drawn",
    "num_samples": SAMPLES,
    "fine_tune_epochs": EPOCHS,
    "augment_strategy": "none",
}


HP = {
    "local_lr": 0.2,
    "fine_tune_lr": RATE,
    "fine_tune_lr_decay": 1.0,
    "fine_tune_prox": 0.0,
    "fine_tune_mix": 1.0,
}


class Tuned(ReferenceFedAvg):
    """From round L on the average takes steps of Adam on fixed data, all of them at once, for the
    cross-entropy of soft labels over the number of classes. The learning rate decays, a proximal
    term pulls to the average, and the result is mixed with the average."""

    def __init__(self, federation, x, p):
        super().__init__(federation)
        self.x, self.p = x, p

    def soft_slope(self, model):
        params = self.params(model)
        rows = (softmax(self.x @ params["w"] + params["b"]) - self.p) / NUM_CLASSES / len(self.x)
        return np.concatenate([rows.sum(0), (self.x.T @ rows).ravel()])  # "b", then "w"

    def update_server(self, r, clients, models):
        super().update_server(r, clients, models)
        if r < LAST:
            return
        hp, adam, average = self.federation.hp, ReferenceAdam(), self.global_vector
        rate = RATE * hp["fine_tune_lr_decay"] ** (r - LAST)
        tuned = average
        for _ in range(EPOCHS):
            slope = self.soft_slope(tuned) + hp["fine_tune_prox"] * (tuned - average)
            tuned = adam.step(tuned, slope, rate)
        mix = hp["fine_tune_mix"]
        self.global_vector = mix * tuned + (1 - mix) * average


def control(synthetic, images, labels, number=SAMPLES):
    """-> (images, soft labels) that the control is tuned on."""
    classes = np.arange(number) * NUM_CLASSES // number
    if synthetic == "untrained":
        noise = make_host_rng(0, Stream.CONTROL).normal(size=(number, *images.shape[1:]))
        return flatten_inputs(noise.astype(np.float32)), np.full(
            (number, NUM_CLASSES), 1 / NUM_CLASSES
        )
    chosen_images = images[random_subset(labels, classes, seed=0)]
    return flatten_inputs(chosen_images), softmax(20.0 * np.eye(NUM_CLASSES)[classes])


@pytest.mark.parametrize(
    ("synthetic", "settings"),
    [
        ("untrained", {}),
        ("real", {}),
        ("untrained", {"fine_tune_lr_decay": 0.5}),
        ("untrained", {"fine_tune_prox": 0.3}),
        ("real", {"fine_tune_mix": 0.4}),
    ],
)
def test_control_rounds_match_tuned_fedavg(synthetic, settings):
    build = bind_options(dynafed, base=fedavg, **OPTIONS, synthetic=synthetic)
    hp = {**HP, **settings}
    federation = make_small_federation(build, hp=hp, participation=0.7)
    loop = Tuned(federation, *control(synthetic, *federation.data))
    run_and_compare(loop, 4, atol=1e-5)
    plain = make_small_federation(fedavg, hp=hp, participation=0.7)
    same = [
        np.allclose(
            federation.train(r)["w"],
            plain.train(r)["w"],
        )
        for r in (LAST, LAST + 1)
    ]
    assert same == [True, False]


@pytest.mark.slow
def test_control_run_has_no_synthesis():
    options = {**SYNTHESIS_OPTIONS, "synthetic": "untrained"}
    result, plain = run_spec(make_spec("dynafed", options=options)), run_spec(make_spec("fedavg"))
    same = result.metrics["test_loss"] == plain.metrics["test_loss"]
    assert same[:4].all() and not same[4:].any()
    assert "synthetic_images" not in result.artifacts


@pytest.mark.slow
def test_warns_of_settings_without_effect(caplog):
    options = {**SYNTHESIS_OPTIONS, "trajectory_rounds": 4}
    run_spec(make_spec("dynafed", options=options, rounds=4))
    (said,) = [record.message for record in caplog.records if "note" in record.message]
    assert said == "note: rounds = 4: this is fedavg, since data are synthesized after round 4"
    spec = make_spec("dynafed", options={**options, "synthetic": "untrained"}, rounds=5)
    method = get_algorithm_spec("dynafed", spec.options)
    assert method.settings_warnings(spec.resolved(), method) == []
    assert method.get_min_rounds(spec.options) == 5


@pytest.mark.parametrize("step_size", [11.0, 100.0, 1e-5])
def test_rejects_step_size_outside_bounds(step_size):
    with pytest.raises(ConfigError, match=f"hp step_size = {step_size}"):
        RunSpec("dynafed", hp={"step_size": step_size}).resolved()
    free = {"step_size_floor": 1e-6, "step_size_ceiling": 1e3}
    result = RunSpec("dynafed", hp={"step_size": step_size}, options=free).resolved()
    assert result.hp["step_size"] == step_size


def test_bounds_of_step_size_belong_to_the_value_of_the_run():
    RunSpec("dynafed", hp={"step_size": 0.005}, options={"step_size_ceiling": 0.01}).resolved()
    bounds = {"step_size_floor": 0.1}
    RunSpec("dynafed", options={"preset": "improved", **bounds}).resolved()
    with pytest.raises(
        ConfigError, match=r"^hp step_size = 0\.04: expected step_size_floor \(0\.1"
    ):
        RunSpec("dynafed", options=bounds).resolved()


@pytest.mark.slow
@pytest.mark.parametrize("synthetic", ["matched", "untrained", "real"])
def test_assumption_3_is_measured(synthetic):
    """The distance of the gradient on the synthetic data from that of all data, and the latter's
    length, in float64, at the model that the last measured round began with."""
    options = {**SYNTHESIS_OPTIONS, "synthetic": synthetic}
    result = run_spec(make_spec("dynafed", options=options, gradient_gaps=2))
    before = run_spec(make_spec("dynafed", options=options, rounds=8))
    gap, norm = result.metrics["server_gap"], result.metrics["gradient_norm"]
    measured = np.isfinite(norm)
    assert measured.tolist() == [r % 2 == 0 for r in range(9)]
    assert np.isnan(gap[:4]).all() and np.isfinite(gap[[4, 6, 8]]).all()
    data = make_user_dataset()
    with enable_x64(True):
        params = jax.tree.map(lambda a: jnp.asarray(a, float), before.state.server.inner.variables)

        def logits_of(params, x):
            for name in ("hidden1", "hidden2"):
                x = jnp.maximum(x @ params[name]["kernel"] + params[name]["bias"], 0)
            return x @ params["head"]["kernel"] + params["head"]["bias"]

        def loss(params, x, p):
            return -(p * jax.nn.log_softmax(logits_of(params, x))).sum(1).mean()

        x = (flatten_inputs(data.train_inputs) - np.asarray(data.mean)[0]) / np.asarray(data.std)[0]
        whole = jax.grad(loss)(params["params"], x, np.eye(NUM_CLASSES)[data.train_labels])
        if synthetic == "matched":
            images = flatten_inputs(result.artifacts["synthetic_images"])
            labels = softmax(np.asarray(result.artifacts["synthetic_label_logits"], float))
        else:
            number = result.spec.options["num_samples"]
            normalised = x.reshape(data.train_inputs.shape)
            images, labels = control(synthetic, normalised, data.train_labels, number)
        own = jax.grad(loss)(params["params"], images, labels)
        away = optax.tree.sub(own, whole)
        expected = float(optax.tree.norm(away, squared=True)), float(optax.tree.norm(whole))
    np.testing.assert_allclose((gap[-1], norm[-1]), expected, rtol=1e-3)
