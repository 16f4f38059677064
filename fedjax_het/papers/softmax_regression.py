"""Softmax regression with l2 on the digits: a strongly convex problem whose constants are known.

Programs that measure the rates of theorems use it: the optimum, L and mu are computed in float64 on
the host, while clients and the server train the package's network `mlp` without hidden layers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.core.task import Task
from fedjax_het.data import Dataset, load_dataset, make_partition
from fedjax_het.nn import make_model

NUM_CLASSES = 10


class SoftmaxRegression(NamedTuple):
    """The loss sum_s weights_s CE(softmax(x_s W), y_s) + l2 / 2 ||W||^2, in float64."""

    features: np.ndarray
    "x, `[n, D]`; the last feature is 1."
    labels: np.ndarray
    "y, `[n]`, classes from 0 to C - 1."
    weights: np.ndarray
    "Weights of the examples, `[n]`, with sum 1."
    l2: float
    "Coefficient of the penalty, and strong convexity mu."

    def compute_value(self, point: np.ndarray) -> float:
        """Return the loss at W `[D, C]`."""
        logits = self.features @ point
        top = logits.max(1)
        log_sums = top + np.log(np.exp(logits - top[:, None]).sum(1))
        losses = log_sums - logits[np.arange(len(self.labels)), self.labels]
        return float(self.weights @ losses + self.l2 / 2 * np.vdot(point, point))

    def compute_logit_gradients(self, point: np.ndarray) -> np.ndarray:
        """Return softmax(x_s W) - onehot(y_s), `[n, C]`; x_s times row s is the gradient of s."""
        rows = _softmax(self.features @ point)
        rows[np.arange(len(self.labels)), self.labels] -= 1
        return rows

    def compute_gradient(self, point: np.ndarray) -> np.ndarray:
        """Return the gradient at W, `[D, C]`."""
        rows = self.compute_logit_gradients(point) * self.weights[:, None]
        return self.features.T @ rows + self.l2 * point

    def with_weights(self, examples: np.ndarray) -> "SoftmaxRegression":
        """Return the mean loss over some examples.

        Args:
          examples: positions, `[m]`; repeated ones count repeatedly.

        Returns:
          The loss, of equal features and penalty.
        """
        counts = np.bincount(examples, minlength=len(self.labels))
        return self._replace(weights=counts / len(examples))

    @property
    def smoothness(self) -> float:
        """Bound L of the Hessian: half the largest eigenvalue of sum_s weights_s x_s x_s' + l2."""
        second_moment = (self.features * self.weights[:, None]).T @ self.features
        return float(np.linalg.eigvalsh(second_moment)[-1] / 2 + self.l2)

    def minimize(self) -> np.ndarray:
        """Return the optimum `[D, C]`, by Newton's method, to a gradient of about 1e-12."""
        from scipy.optimize import minimize

        shape = self.features.shape[1], NUM_CLASSES

        def multiply_hessian(flat: np.ndarray, direction: np.ndarray) -> np.ndarray:
            probabilities = _softmax(self.features @ flat.reshape(shape))
            change = self.features @ direction.reshape(shape)
            rows = probabilities * (change - (probabilities * change).sum(1, keepdims=True))
            product = self.features.T @ (rows * self.weights[:, None])
            return product.ravel() + self.l2 * direction

        solution = minimize(
            lambda flat: self.compute_value(flat.reshape(shape)),
            np.zeros(shape).ravel(),
            jac=lambda flat: self.compute_gradient(flat.reshape(shape)).ravel(),
            hessp=multiply_hessian,
            method="trust-ncg",
            options={"gtol": 1e-10},
        )
        return solution.x.reshape(shape)


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


class ConvexFederation(NamedTuple):
    """Clients with parts of the digits of equal size, and few labels each."""

    dataset: Dataset
    loss: SoftmaxRegression
    "F, the mean over the examples of all clients; positions are positions in the training set."
    clients: np.ndarray
    "Positions of each client's examples, `[N, n_k]`."
    task: Task
    "The network without hidden layers, with the loss's penalty."


def make_convex_federation(
    num_clients: int = 20, classes_per_client: int = 2, l2: float = 0.1, seed: int = 0
) -> ConvexFederation:
    """Divide the digits among clients.

    Args:
      num_clients: number of clients, N.
      classes_per_client: number of labels of each client.
      l2: coefficient of the penalty.
      seed: seed of the partition.

    Returns:
      The clients. Each has as many examples as the smallest, rounded down to a multiple of 10.

    Example:
      >>> from fedjax_het.papers.softmax_regression import make_convex_federation
      >>> make_convex_federation(num_clients=20).clients.shape
      (20, 60)
    """
    dataset = load_dataset("digits")
    labels, classes = dataset.train_labels, dataset.num_classes
    partition = make_partition(
        "classes_per_client",
        labels,
        classes,
        num_clients=num_clients,
        seed=seed,
        classes_per_client=classes_per_client,
    )
    size = partition.sizes.min() // 10 * 10
    rng = np.random.default_rng(seed)
    clients = np.stack(
        [rng.permutation(partition.client_indices(k))[:size] for k in range(num_clients)]
    )
    model = make_model("mlp", dataset.input_shape, classes, hidden=())
    task = Task(model, dataset.mean, dataset.std)
    images = np.asarray(task.normalize(jnp.asarray(dataset.train_inputs)), np.float64)
    features = np.concatenate([images.reshape(len(images), -1), np.ones((len(images), 1))], axis=1)
    loss = SoftmaxRegression(features, labels, np.zeros(len(labels)), l2)
    return ConvexFederation(
        dataset, loss.with_weights(clients.ravel()), clients, make_l2_task(task, l2)
    )


def make_l2_task(task: Task, l2: float) -> Task:
    """Add l2 / 2 ||params||^2 to the loss of every minibatch.

    Args:
      task: the task.
      l2: coefficient of the penalty.

    Returns:
      The task with the penalty.
    """

    class L2Task(Task):
        def loss_and_gradient(self, variables: Any, *args: Any, **settings: Any):
            loss, gradient, new_variables = super().loss_and_gradient(variables, *args, **settings)
            params = variables["params"]
            gradient = jax.tree.map(lambda g, w: g + l2 * w, gradient, params)
            return loss + l2 / 2 * optax.tree.norm(params, squared=True), gradient, new_variables

    return L2Task(*task)


def stack_params(params: dict[str, dict[str, Any]]) -> np.ndarray:
    """Return W of a network without hidden layers: its kernel above its bias.

    Args:
      params: weights of the network; arrays may have leading axes.

    Returns:
      W, float64 `[..., D, C]`.
    """
    kernel, bias = (np.asarray(params["head"][name], np.float64) for name in ("kernel", "bias"))
    return np.concatenate([kernel, bias[..., None, :]], axis=-2)
