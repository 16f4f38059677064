"""Clients whose losses are unlike quadratics, of which the joint optimum is known."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_het.nn import Model
from support.problems import small

DIMENSIONS = 5


class Quadratics(NamedTuple):
    """Client k's loss is 1/2 (theta - optimum_k)' hessian_k (theta - optimum_k); in place of a
    `Task`, k being the label of all its examples."""

    hessians: np.ndarray  # [K, P, P]
    optima: np.ndarray  # [K, P]

    def loss_and_gradient(self, variables, batch, key):
        away = variables["params"]["theta"] - jnp.float32(self.optima)[batch.labels[0]]
        slope = jnp.float32(self.hessians)[batch.labels[0]] @ away
        return away @ slope / 2, {"theta": slope}, variables

    def joint_optimum(self):
        """Of the mean of the losses."""
        slopes = np.einsum("kij,kj->i", self.hessians, self.optima)
        return np.linalg.solve(self.hessians.sum(0), slopes)


def different_quadratics(clients=6):
    """Eigenvalues from 0.2 to 3 along axes of each client's own."""
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(clients, DIMENSIONS, DIMENSIONS)))[0]
    values = rng.uniform(0.2, 3, size=(clients, 1, DIMENSIONS))
    return Quadratics((axes * values) @ axes.transpose(0, 2, 1), rng.normal(size=(clients, 5)))


def distance(build, quadratics, rounds, *, steps=10, **settings):
    """Of the global model from the joint optimum, after rounds of that many gradient steps."""
    clients = len(quadratics.optima)
    start = {"params": {"theta": jnp.zeros(DIMENSIONS)}, "state": {}}
    model = Model("quadratic", (1, 1, 1), clients, lambda key: start, apply=None)
    federation = small(
        lambda training, plan: build(training._replace(task=quadratics), plan),
        model=model,
        sizes=(4,) * clients,
        data=(np.zeros((4 * clients, 1, 1, 1), np.float32), np.repeat(np.arange(clients), 4)),
        epochs=steps,
        rounds=rounds,
        **{"hp": {"local_lr": 0.1, "feddyn_alpha": 0.3}, **settings},
    )
    theta = federation.model(federation.run(rounds)[0])["theta"]
    return float(np.linalg.norm(theta - quadratics.joint_optimum()))
