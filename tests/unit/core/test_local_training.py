"""Local work by steps instead of epochs, and steps of several minibatches."""

import jax
import numpy as np
import pytest
from chex import assert_trees_all_close
from support.algorithm_builders import default_hyper_parameters, make_builder
from support.data import BATCH_SIZE, CLIENT_SIZES, make_user_dataset
from support.markers import slow_case
from support.reference_loop import ReferenceFedAvg, run_and_compare
from support.small_federation import consecutive_partition, make_small_federation
from support.small_runs import LOCAL_RUN

from fedjax_het import ConfigError, RunSpec, simulate
from fedjax_het.algorithms import get_algorithm_spec
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fednova import compute_effective_steps
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.optimizers import LocalTrainingOptions
from fedjax_het.core.schedule import RoundSettings, Scheduler, compute_useful_fraction
from fedjax_het.core.work_items import ClientWork

STEPS = 5
EVEN = (8, 16, 0, 8, 24)  # of which every epoch tiles into steps of two minibatches
NADAM, FEDDM = {"local_optimizer": "nadam"}, {"algorithm": "feddm"}
SMALL = LOCAL_RUN | {"local_optimizer": "sgd", "rounds": 4, "participation": 0.5}
DATA = make_user_dataset()


def run(spec, **settings):
    return simulate(spec, dataset=DATA, **settings)


# --- by steps ------------------------------------------------------------------------------------


def test_local_steps_reshuffle_after_each_pass():
    partition = consecutive_partition(CLIENT_SIZES)
    units = ClientWork(partition, 0, BATCH_SIZE, extra_batches=STEPS)
    for client, size in enumerate(CLIENT_SIZES):
        batches, sizes = units.draw_batches(3, 1, np.array([client]))
        steps = STEPS if size else 0
        assert len(batches) == len(sizes) == units.num_steps[client] == steps
        assert sizes.sum() == units.num_samples[client]
        seen = np.concatenate([b[:n] for b, n in zip(batches, sizes, strict=True)] or [[]])
        counts = np.bincount(seen.astype(int), minlength=sum(CLIENT_SIZES))[
            partition.client_indices(client)
        ]
        if size:  # each example once before any is there again
            assert counts.max() - counts.min() <= 1 and counts.sum() == sizes.sum()
        whole = ClientWork(partition, 20, BATCH_SIZE, max_num_steps=STEPS).draw_batches(
            3, 1, np.array([client])
        )
        per_pass = -(-size // BATCH_SIZE)
        if per_pass:  # the passes are those of epochs
            same = min(STEPS, per_pass)
            np.testing.assert_array_equal(batches[:same], whole[0][:same])


def test_extra_batches_follow_complete_pass():
    partition = consecutive_partition(CLIENT_SIZES)
    both = ClientWork(partition, 1, BATCH_SIZE, extra_batches=STEPS)
    per_pass = -(-np.array(CLIENT_SIZES) // BATCH_SIZE)
    np.testing.assert_array_equal(both.num_steps, per_pass + STEPS * (per_pass > 0))
    for client in np.flatnonzero(CLIENT_SIZES):
        _, sizes = both.draw_batches(0, 0, np.array([client]))
        assert sizes[: per_pass[client]].sum() == CLIENT_SIZES[client]


def test_work_counts_equal_drawn_samples():
    partition = consecutive_partition(CLIENT_SIZES)
    units = ClientWork(partition, 0, BATCH_SIZE, extra_batches=STEPS)
    settings = RoundSettings(seed=0, num_rounds=3, averaging="weighted")
    scheduler = Scheduler(units, settings, blocks=1, lanes=1)
    seen = [
        sum(scheduler.client_batches(r, k)[1].sum() for k in range(len(CLIENT_SIZES)))
        for r in range(3)
    ]
    np.testing.assert_array_equal(scheduler.work_counts.samples, seen)
    steps = STEPS * sum(size > 0 for size in CLIENT_SIZES)
    np.testing.assert_array_equal(scheduler.work_counts.block_steps[:, 0], steps)
    assert compute_useful_fraction([scheduler], is_concurrent=False) == sum(seen) / (
        3 * steps * BATCH_SIZE
    )


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_local_steps_equal_reference(averaging):
    details = LocalTrainingOptions(num_steps=STEPS)
    settings = {"participation": 0.6, "averaging": averaging, "details": details}
    loop = ReferenceFedAvg(make_small_federation(fedavg, hp={"local_lr": 0.2}, **settings))
    run_and_compare(loop, 3, atol=5e-6)
    for k in loop.history[0]:
        assert len(loop.minibatches(0, k)) == STEPS


class Scaffold(ReferenceFedAvg):
    """Option I by steps: c_i' is the gradient at x over all of the client's data."""

    def __init__(self, federation):
        super().__init__(federation)
        self.server = np.zeros_like(self.global_vector)

    def init_client_state(self, client):
        return np.zeros_like(self.global_vector) if hasattr(self, "vector") else 0.0

    def train_client(self, r, client):
        model, held = self.global_vector, [self.minibatches(r, client)]
        batches = held[0]
        measuring, training = batches[:-STEPS], batches[-STEPS:]
        x, y = (np.concatenate([getattr(b, part) for b in measuring]) for part in "xy")
        assert len(y) == self.client_sizes[client]
        for batch in training:
            gradient = self.gradient(model, batch.x, batch.y)
            slope = gradient - self.client_states[client] + self.server
            model = model - self.hp["local_lr"] * slope
        self.new[client] = self.gradient(self.global_vector, x, y)
        return model

    def before_round(self, r):
        self.new = {}

    def update_server(self, r, clients, models):
        super().update_server(r, clients, models)
        weights = self.client_weights()
        for k in clients:
            self.server = self.server + weights[k] * (self.new[k] - self.client_states[k])
            self.client_states[k] = self.new[k]


def test_scaffold_option_one_adds_a_pass():
    build = make_builder(get_algorithm_spec("scaffold", {}), {"option": "I"})
    settings = {"details": LocalTrainingOptions(num_steps=STEPS), "participation": 0.6}
    loop = Scaffold(make_small_federation(build, hp={"local_lr": 0.1}, **settings))
    run_and_compare(loop, 4, atol=5e-6)
    assert loop.count_repeat_clients()


@pytest.mark.parametrize("option", ["I", "II"])
def test_local_steps_do_not_depend_on_lanes(option):
    build = make_builder(get_algorithm_spec("scaffold", {}), {"option": option})
    details = LocalTrainingOptions(num_steps=3, accumulation_steps=2)
    settings = {"hp": {"local_lr": 0.1}, "details": details}
    plans = [make_execution_plan(lanes, 1, mesh_axis=None) for lanes in (1, 2)]
    one, two = (make_small_federation(build, plan=plan, **settings).run(3)[0] for plan in plans)
    assert_trees_all_close(one.server, two.server, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"base": "scaffold", "option": "I"}])
def test_fsl_server_steps_follow_client_steps(options):
    """K_0 eta_0 = K eta: of as many steps as an epoch has, what the epoch gives."""
    entry = get_algorithm_spec("fsl", options)
    numbers = default_hyper_parameters(entry, options) | {"local_lr": 0.1}
    settings = {"hp": numbers, "sizes": (8,) * 4}
    build = make_builder(entry, options)
    choices = (LocalTrainingOptions(), LocalTrainingOptions(num_steps=8 // BATCH_SIZE))
    models = [make_small_federation(build, details=c, **settings).train(2) for c in choices]
    assert_trees_all_close(*models, atol=1e-6)


@pytest.mark.parametrize("name", ["fedavg", slow_case("fsl")])
def test_steps_of_one_epoch_equal_epoch_bitwise(name):
    """Also what FSL's server makes of them, whose epochs go by what clients see."""
    arguments = {**SMALL, "algorithm": name, "hp": {"local_lr": 0.1}}
    if name == "fsl":
        arguments |= {"pretrain_epochs": 0, "server_options": {"size": 3}, "rounds": 2}
    epoch = run(RunSpec(**arguments, local_epochs=1))
    steps = -(-len(DATA.train_labels) // SMALL["num_clients"] // SMALL["batch_size"])
    same = run(RunSpec(**arguments, local_steps=steps))
    for curve in ("test_loss", "update_norm", "train_loss"):
        np.testing.assert_array_equal(same.metrics[curve], epoch.metrics[curve])
    assert epoch.metrics["update_norm"].min() > 0


# --- accumulation --------------------------------------------------------------------------------


class Accumulating(ReferenceFedAvg):
    """The mean gradient of so many minibatches, and of what is left at a round's end."""

    several = 3

    def __init__(self, federation):
        super().__init__(federation)
        self.left = set()

    def train_client(self, r, client):
        model, batches = self.initial_client_model(client), self.minibatches(r, client)
        for first in range(0, len(batches), self.several):
            part = batches[first : first + self.several]
            slope = sum(self.descent_direction(model, batch) for batch in part) / len(part)
            model = model - self.hp["local_lr"] * slope
        self.left.add(len(batches) % self.several)
        return model


def test_accumulation_equals_reference():
    details = LocalTrainingOptions(accumulation_steps=3)
    settings = {"epochs": 2, "participation": 0.6, "details": details}
    loop = Accumulating(make_small_federation(fedavg, hp={"local_lr": 0.3}, **settings))
    run_and_compare(loop, 3, atol=5e-6)
    assert {0} < loop.left  # where it fits, and where something is left


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "feddc", "fednova", "ditto"])
def test_accumulation_equals_larger_batch(name):
    """Under momentum, whose state is one of steps; the examples of a step are the same."""
    entry = get_algorithm_spec(name, {})
    numbers = default_hyper_parameters(entry, {}, "momentum", len(EVEN)) | {"local_lr": 0.1}
    common = {
        "sizes": EVEN,
        "epochs": 2,
        "optimizer": "momentum",
        "client_test_model": entry.evaluated_models[0],
    }
    halves, whole = (
        make_small_federation(make_builder(entry, {}), hp=numbers, **common, **more)
        for more in (
            {"batch_size": 4, "details": LocalTrainingOptions(accumulation_steps=2)},
            {"batch_size": 8},
        )
    )
    states = [federation.run(3)[0] for federation in (halves, whole)]
    models = [
        federation.global_params(state)
        for federation, state in zip((halves, whole), states, strict=True)
    ]
    assert_trees_all_close(*models, atol=2e-6)
    start = whole.global_params(whole.initial_state())
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), models[1], start)
    assert max(jax.tree.leaves(moved)) > 0.1


def test_fednova_counts_accumulated_steps():
    training = LocalTraining(None, "nesterov", options=LocalTrainingOptions(accumulation_steps=2))
    r, unit = 0.6, 1.0
    for minibatches in (1, 4, 5):
        velocity = moved = 0.0
        for _ in range(-(-minibatches // 2)):
            velocity = r * velocity + unit
            moved += unit + r * velocity
        actual = compute_effective_steps(training, {"local_momentum": r}, np.int32(minibatches))
        np.testing.assert_allclose(actual, moved, rtol=1e-6)


def test_incomplete_accumulation_steps_at_round_end():
    details = LocalTrainingOptions(accumulation_steps=100)
    loop = Accumulating(make_small_federation(fedavg, hp={"local_lr": 0.1}, details=details))
    loop.several = 100
    run_and_compare(loop, 2, atol=5e-6)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"local_steps": 3, "local_epochs": 2}, "local_epochs = 2: expected no value"),
        ({"local_steps": 0}, "local_steps = 0: expected a whole number in [1, 1e+06]"),
        ({"gradient_accumulation": 0}, "gradient_accumulation = 0: expected a whole number in [1"),
        ({"gradient_accumulation": 1.5}, "gradient_accumulation = 1.5: expected a whole number"),
        ({"algorithm": "fedaf", "local_steps": 3}, "local_steps = 3: expected no value: clients"),
        ({"local_optimizer": "lyon"}, "local_optimizer = 'lyon' is unknown: did you mean 'lion'"),
        ({"hp": {"local_clip_norm": 0}}, "hp local_clip_norm = 0: expected a finite number > 0"),
        ({"hp": {"local_weight_decay": -1}}, "hp local_weight_decay = -1: expected"),
        ({"hp": {"local_b1": 0.5}, "local_optimizer": "sgd"}, "hp = 'local_b1' is unknown"),
        ({"hp": {"local_b1": 1}, "local_optimizer": "lion"}, "hp local_b1 = 1: expected a num"),
        (
            {"local_optimizer": "lion", "optimizer_options": {"nesterov": True}},
            "optimizer_options = 'nesterov' is unknown: no name is valid here",
        ),
        (
            {"optimizer_options": {"nesterov": 1}, **NADAM},
            "optimizer_options nesterov = 1: expected T",
        ),
        ({"algorithm": "feddm", "local_optimizer": "lion"}, "local_optimizer = 'lion': expected n"),
        (
            {**FEDDM, "gradient_accumulation": 2},
            "gradient_accumulation = 2: expected no value: cli",
        ),
        ({"lr_schedule": "cosin"}, "lr_schedule = 'cosin' is unknown: did you mean 'cosine'"),
        ({"lr_schedule": "step"}, "hp lr_every = None: expected a number of rounds >= 1"),
        ({"lr_step_schedule": "linear"}, "hp lr_step_length = None: expected a number of steps"),
        (
            {"hp": {"lr_decay": 0.5}},
            "hp lr_decay = 0.5: expected no value, or lr_schedule step or exponential",
        ),
        (
            {"lr_schedule": "cosine", "hp": {"lr_decay": 0.5}},
            "hp lr_decay = 0.5: expected no value, or lr_schedule step or exponential",
        ),
        ({"hp": {"lr_step_length": 5}}, "expected no value, or lr_step_schedule cosine or linear"),
        ({"lr_schedule": "cosine", "hp": {"lr_length": 0}}, "hp lr_length = 0: expected a finite"),
        ({"lr_schedule": "exponential", "hp": {"lr_decay": 0}}, "hp lr_decay = 0: expected a num"),
        ({"algorithm": "feddm", "lr_schedule": "linear"}, "lr_schedule = 'linear': expected no v"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ConfigError) as error:
        RunSpec(**settings).resolved()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_local_steps_replace_local_epochs():
    spec = RunSpec(local_steps=7).resolved()
    assert spec.local_epochs is None and spec.local_steps == 7
    assert spec.resolved() == spec and spec.digest() != RunSpec().digest()
