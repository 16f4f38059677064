"""FSL, federated learning with server learning, and data sharing, to which it is compared.

Sources: Mai, La and Zhang, 2022, arXiv:2210.02614; Zhao et al., 2018, arXiv:1806.00582.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.algorithms.base import Algorithm, FederationData, InitialTraffic, RoundInput
from fedjax_het.algorithms.builders import num_bytes
from fedjax_het.algorithms.server_step import (
    ServerStepContext,
    get_server_examples,
    with_server_step,
)
from fedjax_het.algorithms.spec import AlgorithmSpec, DefaultsRule
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.gradient_diagnostics import compute_gradient_moments
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.core.server_training import make_sequential_batches, train_on_server
from fedjax_het.core.training_variants import count_optimizer_steps, require_constant_lr
from fedjax_het.utils.config import Config, DecayFactor, NonNegativeFloat, PositiveInt, SearchRange

SERVER_EPOCHS_INPUT = "server_epochs"  # name of the rounds' input


@dataclass(frozen=True)
class FSLOptions(Config):
    """Choices of FSL."""

    server_epochs: PositiveInt | None = None
    "Epochs over the server's examples after each round, E_s; None: by the paper's rule."
    server_rate: Literal["paper", "moved"] = "paper"
    """Rule for the server's learning rate eta_0: "paper", K_0 eta_0 = K eta_l eta_g; "moved", by
    the length of the round's change."""


@dataclass(frozen=True)
class FSLHyperParameters(Config):
    """Hyperparameters of FSL."""

    gamma: Annotated[NonNegativeFloat, SearchRange(0.1, 10)] = 1.0
    "Weight of the server's loss in the first round."
    gamma_decay: DecayFactor = 1.0
    "Factor of `gamma` from round to round; 1: `gamma` is constant."


def fsl(
    training: LocalTraining,
    plan: ExecutionPlan,
    *,
    base: Callable[..., Algorithm],
    options: FSLOptions,
    incremental: bool = True,
) -> Algorithm:
    """FSL: after each round of `base` the server trains on its own examples D_0 (Algorithm 1).

        x_{t+1} = LocalSGD(xbar_t, gamma eta_0, K_0, D_0),
        xbar_t  = x_t + eta_g mean of the clients' changes, which `base` makes.

    eta_g is `server_lr`, by the paper sqrt(S). K_0 = E_s ceil(n_0 / B_0), B_0 = B, and
    E_s = ceil(n E_c / (N n_0)) unless `server_epochs` replaces it. gamma = 0 is `base`. The option
    `server_rate` sets eta_0:
      "paper": K_0 eta_0 = K eta_l eta_g (Eq. 11; with eta_g = sqrt(S) the section on the
        implementation), K the mean steps of the round's clients, and `gamma` is the weight of f_0
        in F + gamma f_0 (Eq. 5). The rule assumes that a gradient g moves a client by -eta_l g, and
        a mean change d moves the server by eta_g d. Under other optimizers gamma weighs f_0 less,
        and a run logs a warning. The ratio of the server's change to the clients' change is 0.4
        times its value under SGD for momentum 0.9, and 1/25 of it for Adam.
      "moved": K_0 eta_0 ||grad f_0(x_t)|| = ||xbar_t - x_t||, so that K_0 steps of the server at
        gamma = 1 with their first gradient have the length of the round's change. Near the minimum
        of f_0 this rate is large, so it does not suit a server that has memorized its examples.

    With `gamma_decay` d, the weight in round t is gamma d^t. The paper prefers a large weight far
    from a stationary point and mentions a diminishing one (after Theorem 1), but analyzes a
    constant. With a constant weight FSL stays near the optimum of F + gamma f_0. With a diminishing
    weight it ends near the optimum of F.

    `incremental` False is FSL-p: the server trains from x_t in parallel to the clients, and both
    changes are added: x_{t+1} = xbar_t + LocalSGD(x_t, ...) - x_t.

    Traffic and client state equal the traffic and state of `base`. Cost: K_0 steps a round, each
    shared by the devices of a federation; "moved" adds a pass over D_0.

    Departures: the paper does not state FSL-p's weights; the weights here fit Eq. 5. The paper does
    not mention momentum and weight decay of the server; both are 0 here.

    Args:
      training: the choices of local training.
      plan: where the clients run, and the devices that share the server's work.
      base: `base(training, plan)`, the method whose model the server trains.
      options: choices of the method.
      incremental: whether the server learns after the clients (FSL) or in parallel to them (FSL-p).

    Returns:
      The method.

    Raises:
      ConfigError: for a learning rate that changes within a round, with `server_rate` "paper".
    """
    algorithm, batch_size = base(training, plan), training.batch_size
    max_local_steps, extra_passes = training.options.num_steps, algorithm.extra_passes
    local_fraction = 1.0
    if max_local_steps is None:  # SCAFFOLD's option I first only measures
        local_fraction = training.epochs / (training.epochs + extra_passes)
    is_paper_rate = options.server_rate == "paper"
    if is_paper_rate:
        require_constant_lr(training, "fsl's server has this rate, unless server_rate is 'moved'")

    def run_server_step(hp, step_state, context: ServerStepContext):
        examples, schedule = get_server_examples(context), context.cohort.schedule
        before, after = context.variables_before, context.variables_after
        epochs = options.server_epochs or context.cohort.inputs[SERVER_EPOCHS_INPUT]
        if is_paper_rate:
            num_present = jnp.maximum((schedule.num_steps > 0).sum(), 1)
            num_steps: Any = schedule.num_steps
            if extra_passes and max_local_steps is not None:
                num_steps = jnp.minimum(num_steps, max_local_steps)
            num_steps = count_optimizer_steps(training, num_steps).sum()
            mean_steps = local_fraction * num_steps / num_present
            length = hp["server_lr"] * hp["local_lr"] * mean_steps
        else:
            change = jax.tree.map(jnp.subtract, after["params"], before["params"])
            length = optax.tree.norm(change)
        if not incremental:  # collectives in order: first the collectives of the clients' training
            epochs = plan.order_after(optax.tree.norm(after["params"]), epochs)
        key = fold_in_purpose(context.key, Purpose.SERVER)
        start = after if incremental else before
        length = hp["gamma"] * hp["gamma_decay"] ** context.round_index * length
        # By the paper's rule a client makes this number of steps on average.
        num_slots, padded_batch_size = schedule.batches.shape[1], schedule.batches.shape[3]
        max_epochs = -(-num_slots * padded_batch_size // len(examples.labels))

        def train_on_shard(
            parallelism: ServerParallelism, start, before, examples, key, length, epochs
        ):
            """`length` is gamma K_0 eta_0, or that times the norm of the gradient at `before`."""
            task, batches = training.task, make_sequential_batches(len(examples.labels), batch_size)
            if not is_paper_rate:
                gradient, _ = compute_gradient_moments(
                    task, before, examples, batches, server_parallelism=parallelism
                )
                length = length / jnp.maximum(optax.tree.norm(gradient), 1e-12)
                epochs = parallelism.order_after(length, epochs)
            return train_on_server(
                *(task, start, examples, key),
                batch_size=batch_size,
                lr=length / (epochs * batches.steps_per_epoch),
                epochs=epochs,
                max_epochs=max_epochs,
                server_parallelism=parallelism,
            )

        args = (start, before, examples, key, length, epochs)
        new = plan.shard_server_work(train_on_shard, *args, loops=context.cohort.loops)
        if not incremental:
            new = jax.tree.map(lambda a, new, old: a + (new - old), after, new, before)
        return new, step_state

    epochs_input = RoundInput(SERVER_EPOCHS_INPUT, _make_server_epochs)
    return with_server_step(algorithm, run_server_step, server_batch_size=batch_size)._replace(
        round_inputs=(*algorithm.round_inputs, epochs_input),
        protects_privacy=algorithm.protects_privacy,
    )


def _make_server_epochs(federations: Sequence[FederationData]) -> list[np.int32]:
    """Return E_s = ceil(n E_c / (N n_0)) (section IV-A): a client's examples in a round, of D_0."""
    server_epochs = []
    for federation in federations:
        assert federation.server_examples is not None
        partition, num_samples = federation.partition, federation.samples_per_round
        if num_samples is None:
            assert federation.local_epochs is not None
            num_samples = len(partition.indices) * federation.local_epochs
        samples_per_epoch = partition.num_clients * len(federation.server_examples.labels)
        server_epochs.append(np.int32(-(-num_samples // samples_per_epoch)))
    return server_epochs


def data_sharing(
    training: LocalTraining, plan: ExecutionPlan, *, base: Callable[..., Algorithm]
) -> Algorithm:
    """Let clients also hold the server's examples D_0 (section 4 of Zhao).

        D_i <- D_i + D_0,   so that the objective is F + (N n_0 / n) f_0 (Eq. 4 of FSL).

    A client makes its epochs over n_i + n_0 examples. An example that it also held itself counts
    twice (multisets, as in FSL's paper).

    Traffic: D_0 to every client once, and then the traffic of `base`. State: the client state of
    `base`. Cost: n_0 / n_i more at every client.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      base: `base(training, plan)`, the method of the clients and the server.

    Returns:
      The method.
    """
    algorithm = base(training, plan)

    def count_initial_traffic(federation: FederationData) -> InitialTraffic:
        down, up = algorithm.initial_traffic(federation)
        size = num_bytes(federation.server_examples)
        return InitialTraffic(down + federation.partition.num_clients * size, up)

    return algorithm._replace(
        trains_on_server_data=True,
        initial_traffic=count_initial_traffic,
        protects_privacy=False,
    )


def _settings_warnings(run: Any, algorithm_spec: AlgorithmSpec) -> list[str]:
    base = algorithm_spec.base
    assert base is not None
    if run.options["server_rate"] != "paper":
        return []
    if base.server_step != "mean":
        reason = f"base = {base.name!r}"
    elif run.local_optimizer != "sgd":
        reason = f"local_optimizer = {run.local_optimizer!r}"
    else:
        return []
    return [
        f"{reason}: the paper's rate of the server assumes plain SGD steps, so gamma weighs the "
        "server's loss less; server_rate 'moved' follows the length of the round's change"
    ]


_PRETRAINING_RULE = DefaultsRule(("fsl",), settings={"pretrain_epochs": 500})

FSL = AlgorithmSpec(
    "fsl",
    fsl,
    "after each round the server trains on its own examples (Mai et al., 2022)",
    title="FSL",
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
    title="FSL-P",
    build=partial(fsl, incremental=False),
    description="FSL whose server learns in parallel to the clients, not after them "
    "(Mai et al., 2022)",
    color="#762A83",
)
DATA_SHARING = AlgorithmSpec(
    "data_sharing",
    data_sharing,
    "clients train on their own examples and the server's (Zhao et al., 2018)",
    title="Data sharing",
    paper="Zhao et al., 2018, arXiv:1806.00582",
    protocol="fsl",
    rules=(_PRETRAINING_RULE,),
    color="#E6AB02",
    wraps="model",
    required_data=("server_data", "shared_server_data"),
)
