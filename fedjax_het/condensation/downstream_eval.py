"""Quality of synthetic data: accuracy of networks that train on them from scratch."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_het.condensation.augment import DSA_STRATEGY
from fedjax_het.condensation.synthetic_data import SyntheticData, SyntheticTask, Tree, fine_tune
from fedjax_het.condensation.synthetic_pool import (
    PoolTask,
    SyntheticPool,
    make_decayed_sgd,
    train_on_synthetic_pool,
)
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.server_training import EpochRange
from fedjax_het.core.task import Task
from fedjax_het.data import Dataset
from fedjax_het.nn import Model, Variables
from fedjax_het.tasks.classification import correct
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.errors import ConfigError, is_integer_at_least, require
from fedjax_het.utils.former_names import FORMER_INPUT_NAMES, accept_former_arguments

# The recipe of distribution matching's and of trajectory matching's public codes.
LR, BATCH_SIZE, MOMENTUM, WEIGHT_DECAY = 0.01, 256, 0.9, 5e-4
LEARNING_RATES = (0.001, 0.005, 0.01, 0.05, 0.1)
"""Learning rates of cross-entropy that DD-Ranking's public code tries."""
HARD_LABEL_LOGIT = 30.0
"""Label logit of a sample's own class; the others are 0."""
_TEST_BATCH = 500


class MeanStd(NamedTuple):
    """Mean and standard deviation over networks.

    Attributes:
      mean: the mean.
      std: the standard deviation with divisor n - 1; NaN for a single network.
    """

    mean: float
    std: float


class DownstreamAccuracy(NamedTuple):
    """Test accuracies as fractions.

    Attributes:
      synthetic: after training on the condensed images.
      random: after training on random real images.
      gain: synthetic minus random, network by network.

    Example:
      >>> from fedjax_het.condensation import DownstreamAccuracy
      >>> from fedjax_het.condensation.downstream_eval import MeanStd
      >>> accuracy = DownstreamAccuracy(MeanStd(0.6, 0.1), MeanStd(0.4, 0.1), MeanStd(0.2, 0.05))
      >>> accuracy.gain.mean
      0.2
    """

    synthetic: MeanStd
    random: MeanStd
    gain: MeanStd


@accept_former_arguments("compare_with_random_subset", FORMER_INPUT_NAMES)
def compare_with_random_subset(
    model: Model,
    inputs: np.ndarray,
    labels: np.ndarray,
    dataset: Dataset,
    *,
    seed: int = 0,
    num_networks: int = 5,
    epochs: int = 1001,
) -> DownstreamAccuracy:
    """Compare networks trained on condensed images and on equally many real images.

    The recipe follows distribution matching's public code without augmentation. It is cross-entropy
    and SGD at 0.01 in batches of 256 with momentum 0.9 and weight decay 5e-4, for 1,001 epochs. The
    second half of the epochs has a tenth of the rate and a new momentum buffer. Network n starts
    from the same parameters for both. Its real images are drawn from the training set without
    replacement, with the classes of the condensed images.

    Cost: 2 * num_networks * epochs * ceil(M / 256) steps, tests of 2 * num_networks networks, and
    one compilation.

    Args:
      model: the network.
      inputs: condensed images, `[M, H, W, C]` float32, normalized like `dataset`.
      labels: their classes, `[M]` int.
      dataset: source of the real images and of the test images.
      seed: seed of initial parameters, real images and batches.
      num_networks: number of networks per training set.
      epochs: number of epochs.

    Returns:
      Test accuracies of both, and the gain.

    Raises:
      ConfigError: if the arguments do not fit together, or a class has fewer real images than
        condensed ones.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.data import dataset_from_arrays
      >>> from fedjax_het.nn import make_model
      >>> from fedjax_het.condensation import compare_with_random_subset
      >>> inputs, labels = np.arange(24, dtype=np.uint8).reshape(6, 2, 2, 1), np.arange(6) % 3
      >>> dataset = dataset_from_arrays(inputs, labels, inputs, labels)
      >>> model = make_model("mlp", (2, 2, 1), 3, hidden=[4])
      >>> synthetic = np.zeros((3, 2, 2, 1), np.float32)
      >>> accuracy = compare_with_random_subset(
      ...     model, synthetic, np.arange(3), dataset, num_networks=2, epochs=2
      ... )
      >>> 0 <= accuracy.synthetic.mean <= 1
      True
    """
    inputs, labels = np.asarray(inputs, np.float32), np.asarray(labels)
    _check_inputs(model, inputs, labels, dataset.num_classes)
    for name, value in {"num_networks": num_networks, "epochs": epochs}.items():
        require(is_integer_at_least(value, 1), name, value, "a whole number >= 1")
    normalize = Task(model, dataset.mean, dataset.std).normalize
    input_sets = [jnp.asarray(inputs)]
    for n in range(num_networks):
        subset = random_subset(dataset.train_labels, labels, seed=seed, subset_index=n)
        input_sets.append(normalize(jnp.asarray(dataset.train_inputs[subset])))
    set_indices = np.append(np.zeros(num_networks, np.int32), np.arange(num_networks) + 1)
    keys = jax.random.split(make_key(seed), num_networks)
    networks = (set_indices, jnp.concatenate([keys, keys]))
    test = Examples(normalize(jnp.asarray(dataset.test_inputs)), jnp.asarray(dataset.test_labels))
    args = (model, jnp.stack(input_sets), jnp.asarray(labels, jnp.int32), networks, test)
    accuracies = _train_and_test_sets(*args, epochs=epochs)
    synthetic, random = np.asarray(accuracies, np.float64).reshape(2, num_networks)
    return DownstreamAccuracy(*map(_mean_std, (synthetic, random, synthetic - random)))


def _check_inputs(model: Model, inputs: np.ndarray, labels: np.ndarray, num_classes: int) -> None:
    """Raise ConfigError unless inputs and labels fit the network and the number of classes."""
    is_valid = inputs.ndim == 4 and inputs.shape[1:] == model.input_shape and len(inputs) > 0
    require(is_valid, "shape of inputs", inputs.shape, f"[M, *{model.input_shape}]")
    is_valid = labels.shape == inputs.shape[:1] and np.issubdtype(labels.dtype, np.integer)
    require(is_valid, "labels", f"{labels.dtype} {labels.shape}", f"{len(inputs)} integers")
    in_range = bool(labels.min() >= 0 and labels.max() < num_classes)
    require(in_range, "labels", labels, f"classes in [0, {num_classes})")


def random_subset(
    train_labels: np.ndarray, labels: np.ndarray, *, seed: int, subset_index: int = 0
) -> np.ndarray:
    """Draw a random subset of the training set with given classes, without replacement.

    Args:
      train_labels: classes of the training set, `[N]`.
      labels: classes to draw, `[M]`.
      seed: seed of the draw.
      subset_index: number of the subset of this seed.

    Returns:
      Positions in the training set, int64 `[M]`, so that `train_labels[positions]` equals `labels`.

    Raises:
      ConfigError: if the training set has too few images of a class.
    """
    rng = np.random.default_rng([seed, subset_index])
    positions = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(train_labels == label)
        is_label = labels == label
        if is_label.sum() > len(members):
            raise ConfigError(
                f"{len(labels)} random real images need {is_label.sum()} of class {label}: expected "
                f"at most {len(members)}, the number in the training set"
            )
        positions[is_label] = rng.permutation(members)[: is_label.sum()]
    return positions


def train_from_init(
    model: Model, inputs: Array, labels: Array, key: Array, lr: Array | float, *, epochs: int
) -> Variables:
    """Train a new network on `inputs` by the recipe of `compare_with_random_subset`.

    Cost: epochs * ceil(M / 256) steps.

    Args:
      model: the network.
      inputs: `[M, H, W, C]`, normalized.
      labels: `[M]` int32.
      key: key of the initial parameters and the order of the images.
      lr: learning rate at the start; decays as in `make_step_decay_phases`.
      epochs: number of epochs.

    Returns:
      The trained variables.
    """
    init_key, order_key = jax.random.split(key)
    variables = model.init(init_key)
    pool = SyntheticPool(inputs, labels, jnp.ones(len(labels), bool))
    for i, (phase_lr, phase) in enumerate(make_step_decay_phases(lr, epochs)):
        variables = train_on_synthetic_pool(
            *(PoolTask(model), variables, pool, jax.random.fold_in(order_key, i)),
            optimizer=make_decayed_sgd(phase_lr, MOMENTUM, WEIGHT_DECAY),
            epochs=EpochRange(phase.total),
            batch_size=BATCH_SIZE,
        )
    return variables


@partial(jax.jit, static_argnames=("model", "epochs"))
def _train_and_test_sets(
    model: Model,
    input_sets: Array,
    labels: Array,
    networks: tuple[Array, Array],
    test: Examples,
    *,
    epochs: int,
) -> Array:
    """Return the test accuracies `[N]` of networks, which have an index of a set and a key each."""

    def train_and_test_one(network):
        set_index, key = network
        args = (model, input_sets[set_index], labels, key, jnp.float32(LR))
        return _test(model, train_from_init(*args, epochs=epochs), test)

    return jax.lax.map(train_and_test_one, networks)


def _test(model: Model, variables: Variables, test: Examples) -> Array:
    """Return the accuracy of a network on normalized images."""

    def is_correct(example):
        image, label = example
        return correct(model.apply(variables, image[None], train=False)[0][0], label)

    return jax.lax.map(is_correct, tuple(test), batch_size=_TEST_BATCH).mean()


def _mean_std(values: np.ndarray) -> MeanStd:
    """Return mean and standard deviation of values `[N]`."""
    std = float(values.std(ddof=1)) if len(values) > 1 else float("nan")
    return MeanStd(float(values.mean()), std)


def train_from_scratch(
    task: SyntheticTask, params: Tree, synthetic: SyntheticData, key: Array, *, epochs: int = 501
) -> Tree:
    """Train a network on the synthetic data alone: the quality check of DynaFed's Fig. 6.

    SGD in batches of 256 with momentum 0.9 and weight decay 5e-4. The learning rate starts at the
    learned step size and decays as in `make_step_decay_phases`. The momentum buffer is new after
    the decay; orders and augmentations continue. vmap over `params` and `key` for several networks,
    with different initial parameters. (The public code trains three copies of the same initial
    network.)

    Cost: epochs * ceil(M / 256) steps.

    Args:
      task: network, augmentation and loss.
      params: freshly initialized parameters.
      synthetic: the synthetic data.
      key: key of the batches and augmentations.
      epochs: number of epochs.

    Returns:
      Parameters of the same structure.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.condensation import SyntheticData, SyntheticTask, train_from_scratch
      >>> task = SyntheticTask(lambda w, inputs: inputs.reshape(len(inputs), -1) @ w)
      >>> data = SyntheticData(jnp.ones((6, 2, 2, 1)), jnp.zeros((6, 3)), jnp.float32(0.04))
      >>> key = jax.random.key(0)
      >>> train_from_scratch(task, jnp.ones((4, 3)), data, key, epochs=4).shape
      (4, 3)
    """
    for lr, phase_epochs in make_step_decay_phases(synthetic.step_size, epochs):
        params = fine_tune(
            *(task, params, synthetic, key),
            optimizer=make_decayed_sgd(lr, MOMENTUM, WEIGHT_DECAY),
            epochs=phase_epochs,
            batch_size=BATCH_SIZE,
        )
    return params


@partial(jax.jit, static_argnames=("model", "augment_strategy", "loss_scaling", "epochs"))
def train_and_test(
    model: Model,
    synthetic: SyntheticData,
    key: Array,
    test: Examples,
    *,
    augment_strategy: str,
    loss_scaling: str,
    epochs: int,
) -> Array:
    """Train a new network by `train_from_scratch`, and return its test accuracy.

    Args:
      model: the network.
      synthetic: the data, and the learning rate at the start.
      key: key of the initial parameters, batches and augmentations.
      test: normalized test images and their classes.
      augment_strategy: see `SyntheticTask`.
      loss_scaling: see `SyntheticTask`.
      epochs: number of epochs.

    Returns:
      The accuracy, a fraction `[]`.
    """
    init_key, train_key = jax.random.split(key)
    variables = model.init(init_key)

    def apply(params: Tree, inputs: Array) -> Array:
        return model.apply({**variables, "params": params}, inputs, train=True)[0]

    task = SyntheticTask(apply, augment_strategy, loss_scaling)
    params = train_from_scratch(task, variables["params"], synthetic, train_key, epochs=epochs)
    return _test(model, {**variables, "params": params}, test)


class ScratchAccuracies(NamedTuple):
    """Test accuracies of networks that train from scratch, and DD-Ranking's scores.

    All fields are fractions, `[n]` for n networks. Each score is a function of these accuracies.
    DD-Ranking (arXiv:2505.13300) averages a score over networks. Its public code computes the
    exponentials of percentages, which are not in [0, 1]; here they are of fractions, as defined.

    Attributes:
      synthetic: after training on the synthetic data, with their labels and augmentation.
      synthetic_plain: the same training without augmentation.
      synthetic_hard: after training on the synthetic images with their likeliest classes, without
        augmentation.
      random: after training on equally many random real images, with augmentation.
      random_plain: the same training without augmentation.
      real: after training on all real images, without augmentation.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.condensation import ScratchAccuracies
      >>> accuracies = ScratchAccuracies(*map(np.array, ([0.7], [0.6], [0.5], [0.6], [0.6], [0.9])))
      >>> accuracies.compute_lrs().round(3), accuracies.compute_ars().round(3)
      (array([0.21]), array([0.291]))
    """

    synthetic: np.ndarray
    synthetic_plain: np.ndarray
    synthetic_hard: np.ndarray
    random: np.ndarray
    random_plain: np.ndarray
    real: np.ndarray

    @property
    def improvement_over_random(self) -> np.ndarray:
        """IOR: accuracy of the synthetic data minus accuracy of random real images."""
        return self.synthetic - self.random

    @property
    def hard_label_recovery(self) -> np.ndarray:
        """HLR: accuracy of all real images minus accuracy of synthetic images with hard labels."""
        return self.real - self.synthetic_hard

    def compute_lrs(self, weight: float = 0.5) -> np.ndarray:
        """Compute the label-robust score, (e^a - e^-1) / (e - e^-1).

        Args:
          weight: w in a = w IOR - (1 - w) HLR.

        Returns:
          Scores in [0, 1]. Data that equal random images and all real images have 0.27.
        """
        return _scale_score(self.improvement_over_random, -self.hard_label_recovery, weight)

    def compute_ars(self, weight: float = 0.5) -> np.ndarray:
        """Compute the augmentation-robust score, (e^b - e^-1) / (e - e^-1).

        Args:
          weight: gamma in b = gamma IOR + (1 - gamma) IOR without augmentation.

        Returns:
          Scores in [0, 1]. Data that equal random images have 0.27.
        """
        return _scale_score(
            self.improvement_over_random, self.synthetic_plain - self.random_plain, weight
        )


def _scale_score(first: np.ndarray, second: np.ndarray, weight: float) -> np.ndarray:
    """Return DD-Ranking's score of the weighted sum of two differences of accuracies."""
    is_valid = isinstance(weight, int | float) and 0 <= weight <= 1
    require(is_valid, "weight", weight, "a number in [0, 1]")
    total = weight * first + (1 - weight) * second
    return (np.exp(total) - np.exp(-1)) / (np.exp(1) - np.exp(-1))


def measure_scratch_accuracies(
    model: Model,
    synthetic: SyntheticData,
    dataset: Dataset,
    *,
    augment_strategy: str = DSA_STRATEGY,
    loss_scaling: str = "cross_entropy",
    seed: int = 0,
    num_networks: int = 3,
    epochs: int = 300,
    real_epochs: int = 30,
    real_accuracy: float | None = None,
) -> ScratchAccuracies:
    """Measure accuracies of networks that train from scratch, for DD-Ranking's scores.

    Networks train by `train_from_scratch`. Each accuracy of M samples is the best test accuracy of
    the learning rates `LEARNING_RATES`, and of the learned step size for the synthetic data.
    Network n starts from the same parameters in every training. Random real images have equal
    numbers of all classes, and another draw for each network.

    Departures from DD-Ranking's public code: random images have their classes as labels, since
    these methods have no teacher network. The accuracy is that after the last epoch, not the best
    of several epochs. The learning rate of the synthetic data is always chosen.

    Cost: 27 `num_networks` trainings of `epochs` epochs with M samples, and one training of
    `real_epochs` epochs with all real images.

    Args:
      model: the network.
      synthetic: the synthetic data; a step size of NaN is no learned step size.
      dataset: source of the real images and of the test images.
      augment_strategy: augmentation of the synthetic data, see `SyntheticTask`.
      loss_scaling: loss of the synthetic data, see `SyntheticTask`.
      seed: seed of initial parameters, random images and batches.
      num_networks: number of networks.
      epochs: number of epochs.
      real_epochs: number of epochs with all real images, at a learning rate of 0.01.
      real_accuracy: accuracy of all real images, if it is known: no network trains on them.

    Returns:
      The accuracies.

    Raises:
      ConfigError: if the arguments do not fit together, or a class has too few real images.

    Example:
      >>> import jax.numpy as jnp, numpy as np
      >>> from fedjax_het.condensation import SyntheticData, measure_scratch_accuracies
      >>> from fedjax_het.data import dataset_from_arrays
      >>> from fedjax_het.nn import make_model
      >>> inputs, labels = np.arange(24, dtype=np.uint8).reshape(6, 2, 2, 1), np.arange(6) % 3
      >>> dataset = dataset_from_arrays(inputs, labels, inputs, labels)
      >>> model = make_model("mlp", (2, 2, 1), 3, hidden=[4])
      >>> data = SyntheticData(jnp.zeros((3, 2, 2, 1)), jnp.eye(3), jnp.float32(0.1))
      >>> settings = {"num_networks": 1, "epochs": 2, "real_epochs": 1}
      >>> measure_scratch_accuracies(model, data, dataset, **settings).random.shape
      (1,)
    """
    hard_labels = np.asarray(synthetic.label_logits).argmax(1)
    _check_inputs(model, np.asarray(synthetic.inputs), hard_labels, dataset.num_classes)
    for name, value in {"num_networks": num_networks, "epochs": epochs}.items():
        require(is_integer_at_least(value, 1), name, value, "a whole number >= 1")
    normalize = Task(model, dataset.mean, dataset.std).normalize
    test = Examples(normalize(jnp.asarray(dataset.test_inputs)), jnp.asarray(dataset.test_labels))
    keys = jax.random.split(make_key(seed), num_networks)
    classes = dataset.num_classes
    factor = classes if loss_scaling == "cross_entropy_over_classes" else 1

    def make_labeled(inputs: Array, labels: np.ndarray) -> SyntheticData:
        label_logits = HARD_LABEL_LOGIT * jax.nn.one_hot(labels, classes)
        return SyntheticData(inputs, label_logits, jnp.float32(jnp.nan))

    def take_real(positions: np.ndarray | slice) -> SyntheticData:
        inputs = normalize(jnp.asarray(dataset.train_inputs[positions]))
        return make_labeled(inputs, dataset.train_labels[positions])

    def best_accuracy(data: SyntheticData, n: int, strategy: str, scaling: str) -> float:
        scale = factor if scaling == loss_scaling else 1
        rates = [scale * rate for rate in LEARNING_RATES]
        rates += [float(data.step_size)] if np.isfinite(data.step_size) else []
        accuracies = [
            train_and_test(
                *(model, data._replace(step_size=jnp.float32(rate)), keys[n], test),
                augment_strategy=strategy,
                loss_scaling=scaling,
                epochs=epochs,
            )
            for rate in rates
        ]
        return max(map(float, accuracies))

    hard = make_labeled(synthetic.inputs, hard_labels)
    subset_classes = np.arange(len(synthetic.inputs)) * classes // len(synthetic.inputs)
    rows = []
    for n in range(num_networks):
        subset = random_subset(dataset.train_labels, subset_classes, seed=seed, subset_index=n + 1)
        random = take_real(subset)
        trainings = (
            *((synthetic, augment_strategy, loss_scaling), (synthetic, "none", loss_scaling)),
            (hard, "none", "cross_entropy"),
            *((random, augment_strategy, loss_scaling), (random, "none", loss_scaling)),
        )
        rows.append([best_accuracy(data, n, *recipe) for data, *recipe in trainings])
    if real_accuracy is None:
        real_accuracy = float(
            train_and_test(
                *(model, take_real(slice(None))._replace(step_size=jnp.float32(LR)), keys[0], test),
                augment_strategy="none",
                loss_scaling="cross_entropy",
                epochs=real_epochs,
            )
        )
    real = np.full((num_networks, 1), real_accuracy)
    return ScratchAccuracies._make(np.hstack([np.array(rows), real]).T)


def make_step_decay_phases(
    lr: Array | float, epochs: int
) -> tuple[tuple[Array | float, EpochRange], ...]:
    """Split training from scratch into two phases with learning rates `lr` and `lr` / 10.

    The rate decays after epoch `epochs // 2 + 1`, counted from 0 (251 of 501), as in the public
    codes of distribution and trajectory matching.

    Args:
      lr: learning rate of the first phase.
      epochs: total number of epochs.

    Returns:
      For each phase, the learning rate and the epochs; orders continue from `EpochRange.first`.
    """
    num_early_epochs = min(epochs // 2 + 2, epochs)
    late_epochs = EpochRange(epochs - num_early_epochs, first=num_early_epochs)
    return (lr, EpochRange(num_early_epochs)), (lr * 0.1, late_epochs)
