"""FSL, federated learning with server learning (Mai, La and Zhang, arXiv:2210.02614), and what it
is compared with: data sharing (Zhao et al., arXiv:1806.00582)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.refined import Round, refined
from fedjax_het.common.errors import is_whole, require
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.randomness import SERVER_FOLD
from fedjax_het.engine.server import steps_per_epoch, train_on_server

FSL_HP = {"gamma": 1.0}
FSL_OPTIONS = {"server_epochs": None}


def fsl(
    training: LocalTraining,
    plan: Plan,
    *,
    base: Callable[..., Algorithm],
    server_epochs: int | None = None,
    incremental: bool = True,
) -> Algorithm:
    """After each round of `base` the server takes K_0 steps of SGD on its own examples D_0.

    Algorithm 1: x_{t+1} = LocalSGD(xbar_t, gamma eta_0, K_0, D_0), with xbar_t = x_t + eta_g mean
    of the clients' changes, which `base` gives; eta_g is its `server_lr`, by the paper sqrt(S).
    K_0 = E_s ceil(n_0 / B_0), E_s = ceil(n E_c / (N n_0)) unless `server_epochs` says otherwise,
    B_0 = B. eta_0 is such that K_0 eta_0 = K eta_l eta_g (Eq. 11; with eta_g = sqrt(S) the
    section on the implementation), K the mean steps of the round's clients, so that `gamma` is
    the weight of f_0 in F + gamma f_0 (Eq. 5). gamma = 0 is `base`.

    `incremental` False is FSL-p: the server learns from x_t beside the clients, and both changes
    are added: x_{t+1} = xbar_t + LocalSGD(x_t, ...) - x_t. The paper does not give its weights;
    these are the ones that fit Eq. 5.

    Momentum and decay are not mentioned and taken to be none. State and traffic are those of
    `base`. Cost: K_0 steps a round, on every device alike where they share a federation.
    """
    check_fsl({"server_epochs": server_epochs})
    algorithm, batch_size = base(training, plan), training.batch_size
    passes = training.local_epochs + algorithm.extra_passes
    training_share = training.local_epochs / passes  # SCAFFOLD's option I first only measures

    def refine(hp, own, of: Round):
        server, schedule = of.cohort.server, of.cohort.schedule
        epochs = server.epochs if server_epochs is None else server_epochs
        steps = epochs * steps_per_epoch(len(server.examples.labels), batch_size)
        present = jnp.maximum((schedule.num_steps > 0).sum(), 1)
        client_steps = training_share * schedule.num_steps.sum() / present
        lr = hp["gamma"] * hp["server_lr"] * hp["local_lr"] * client_steps / steps
        start = of.after if incremental else of.before
        learnt = train_on_server(
            training.task,
            start,
            server.examples,
            jax.random.fold_in(of.key, SERVER_FOLD),
            batch_size=batch_size,
            lr=lr,
            epochs=epochs,
        )
        if incremental:
            return learnt, own
        both = jax.tree.map(lambda a, new, old: a + (new - old), of.after, learnt, of.before)
        return both, own

    return refined(algorithm, refine)


def check_fsl(options: dict[str, Any]) -> None:
    """Raise ConfigError unless the epochs are a whole number, or left to the paper's rule."""
    epochs = options["server_epochs"]
    ok = epochs is None or is_whole(epochs, 1)
    require(ok, "server_epochs", epochs, "a whole number >= 1, or None for the paper's rule")


def data_sharing(
    training: LocalTraining, plan: Plan, *, base: Callable[..., Algorithm]
) -> Algorithm:
    """`base` on clients that hold the server's examples D_0 besides their own: D_i' = D_i + D_0.

    The objective becomes F + (N n_0 / n) f_0 (Eq. 4). A client makes its epochs over n_i + n_0
    examples, those that it also held itself twice (the paper's multisets). Traffic: D_0 to every
    client once, and then that of `base`. Cost: n_0 / n_i more at every client.
    """
    return base(training, plan)._replace(shares_server_data=True)
