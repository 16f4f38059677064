"""Losses and scores of each kind of task against oracles in float64, and checks of labels."""

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het import ConfigError, RunSpec, dataset_from_arrays, simulate
from fedjax_het.tasks import TASKS, Regression, Survival, register_task
from fedjax_het.tasks.survival import encode_survival

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(5, 4)).astype(np.float32)
SEQUENCES = RNG.normal(size=(3, 6, 4)).astype(np.float32)
TOKENS = RNG.integers(0, 4, (3, 6))
TOKENS[0, 2:], TOKENS[1, -1] = -1, -1


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def compute_classification():
    labels = np.array([0, 3, 1, 2, 2])
    losses = -log_softmax(LOGITS)[np.arange(5), labels]
    return LOGITS, labels, losses, LOGITS.argmax(1) == labels, np.ones(5)


def compute_multi_label():
    labels = RNG.integers(0, 2, (5, 4)).astype(np.float32)
    probabilities = 1 / (1 + np.exp(-LOGITS.astype(np.float64)))
    losses = -np.log(np.where(labels > 0, probabilities, 1 - probabilities)).mean(1)
    return LOGITS, labels, losses, ((LOGITS > 0) == (labels > 0)).mean(1), np.ones(5)


def compute_regression():
    labels = RNG.normal(size=(5, 4)).astype(np.float32)
    errors = (LOGITS.astype(np.float64) - labels) ** 2
    scores = 1 - (errors / labels.astype(np.float64).var(0)).mean(1)
    return LOGITS, labels, errors.mean(1), scores, np.ones(5)


def compute_next_token():
    losses, scores = np.zeros(3), np.zeros(3)
    for row, (labels, outputs) in enumerate(zip(TOKENS, SEQUENCES, strict=True)):
        valid = np.flatnonzero(labels >= 0)
        losses[row] = -log_softmax(outputs)[valid, labels[valid]].mean()
        scores[row] = (outputs.argmax(-1) == labels)[valid].mean()
    return SEQUENCES, TOKENS, losses, scores, (TOKENS >= 0).sum(1)


def compute_survival():
    labels = np.array([[0, 0, 1, -1], [1, -1, -1, -1], [0, 0, 0, 0], [0, -1, -1, -1], [0, 0, 0, 1]])
    hazards = 1 / (1 + np.exp(-LOGITS.astype(np.float64)))
    null = np.array([1 / 5, 0 / 3, 1 / 3, 1 / 2])  # events by numbers at risk
    losses, null_losses = np.zeros(5), np.zeros(5)
    for values, rates in ((losses, hazards), (null_losses, np.tile(null, (5, 1)))):
        for row, column in np.argwhere(labels >= 0):
            rate = rates[row, column]
            values[row] -= np.log(rate if labels[row, column] else 1 - rate)
    return LOGITS, labels, losses, 1 - losses / null_losses.mean(), np.ones(5)


ORACLES = {
    "classification": compute_classification,
    "multi_label": compute_multi_label,
    "regression": compute_regression,
    "next_token": compute_next_token,
    "survival": compute_survival,
}


@pytest.mark.parametrize("name", TASKS)
def test_losses_and_scores(name):
    outputs, labels, losses, scores, counts = ORACLES[name]()
    kind = TASKS[name].make.from_labels(labels)
    data = jnp.asarray(outputs), jnp.asarray(labels)
    np.testing.assert_allclose(kind.compute_losses(*data), losses, rtol=2e-6)
    np.testing.assert_allclose(kind.compute_scores(*data), scores, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(kind.count_targets(data[1]), counts)
    broken = data[0].at[1].set(jnp.nan)
    is_hidden = np.isnan(kind.compute_scores(broken, data[1]))
    np.testing.assert_array_equal(is_hidden, np.arange(len(outputs)) == 1)


def test_mean_score_of_regression_is_r2():
    from sklearn.metrics import r2_score

    outputs, labels, *_ = compute_regression()
    kind = Regression.from_labels(labels)
    score = kind.compute_scores(jnp.asarray(outputs), jnp.asarray(labels)).mean()
    np.testing.assert_allclose(score, r2_score(labels, outputs), rtol=1e-5)


def test_survival_of_cohort():
    """Labels and the null model against Kaplan and Meier's estimate, computed by hand."""
    rng = np.random.default_rng(0)
    times, events = rng.exponential(3, 200), rng.random(200) < 0.6
    times[:4] = 0, 1, 2, 2  # ends of intervals
    ends, labels = [1.0, 2.0, 5.0], encode_survival(times, events, [1.0, 2.0, 5.0])
    for row, (time, event) in enumerate(zip(times, events, strict=True)):
        begin = -1.0
        for column, end in enumerate(ends):
            expected = -1
            if time > end or (time == end and not event):
                expected = 0
            elif event and begin < time <= end:
                expected = 1
            assert labels[row, column] == expected
            begin = end
    survival = np.cumprod([1 - (c == 1).sum() / (c >= 0).sum() for c in labels.T])
    rates = 1 - survival / np.concatenate([[1], survival[:-1]])
    outputs = np.tile(np.log(rates / (1 - rates)), (200, 1))
    kind = Survival.from_labels(labels)
    np.testing.assert_allclose(kind.predict(outputs)[0], survival, rtol=1e-6)
    score = kind.compute_scores(jnp.asarray(outputs, jnp.float32), jnp.asarray(labels)).mean()
    np.testing.assert_allclose(score, 0, atol=1e-6)


INPUTS = np.zeros((6, 3), np.float32)


def make_dataset(task, labels, inputs=INPUTS, **settings):
    return dataset_from_arrays(inputs, labels, inputs, labels, task=task, **settings)


@pytest.mark.parametrize(
    ("task", "labels", "message"),
    [
        ("regresion", np.zeros(6), "did you mean 'regression'"),
        ("regression", np.zeros(5), "shape of train_labels"),
        ("regression", np.full(6, np.nan), "not finite"),
        ("regression", ["a"] * 6, "dtype of train_labels"),
        ("multi_label", np.zeros(6), "shape of train_labels"),
        ("multi_label", np.full((6, 2), 0.5), "zeros and ones"),
        ("next_token", np.zeros((6, 3), int), "num_tokens"),
        ("survival", np.zeros(6, int), "shape of train_labels"),
        ("survival", np.full((6, 2), 2), "of -1, 0 and 1"),
        ("survival", [[0, 1, 0]] * 6, "-1 after each -1 and each 1"),
        ("classification", np.full(6, 0.5), "expected integers or texts"),
    ],
)
def test_invalid_labels(task, labels, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_dataset(task, labels)
    assert "\n" not in str(error.value)


def test_labels_of_regression_have_two_axes():
    dataset = make_dataset("regression", np.arange(6))
    assert dataset.train_labels.shape == (6, 1) and dataset.num_outputs == 1
    np.testing.assert_array_equal(dataset.train_classes, np.zeros(6))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition": "dirichlet", "alpha": 0.5}, "partition 'dirichlet' reads classes"),
        ({"skew": "label_noise:rate=0.1"}, "skew 'label_noise' reads classes"),
        ({"skew": "long_tail:ratio=5"}, "skew 'long_tail' reads classes"),
        ({"metrics": "macro_f1"}, "metric 'macro_f1' reads classes"),
        ({"algorithm": "fedlc"}, "fedlc reads classes"),
        ({"model": "cnn"}, "network 'cnn' does not accept features"),
        ({"skew": "noise:std=0.1"}, "skew 'noise' does not accept features"),
        ({"metrics": "feature_distance"}, "does not accept features"),
    ],
)
def test_settings_that_do_not_suit_the_data(settings, message):
    dataset = make_dataset("regression", np.arange(6))
    settings = {"model": "mlp", "partition": "iid", "num_clients": 2, "rounds": 1} | settings
    with pytest.raises(ConfigError, match=message) as error:
        simulate(RunSpec(**settings), dataset=dataset)
    assert "\n" not in str(error.value)


def test_task_of_a_user():
    @dataclass(frozen=True)
    class MedianRegression(Regression):
        name: ClassVar[str] = "median_regression"
        description: ClassVar[str] = "absolute error"

        def compute_losses(self, outputs, labels):
            return jnp.abs(outputs - labels).mean(-1)

    register_task(MedianRegression)
    try:
        rng = np.random.default_rng(0)
        inputs = rng.normal(size=(40, 2)).astype(np.float32)
        dataset = make_dataset("median_regression", inputs.sum(1), inputs)
        spec = RunSpec(
            model="mlp", partition="iid", num_clients=2, rounds=1, local_epochs=1, seed=1
        )
        result = simulate(spec, dataset=dataset)
        outputs = result.model().logits(inputs)
        expected = np.abs(outputs - dataset.test_labels).mean()
        np.testing.assert_allclose(result.metrics["test_loss"][-1], expected, rtol=1e-5)
    finally:
        TASKS.reset()


BROKEN_FUNCTIONS = {
    "mean loss": (
        "compute_losses",
        lambda self, outputs, labels: jnp.abs(outputs - labels).mean(),
        r"compute_losses returned float32\[\] for float32\[\d,3\], float32\[\d,3\]: expected "
        r"float32\[\d\], the loss of each of \d examples",
    ),
    "loss per output": (
        "compute_losses",
        lambda self, outputs, labels: jnp.abs(outputs - labels),
        r"compute_losses returned float32\[\d,3\]",
    ),
    "no loss": ("compute_losses", lambda self, outputs, labels: None, "returned None"),
    "failing loss": (
        "compute_losses",
        lambda self, outputs, labels: outputs @ labels,
        r"compute_losses fails for .* \(.*\): expected a pure function of jax arrays",
    ),
    "no gradient": (
        "compute_losses",
        lambda self, outputs, labels: jax.lax.while_loop(
            lambda x: x.sum() < 9, lambda x: x + 1, outputs
        ).mean(-1),
        "the gradient of compute_losses fails",
    ),
    "mean score": (
        "compute_scores",
        lambda self, outputs, labels: (outputs > labels).mean(),
        r"compute_scores returned float32\[\]",
    ),
    "score of NumPy": (
        "compute_scores",
        lambda self, outputs, labels: np.asarray(outputs).mean(-1),
        "compute_scores fails for .*TracerArrayConversionError",
    ),
    "one weight": (
        "count_targets",
        lambda self, labels: 1.0,
        r"count_targets returned float32\[\]",
    ),
    "variable constants": (
        "from_labels",
        classmethod(lambda cls, labels: cls(variances=[1.0])),
        "from_labels = .*: expected a Broken with fields that have a hash",
    ),
    "no kind": ("from_labels", classmethod(lambda cls, labels: None), "from_labels = None"),
    "labels in float64": (
        "validate_labels",
        staticmethod(lambda argument, labels, *inputs: np.float64(labels)),
        r"validate_labels returned float64\[6,3\] for train_labels: expected an array of NumPy",
    ),
    "fraction of outputs": (
        "count_outputs",
        staticmethod(lambda labels, num_tokens: 1.5),
        "count_outputs = 1.5: expected an integer of at least 1",
    ),
}


@pytest.mark.parametrize("case", BROKEN_FUNCTIONS)
def test_broken_task_of_a_user_is_one_line_before_compilation(case, monkeypatch):
    name, function, message = BROKEN_FUNCTIONS[case]
    fields = {"name": "broken", "description": "a task", name: function}
    register_task(dataclass(frozen=True)(type("Broken", (Regression,), fields)))
    monkeypatch.setattr(jax, "jit", None)
    spec = RunSpec(model="mlp", partition="iid", num_clients=2, rounds=1, local_epochs=1)
    try:
        with pytest.raises(ConfigError, match=message) as error:
            simulate(spec, dataset=make_dataset("broken", np.zeros((6, 3))))
        assert str(error.value).startswith("task 'broken': ") and "\n" not in str(error.value)
    finally:
        TASKS.reset()


def test_register_task_requires_static_objects():
    class NoDescription(Survival):
        name = "own"
        description = None

    class Mutable(Regression):
        name: ClassVar[str] = "own"

        def __eq__(self, other):
            return self is other

    @dataclass(frozen=True)
    class Incomplete(Regression):
        name: ClassVar[str] = "own"
        scale: float = field(kw_only=True)

    for kind, message in (
        (NoDescription, "NoDescription.description = None: expected a text"),
        (Mutable, r"expected a class whose objects have a hash: @dataclass\(frozen=True\)"),
        (Incomplete, r"Incomplete\(\) fails .*'scale'.*: expected fields with defaults"),
    ):
        with pytest.raises(ConfigError, match=message):
            register_task(kind)
    assert "own" not in TASKS


def test_next_tokens_are_below_their_number():
    tokens = np.arange(24).reshape(4, 6) % 5
    arrays = {"test_inputs": tokens, "test_labels": tokens, "train_inputs": tokens}
    with pytest.raises(
        ConfigError, match=r"range of train_labels = 5: expected tokens in \[0, 5\)"
    ):
        dataset_from_arrays(train_labels=tokens + 1, num_tokens=5, task="next_token", **arrays)


def test_tokens_without_any_label_are_refused():
    tokens = np.ones((4, 3), np.int32)
    with pytest.raises(ConfigError, match=r"train_labels = -1: .* not -1 everywhere"):
        TASKS["next_token"].make.validate_labels("train_labels", -tokens, "train_inputs", tokens)
