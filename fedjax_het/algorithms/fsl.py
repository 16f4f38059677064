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

from fedjax_het.algorithms.base import Algorithm, FederationData, InitialTraffic, RoundInput
from fedjax_het.algorithms.builders import (
    ServerStepContext,
    get_server_examples,
    num_bytes,
    with_server_step,
)
from fedjax_het.algorithms.spec import AlgorithmSpec, DefaultsRule
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.gradient_diagnostics import compute_gradient_moments
from fedjax_het.core.local_training import LocalTraining, count_optimizer_steps, require_constant_lr
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.core.server_training import make_sequential_batches, train_on_server
from fedjax_het.utils.config import Config, NonNegativeFloat, PositiveInt

SERVER_EPOCHS_INPUT = "server_epochs"  # the name of the rounds' input


@dataclass(frozen=True)
class FSLOptions(Config):
    server_epochs: PositiveInt | None = None
    "E_s, epochs over the server's examples after each round; None: by the paper's rule."
    server_rate: Literal["paper", "moved"] = "paper"
    """eta_0 by K_0 eta_0 = K eta_l eta_g, or by how far the round moved; see `fsl`."""


@dataclass(frozen=True)
class FSLHyperParameters(Config):
    gamma: NonNegativeFloat = 1.0
    "Weight of the server's loss."


def fsl(
    training: LocalTraining,
    plan: ExecutionPlan,
    *,
    base: Callable[..., Algorithm],
    options: FSLOptions = FSLOptions(),
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
    local_pass_fraction, num_extra_passes = 1.0, algorithm.extra_passes
    if training.options.num_steps is None:  # SCAFFOLD's option I first only measures
        local_pass_fraction = training.epochs / (training.epochs + num_extra_passes)
    rule = options.server_rate
    if rule == "paper":
        require_constant_lr(training, "fsl's server goes by it, unless server_rate is 'moved'")

    def train_on_shard(
        server_parallelism: ServerParallelism,
        max_epochs,
        start_variables,
        reference_variables,
        examples,
        key,
        total_step_length,
        epochs,
    ):
        """`reach` is gamma K_0 eta_0, or that times the length of the gradient at `begun`."""
        batches = make_sequential_batches(len(examples.labels), batch_size)
        if rule == "moved":
            full_gradient, _ = compute_gradient_moments(
                training.task,
                reference_variables,
                examples,
                batches,
                server_parallelism=server_parallelism,
            )
            total_step_length = total_step_length / jnp.maximum(
                optax.tree.norm(full_gradient), 1e-12
            )
            epochs = server_parallelism.order_after(total_step_length, epochs)
        lr = total_step_length / (epochs * batches.steps_per_epoch)
        train_args = {
            "batch_size": batch_size,
            "lr": lr,
            "epochs": epochs,
            "max_epochs": max_epochs,
        }
        return train_on_server(
            training.task,
            start_variables,
            examples,
            key,
            **train_args,
            server_parallelism=server_parallelism,
        )

    def run_server_step(hp, step_state, context: ServerStepContext):
        examples, schedule = get_server_examples(context), context.cohort.schedule
        epochs = options.server_epochs or context.cohort.inputs[SERVER_EPOCHS_INPUT]
        if rule == "paper":
            num_present = jnp.maximum((schedule.num_steps > 0).sum(), 1)
            num_steps_per_client: Any = schedule.num_steps
            if num_extra_passes and training.options.num_steps is not None:
                num_steps_per_client = jnp.minimum(num_steps_per_client, training.options.num_steps)
            client_steps = (
                local_pass_fraction
                * count_optimizer_steps(training, num_steps_per_client).sum()
                / num_present
            )
            total_step_length = hp["server_lr"] * hp["local_lr"] * client_steps
        else:
            params_pair = (context.variables_after["params"], context.variables_before["params"])
            total_step_length = optax.tree.norm(jax.tree.map(jnp.subtract, *params_pair))
        start_variables = context.variables_after if incremental else context.variables_before
        if not incremental:  # collectives in order: those of the clients' training first
            epochs = plan.order_after(optax.tree.norm(context.variables_after["params"]), epochs)
        key = fold_in_purpose(context.key, Purpose.SERVER)
        train_args = (
            start_variables,
            context.variables_before,
            examples,
            key,
            hp["gamma"] * total_step_length,
            epochs,
        )
        # A client makes as many steps, on average.
        num_steps_per_client, padded_batch_size = (
            schedule.batches.shape[1],
            schedule.batches.shape[3],
        )
        max_epochs = -(-num_steps_per_client * padded_batch_size // len(examples.labels))
        server_variables = plan.shard_server_work(
            lambda server_parallelism, *args: train_on_shard(server_parallelism, max_epochs, *args),
            *train_args,
            loops=context.cohort.loops,
        )
        if incremental:
            return server_variables, step_state
        combined_variables = jax.tree.map(
            lambda a, new, old: a + (new - old),
            context.variables_after,
            server_variables,
            context.variables_before,
        )
        return combined_variables, step_state

    epochs_input = RoundInput(SERVER_EPOCHS_INPUT, _make_server_epochs)
    wrapped_algorithm = with_server_step(algorithm, run_server_step, server_batch_size=batch_size)
    return wrapped_algorithm._replace(round_inputs=(*algorithm.round_inputs, epochs_input))


def _make_server_epochs(federations: Sequence[FederationData]) -> list[np.int32]:
    """E_s = ceil(n E_c / (N n_0)), section IV-A: as many examples a round as a client sees."""

    def count_server_epochs(federation: FederationData) -> np.int32:
        assert federation.server_examples is not None
        samples_per_round = federation.samples_per_round
        if samples_per_round is None:
            assert federation.local_epochs is not None
            samples_per_round = len(federation.partition.indices) * federation.local_epochs
        return np.int32(
            -(
                -samples_per_round
                // (federation.partition.num_clients * len(federation.server_examples.labels))
            )
        )

    return [count_server_epochs(federation) for federation in federations]


def data_sharing(
    training: LocalTraining, plan: ExecutionPlan, *, base: Callable[..., Algorithm]
) -> Algorithm:
    """`base` on clients that hold the server's examples D_0 besides their own: D_i' = D_i + D_0.

    The objective becomes F + (N n_0 / n) f_0 (Eq. 4). A client makes its epochs over n_i + n_0
    examples, those that it also held itself twice (the paper's multisets). Traffic: D_0 to every
    client once, and then that of `base`. Cost: n_0 / n_i more at every client.
    """
    algorithm = base(training, plan)

    def count_initial_traffic(federation: FederationData) -> InitialTraffic:
        assert federation.server_examples is not None
        down, up = algorithm.initial_traffic(federation)
        return InitialTraffic(
            down + federation.partition.num_clients * num_bytes(federation.server_examples), up
        )

    return algorithm._replace(trains_on_server_data=True, initial_traffic=count_initial_traffic)


def _settings_warnings(run: Any, algorithm_spec: AlgorithmSpec) -> list[str]:
    assert algorithm_spec.base is not None
    has_own_server_step = algorithm_spec.base.server_step != "mean"
    if run.options["server_rate"] != "paper" or (
        run.local_optimizer == "sgd" and not has_own_server_step
    ):
        return []
    reason = (
        f"base = {algorithm_spec.base.name!r}"
        if has_own_server_step
        else f"local_optimizer = {run.local_optimizer!r}"
    )
    return [
        f"{reason}: the paper's rate of the server supposes plain SGD steps, so that gamma weighs its "
        "loss by less than it says; server_rate 'moved' goes by how far the round moved"
    ]


_PRETRAINING_RULE = DefaultsRule(("fsl",), settings={"pretrain_epochs": 500})

FSL = AlgorithmSpec(
    "fsl",
    fsl,
    "after each round the server learns from examples of its own (Mai et al., 2022)",
    paper="Mai, La and Zhang, 2022, arXiv:2210.02614",
    options=FSLOptions,
    hyperparameters=FSLHyperParameters,
    protocol="fsl",
    rules=(_PRETRAINING_RULE,),
    color="#882255",
    wraps="model",
    settings_warnings=_settings_warnings,
    required_data=("server_data",),
)
FSL_P = replace(
    FSL,
    name="fsl_p",
    build=partial(fsl, incremental=False),
    description="FSL whose server learns beside the clients instead of after them "
    "(Mai et al., 2022)",
    color="#762A83",
)
DATA_SHARING = AlgorithmSpec(
    "data_sharing",
    data_sharing,
    "clients train on the server's examples besides their own (Zhao et al., 2018)",
    paper="Zhao et al., 2018, arXiv:1806.00582",
    protocol="fsl",
    rules=(_PRETRAINING_RULE,),
    color="#E6AB02",
    wraps="model",
    required_data=("server_data",),
)
