"""Measures of the synthetic data of runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from support.data import make_user_dataset
from support.small_runs import SYNTHESIS_OPTIONS, make_spec, run_spec

from fedjax_het import ConfigError, Result, dataset_from_arrays
from fedjax_het.analysis.synthetic_measures import (
    build_task,
    load_synthetic_data,
    measure_synthetic_data,
)
from fedjax_het.condensation import SyntheticData, SyntheticTask, unroll
from fedjax_het.condensation.downstream_eval import HARD_LABEL_LOGIT, random_subset

USER = make_user_dataset()
LABELS = np.repeat(np.arange(USER.num_classes), 8)
DATA = dataset_from_arrays(
    *(USER.train_inputs[random_subset(USER.train_labels, LABELS, seed=0)], LABELS),
    *(USER.test_inputs, USER.test_labels),
)
FEW = {"dataset": DATA, "num_networks": 1, "epochs": 1, "real_accuracy": 0.9}
NUM_SAMPLES = 6


@pytest.fixture(scope="module")
def result():
    """Return a result without a state, with random synthetic data."""
    rng = np.random.default_rng(0)
    artifacts = {
        "synthetic_images": rng.normal(size=(NUM_SAMPLES, *DATA.input_shape)).astype(np.float32),
        "synthetic_label_logits": rng.normal(size=(NUM_SAMPLES, DATA.num_classes)),
        "synthetic_step_size": np.float32(0.3),
    }
    options = {**SYNTHESIS_OPTIONS, "augment_strategy": "none"}
    spec = make_spec("dynafed", rounds=5, options=options)
    return Result(spec.resolved(), {}, {}, artifacts)


@pytest.fixture(scope="module")
def trajectory(result):
    params = build_task(result, DATA).model.init(jax.random.key(0))["params"]
    size, rounds = ravel_pytree(params)[0].size, result.spec.options["trajectory_rounds"]
    return np.random.default_rng(1).normal(size=(rounds + 1, size)).astype(np.float32)


def test_matching_loss_by_start(result, trajectory):
    measures = measure_synthetic_data(result, **FEW, trajectory=trajectory)
    options, task = result.spec.options, build_task(result, DATA)
    length = options["segment_length"]
    assert measures.starts.tolist() == [*range(len(trajectory) - length)]
    variables = task.model.init(jax.random.key(0))
    unravel = ravel_pytree(variables["params"])[1]
    network = lambda w, x: task.model.apply({**variables, "params": w}, x, train=True)[0]  # noqa: E731
    synthetic_task = SyntheticTask(network, options["augment_strategy"], options["loss_scaling"])
    for start in measures.starts:
        end = unroll(
            *(synthetic_task, unravel, jnp.asarray(trajectory[start])),
            *(load_synthetic_data(result, DATA.num_classes), jax.random.key(result.spec.seed)),
            num_steps=options["inner_steps"],
            batch_size=options["inner_batch_size"],
        )
        target = trajectory[start + length]
        expected = np.square(end - target).sum() / np.square(trajectory[start] - target).sum()
        assert measures.matching_loss[start] == pytest.approx(expected, rel=1e-4)
    assert measures.by_step().shape == (options["inner_steps"], 5)
    summary = measures.summarize()
    assert summary["matching_loss"] == pytest.approx(measures.matching_loss.mean())
    assert all(np.isfinite(value) for value in summary.values())


def test_real_data_have_no_gap(result, trajectory):
    """The data of the control are all real images, without augmentation."""
    labels = HARD_LABEL_LOGIT * jnp.eye(DATA.num_classes)[DATA.train_labels]
    images = build_task(result, DATA).normalize(jnp.asarray(DATA.train_inputs))
    data = SyntheticData(images, labels, jnp.float32(0.1))
    measures = measure_synthetic_data(result, data=data, trajectory=trajectory, **FEW, num_steps=3)
    table = measures.by_start()
    np.testing.assert_allclose(table["gradient_cosine"], 1, atol=1e-5)
    np.testing.assert_allclose(table["logit_gap"], 0, atol=1e-4)
    assert (table["logit_change"] > 1e-3).all()


@pytest.mark.slow
def test_trajectory_of_run():
    """A loaded result runs its first rounds again."""
    run = run_spec(make_spec("dynafed", rounds=5, options=SYNTHESIS_OPTIONS))
    loaded = Result(run.spec, run.metrics, run.summary, run.artifacts)
    settings = {**FEW, "dataset": USER}
    first, again = (measure_synthetic_data(r, **settings) for r in (run, loaded))
    np.testing.assert_allclose(first.matching_loss, again.matching_loss, rtol=1e-5)
    # The synthesis lowers J, and measures it for targets that it draws.
    loss = run.summary["matching_loss"]
    assert abs(first.matching_loss.mean() - loss) < 0.2


@pytest.mark.slow
def test_starts_of_feddm():
    result = run_spec(make_spec("feddm", rounds=2))
    measures = measure_synthetic_data(result, **{**FEW, "dataset": USER}, num_steps=2)
    assert measures.starts.tolist() == [0, 2] and np.isnan(measures.matching_loss).all()
    assert np.isfinite(measures.by_start()["logit_gap"]).all()


def test_errors(result):
    for change, message in {
        "num_steps": "num_steps = 0: expected a whole number >= 1",
        "num_real": "num_real = 0: expected",
        "epochs": "epochs = 0: expected",
    }.items():
        with pytest.raises(ConfigError, match=message):
            measure_synthetic_data(result, **{**FEW, change: 0})
    with pytest.raises(ConfigError, match="data = 5: expected"):
        measure_synthetic_data(result, **{**FEW, "data": 5})
    with pytest.raises(ConfigError, match="result = None: expected"):
        measure_synthetic_data(None)
    with pytest.raises(ConfigError, match="real_accuracy = 70: expected a number in"):
        measure_synthetic_data(result, **{**FEW, "real_accuracy": 70})
    with pytest.raises(ConfigError, match=r"^trajectory = \(2, 3\): expected shape"):
        measure_synthetic_data(result, **FEW, trajectory=np.zeros((2, 3)))
    with pytest.raises(ConfigError, match="dataset = None: expected the user's data of the run"):
        measure_synthetic_data(result)
    plain = Result(make_spec(rounds=1).resolved(), {}, {})
    with pytest.raises(ConfigError, match=r"result = .*: expected a run of dynafed with synthetic"):
        measure_synthetic_data(plain, dataset=DATA)
