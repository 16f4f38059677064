"""FSL, federated learning with server learning (Mai, La and Zhang, 2022, arXiv:2210.02614), and
what it is compared with: data sharing (Zhao et al., arXiv:1806.00582)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.algorithms.building import num_bytes
from fedjax_het.algorithms.contract import Algorithm, Holdings, OnceTraffic, RoundInput
from fedjax_het.algorithms.entry import Entry, Rule
from fedjax_het.algorithms.refined import Round, refined, server_examples
from fedjax_het.common.records import Count, NonNegative, Record
from fedjax_het.engine.local import LocalTraining, optimizer_steps, require_one_rate
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.randomness import Purpose, key_for
from fedjax_het.engine.server import mean_gradient, steps_per_epoch, train_on_server
from fedjax_het.engine.sharing import Sharing

SERVER_EPOCHS = "server_epochs"  # the name of the rounds' input


@dataclass(frozen=True)
class FslOptions(Record):
    server_epochs: Count | None = None
    "E_s, epochs over the server's examples after each round; None: by the paper's rule."
    server_rate: Literal["paper", "moved"] = "paper"
    """eta_0 by K_0 eta_0 = K eta_l eta_g, or by how far the round moved; see `fsl`."""


@dataclass(frozen=True)
class FslNumbers(Record):
    gamma: NonNegative = 1.0
    "Weight of the server's loss."


def fsl(
    training: LocalTraining,
    plan: Plan,
    *,
    base: Callable[..., Algorithm],
    options: FslOptions = FslOptions(),
    incremental: bool = True,
) -> Algorithm:
    """After each round of `base` the server takes K_0 steps of SGD on its own examples D_0.

    Algorithm 1: x_{t+1} = LocalSGD(xbar_t, gamma eta_0, K_0, D_0), with xbar_t = x_t + eta_g mean
    of the clients' changes, which `base` gives; eta_g is its `server_lr`, by the paper sqrt(S).
    K_0 = E_s ceil(n_0 / B_0), E_s = ceil(n E_c / (N n_0)) unless `server_epochs` says otherwise,
    B_0 = B. gamma = 0 is `base`. eta_0 by the option `server_rate`:
      "paper": K_0 eta_0 = K eta_l eta_g (Eq. 11; with eta_g = sqrt(S) the section on the
        implementation), K the mean steps of the round's clients, so that `gamma` is the weight of
        f_0 in F + gamma f_0 (Eq. 5). That supposes that a gradient g moves a client by -eta_l g and
        a mean change d the server by eta_g d.
        Under other optimisers gamma weighs f_0 by less (with momentum 0.9 the server's move is 0.4
        times as long as under SGD beside the clients', with Adam a 25th), which a run's log says.
      "moved": K_0 eta_0 ||grad f_0(x_t)|| = ||xbar_t - x_t||, so that the server's steps at gamma
        = 1, with the gradient that they begin with, are as long together as the round's move,
        whatever made it. Where f_0 is nearly at its least, that is a large rate: not for a server
        that has learned its examples by heart.

    `incremental` False is FSL-p: the server learns from x_t beside the clients, and both changes
    are added: x_{t+1} = xbar_t + LocalSGD(x_t, ...) - x_t. The paper does not give its weights;
    these are the ones that fit Eq. 5.

    The server's own momentum and decay are not mentioned and taken to be none. State and traffic
    are those of `base`. Cost: K_0 steps a round, each shared by the devices that share a
    federation; with "moved" a pass over D_0 besides.
    """
    algorithm, batch_size = base(training, plan), training.batch_size
    share, extra = 1.0, algorithm.extra_passes
    if training.details.steps is None:  # SCAFFOLD's option I first only measures
        share = training.epochs / (training.epochs + extra)
    rule = options.server_rate
    if rule == "paper":
        require_one_rate(training, "fsl's server goes by it, unless server_rate is 'moved'")

    def learn(sharing: Sharing, most, start, begun, examples, key, reach, epochs):
        """`reach` is gamma K_0 eta_0, or that times the length of the gradient at `begun`."""
        if rule == "moved":
            whole = mean_gradient(
                training.task, begun, examples, batch_size=batch_size, sharing=sharing
            )
            reach = reach / jnp.maximum(optax.tree.norm(whole), 1e-12)
            epochs = sharing.once_known(reach, epochs)
        lr = reach / (epochs * steps_per_epoch(len(examples.labels), batch_size))
        how = {"batch_size": batch_size, "lr": lr, "epochs": epochs, "most_epochs": most}
        return train_on_server(training.task, start, examples, key, **how, sharing=sharing)

    def refine(hp, own, this_round: Round):
        examples, schedule = server_examples(this_round), this_round.cohort.schedule
        epochs = options.server_epochs or this_round.cohort.inputs[SERVER_EPOCHS]
        if rule == "paper":
            present = jnp.maximum((schedule.num_steps > 0).sum(), 1)
            steps: Any = schedule.num_steps
            if extra and training.details.steps is not None:
                steps = jnp.minimum(steps, training.details.steps)
            client_steps = share * optimizer_steps(training, steps).sum() / present
            reach = hp["server_lr"] * hp["local_lr"] * client_steps
        else:
            models = (this_round.after["params"], this_round.before["params"])
            reach = optax.tree.norm(jax.tree.map(jnp.subtract, *models))
        start = this_round.after if incremental else this_round.before
        if not incremental:  # collectives in order: those of the clients' training first
            epochs = plan.once_known(optax.tree.norm(this_round.after["params"]), epochs)
        key = key_for(this_round.key, Purpose.SERVER)
        given = (start, this_round.before, examples, key, hp["gamma"] * reach, epochs)
        # A client makes as many steps, on average.
        steps, size = schedule.batches.shape[1], schedule.batches.shape[3]
        most = -(-steps * size // len(examples.labels))
        learnt = plan.shared(lambda sharing, *given: learn(sharing, most, *given), *given)
        if incremental:
            return learnt, own
        both = jax.tree.map(
            lambda a, new, old: a + (new - old), this_round.after, learnt, this_round.before
        )
        return both, own

    epochs_input = RoundInput(SERVER_EPOCHS, _server_epochs)
    whole = refined(algorithm, refine, server_batch=batch_size)
    return whole._replace(inputs=(*algorithm.inputs, epochs_input))


def _server_epochs(holdings: Sequence[Holdings]) -> list[np.int32]:
    """E_s = ceil(n E_c / (N n_0)), section IV-A: as many examples a round as a client sees."""

    def epochs(held: Holdings) -> np.int32:
        assert held.server is not None
        seen = held.samples
        if seen is None:
            assert held.local_epochs is not None
            seen = len(held.partition.indices) * held.local_epochs
        return np.int32(-(-seen // (held.partition.num_clients * len(held.server.labels))))

    return [epochs(held) for held in holdings]


def data_sharing(
    training: LocalTraining, plan: Plan, *, base: Callable[..., Algorithm]
) -> Algorithm:
    """`base` on clients that hold the server's examples D_0 besides their own: D_i' = D_i + D_0.

    The objective becomes F + (N n_0 / n) f_0 (Eq. 4). A client makes its epochs over n_i + n_0
    examples, those that it also held itself twice (the paper's multisets). Traffic: D_0 to every
    client once, and then that of `base`. Cost: n_0 / n_i more at every client.
    """
    algorithm = base(training, plan)

    def first_traffic(held: Holdings) -> OnceTraffic:
        assert held.server is not None
        down, up = algorithm.first_traffic(held)
        return OnceTraffic(down + held.partition.num_clients * num_bytes(held.server), up)

    return algorithm._replace(shares_server_data=True, first_traffic=first_traffic)


def _remarks(run: Any, entry: Entry) -> list[str]:
    assert entry.base is not None
    own_step = entry.base.server_step != "mean"
    if run.options["server_rate"] != "paper" or (run.local_optimizer == "sgd" and not own_step):
        return []
    why = (
        f"base = {entry.base.name!r}" if own_step else f"local_optimizer = {run.local_optimizer!r}"
    )
    return [
        f"{why}: the paper's rate of the server supposes plain SGD steps, so that gamma weighs its "
        "loss by less than it says; server_rate 'moved' goes by how far the round moved"
    ]


_PRETRAINS = Rule(("fsl",), settings={"pretrain_epochs": 500})

FSL = Entry(
    "fsl",
    fsl,
    "after each round the server learns from examples of its own (Mai et al., 2022)",
    paper="Mai, La and Zhang, 2022, arXiv:2210.02614",
    options=FslOptions,
    numbers=FslNumbers,
    protocol="fsl",
    rules=(_PRETRAINS,),
    colour="#882255",
    refines="model",
    remarks=_remarks,
    needs=("server_data",),
)
FSL_P = replace(
    FSL,
    name="fsl_p",
    build=partial(fsl, incremental=False),
    description="FSL whose server learns beside the clients instead of after them "
    "(Mai et al., 2022)",
    colour="#762A83",
)
DATA_SHARING = Entry(
    "data_sharing",
    data_sharing,
    "clients train on the server's examples besides their own (Zhao et al., 2018)",
    paper="Zhao et al., 2018, arXiv:1806.00582",
    protocol="fsl",
    rules=(_PRETRAINS,),
    colour="#E6AB02",
    refines="model",
    needs=("server_data",),
)
