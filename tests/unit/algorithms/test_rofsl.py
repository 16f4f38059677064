"""RoFSL against a loop in float64, its filters, and its limits."""

import jax
import numpy as np
import pytest
from support.algorithm_builders import make_method_federation
from support.data import SERVER_EXAMPLES
from support.markers import slow_case
from support.reference_loop import (
    ReferenceFedAvg,
    cross_entropy,
    flatten_inputs,
    flatten_params,
    run_and_compare,
    server_batches,
)
from support.small_federation import round_key
from support.small_runs import make_spec, run_spec

from fedjax_het import simulate
from fedjax_het.core.rng import Purpose, fold_in_purpose

HP = {"local_lr": 0.1, "server_lr": 1.4, "gamma": 0.8, "filter_margin": 0.0}
SERVER_INPUTS = flatten_inputs(SERVER_EXAMPLES[0])


def make_federation(options=None, hp=None, **settings):
    return make_method_federation("rofsl", options, {**HP, **(hp or {})}, **settings)


class RobustServerLearning(ReferenceFedAvg):
    """Filter, clip, geometric median, then the server's own steps."""

    def __init__(self, federation, *, rule="loss", clips=True, epochs=2):
        super().__init__(federation)
        self.rule, self.clips, self.epochs, self.num_dropped = rule, clips, epochs, 0

    def server_loss(self, vector):
        params = self.params(vector)
        return cross_entropy(SERVER_INPUTS @ params["w"] + params["b"], SERVER_EXAMPLES[1])

    def is_kept(self, change):
        margin, start = self.hp["filter_margin"], self.global_vector
        if self.rule == "loss":
            return self.server_loss(start + change) <= (1 + margin) * self.server_loss(start)
        if self.rule == "angle":
            descent = -self.gradient(start, SERVER_INPUTS, SERVER_EXAMPLES[1])
            lengths = np.linalg.norm(change) * np.linalg.norm(descent)
            return change @ descent >= margin * lengths
        return True

    def update_server(self, r, clients, models):
        changes = [model - self.global_vector for model in models]
        weights = self.aggregation_weights(clients)
        kept = [i for i, change in enumerate(changes) if self.is_kept(change)]
        self.num_dropped += len(changes) - len(kept)
        average = self.global_vector
        if kept:
            rows, weights = np.array([changes[i] for i in kept]), weights[kept]
            weights = weights / weights.sum()
            if self.clips:
                norms = np.linalg.norm(rows, axis=1)
                rows = rows * np.minimum(1, np.median(norms) / norms)[:, None]
            center = weights @ rows
            for _ in range(16):
                distances = np.maximum(np.linalg.norm(rows - center, axis=1), 1e-6)
                center = (weights / distances) @ rows / (weights / distances).sum()
            average = self.step_towards(self.global_vector + center)
        key = fold_in_purpose(round_key(r), Purpose.SERVER)
        batches = list(server_batches(key, self.epochs, len(SERVER_EXAMPLES[1])))
        steps = np.mean([len(self.minibatches(r, k)) for k in clients])
        reach = self.hp["server_lr"] * self.hp["local_lr"] * steps
        lr = self.hp["gamma"] * reach / len(batches)
        self.global_vector = self.run_sgd(average, SERVER_INPUTS, SERVER_EXAMPLES[1], batches, lr)


@pytest.mark.parametrize(
    ("options", "margin"),
    [
        ({}, 0.0),
        ({"clipping": "none"}, -0.02),
        ({"filter": "angle"}, 0.3),
        ({"filter": "none"}, 0.0),
        ({"filter": "angle"}, 1.0),  # no update is kept
    ],
)
def test_three_rounds_match_the_loop(options, margin):
    federation = make_federation(options, {"filter_margin": margin}, participation=0.8)
    rule, clips = options.get("filter", "loss"), options.get("clipping") != "none"
    loop = RobustServerLearning(federation, rule=rule, clips=clips)
    run_and_compare(loop, 3, atol=2e-5)
    num_updates = sum(map(len, loop.history))
    assert (loop.num_dropped == num_updates) == (margin == 1.0)
    assert (loop.num_dropped == 0) == (rule == "none")


@pytest.mark.slow
def test_without_filter_and_clipping_it_is_fsl_with_the_geometric_median():
    options = {"filter": "none", "clipping": "none"}
    settings = {"rounds": 3, "server_options": {"size": 6}, "protocol": "fsl"}
    robust = run_spec(make_spec("rofsl", options=options, **settings))
    plain = run_spec(make_spec("fsl", aggregation="geometric_median", **settings))
    np.testing.assert_array_equal(robust.metrics["test_loss"], plain.metrics["test_loss"])


@pytest.mark.slow
def test_rule_of_the_run_replaces_the_geometric_median():
    settings = {"rounds": 2, "server_options": {"size": 6}, "options": {"filter": "none"}}
    losses = [
        run_spec(make_spec("rofsl", aggregation=rule, **settings)).metrics["test_loss"]
        for rule in (None, "geometric_median", "median")
    ]
    np.testing.assert_array_equal(losses[0], losses[1])
    assert not np.array_equal(losses[0], losses[2])


@pytest.mark.parametrize(("rule", "devices"), [("loss", 2), slow_case("angle", 2)])
def test_server_work_can_be_shared(rule, devices):
    settings = {"rounds": 3, "server_options": {"size": 7}, "options": {"filter": rule}}
    spec = make_spec("rofsl", attack="sign_flip:fraction=0.5", **settings)
    reference = run_spec(spec, devices=1, lanes=1)
    shared = run_spec(spec, devices=devices, lanes=2, server_work="shared")
    np.testing.assert_allclose(
        shared.metrics["test_loss"], reference.metrics["test_loss"], rtol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["loss", "angle"])
def test_majority_of_malicious_clients_is_filtered(rule):
    """On the digits, with 60 % of the clients sending the negative of their update."""
    from fedjax_het import RunSpec

    settings = {"dataset": "digits", "model": "mlp", "num_clients": 10, "rounds": 12}
    settings |= {"local_epochs": 2, "learning_rate": 0.05, "attack": "sign_flip:fraction=0.6"}
    server = {"server_options": {"size": 50}, "pretrain_epochs": 5}
    robust = simulate(RunSpec("rofsl", **settings, **server, options={"filter": rule}))
    plain = simulate(RunSpec("fsl", **settings, **server))
    assert robust.final_accuracy > plain.final_accuracy + 0.15
    flat = flatten_params(jax.tree.map(np.asarray, robust.model().variables["params"]["head"]))
    assert np.isfinite(flat).all()
