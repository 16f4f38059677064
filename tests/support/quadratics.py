"""Clients whose losses are unlike quadratics, of which the joint optimum is known."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_het.nn import Model
from support.small_federation import make_small_federation

DIMENSIONS = 5


class Quadratics(NamedTuple):
    """Client k's loss is 1/2 (theta - optimum_k)' hessian_k (theta - optimum_k); in place of a
    `Task`, k being the label of all its examples."""

    hessians: np.ndarray  # [K, P, P]
    optima: np.ndarray  # [K, P]
    model: None = None  # no network

    def loss_and_gradient(self, variables, batch, key):
        deviation = variables["params"]["theta"] - jnp.float32(self.optima)[batch.labels[0]]
        gradient = jnp.float32(self.hessians)[batch.labels[0]] @ deviation
        return deviation @ gradient / 2, {"theta": gradient}, variables

    def joint_optimum(self, weights=None):
        """Of the mean of the losses, which `weights` [K] weigh."""
        hessians = self.hessians if weights is None else self.hessians * weights[:, None, None]
        weighted_optima = np.einsum("kij,kj->i", hessians, self.optima)
        return np.linalg.solve(hessians.sum(0), weighted_optima)


def make_heterogeneous_quadratics(num_clients=6):
    """Eigenvalues from 0.2 to 3 along axes of each client's own."""
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(num_clients, DIMENSIONS, DIMENSIONS)))[0]
    eigenvalues = rng.uniform(0.2, 3, size=(num_clients, 1, DIMENSIONS))
    return Quadratics(
        (axes * eigenvalues) @ axes.transpose(0, 2, 1), rng.normal(size=(num_clients, 5))
    )


def distance_to_optimum(build, quadratics, rounds, *, weights=None, **settings):
    """Of the global model from the joint optimum; see `after`."""
    theta = train_on_quadratics(build, quadratics, rounds, **settings)
    return float(np.linalg.norm(theta - quadratics.joint_optimum(weights)))


def train_on_quadratics(build, quadratics, rounds, *, steps=10, sizes=None, **settings):
    """[P] the global model after rounds of that many gradient steps of each client, which hold 4
    examples each, or `sizes`."""
    clients = len(quadratics.optima)
    sizes = (4,) * clients if sizes is None else sizes
    start = {"params": {"theta": jnp.zeros(DIMENSIONS)}, "state": {}}
    model = Model("quadratic", (1, 1, 1), clients, lambda key: start, apply=None)
    federation = make_small_federation(
        lambda training, plan: build(training._replace(task=quadratics), plan),
        model=model,
        sizes=sizes,
        data=(np.zeros((sum(sizes), 1, 1, 1), np.float32), np.repeat(np.arange(clients), sizes)),
        epochs=steps,
        rounds=rounds,
        **{"hp": {"local_lr": 0.1, "feddyn_alpha": 0.3}, "batch_size": max(sizes), **settings},
    )
    return federation.train(rounds)["theta"]
