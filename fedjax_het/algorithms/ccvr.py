"""CCVR (Luo et al., NeurIPS 2021, arXiv:2106.05001)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm, InitialTraffic
from fedjax_het.algorithms.builders import num_bytes
from fedjax_het.algorithms.server_step import ServerStepContext, with_server_step
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.algorithms.virtual_features import CLASS_BATCHES, draw_virtual_features
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.core.server_training import (
    BatchPlan,
    EpochRange,
    ServerTraining,
    train_on_examples,
)
from fedjax_het.nn.model import Head, count_features, require_parts
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.config import (
    Config,
    MomentumCoefficient,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SearchRange,
)

Tree = Any


@dataclass(frozen=True)
class CCVROptions(Config):
    """Choices of CCVR."""

    virtual_features: PositiveInt = 2000
    """Number M of virtual features of each class: random draws from a Gaussian with the mean and
    the covariance that the inputs of the network's last layer have over all clients' examples."""
    calibration_epochs: NonNegativeInt = 10
    """Epochs of the calibration, the training of the head (the last layer) on the virtual features
    at the server."""
    calibration_batch_size: PositiveInt = 64
    "Number of virtual features in a minibatch of the calibration."
    calibrates_new_head: bool = False
    "Whether the calibration starts from new random weights instead of the head of the base."


@dataclass(frozen=True)
class CCVRHyperParameters(Config):
    """Hyperparameters of CCVR."""

    calibration_lr: Annotated[NonNegativeFloat, SearchRange(0.0001, 0.1)] = 1e-3
    "Learning rate of the calibration."
    calibration_momentum: MomentumCoefficient = 0.9
    "Momentum of the calibration."


def ccvr(
    training: LocalTraining,
    plan: ExecutionPlan,
    *,
    base: Callable[..., Algorithm],
    options: CCVROptions,
) -> Algorithm:
    """CCVR: a head trained on draws from Gaussians of the features is evaluated (Algorithm 1).

    z = theta(x) are the features of the global model (theta, h), the inputs of its last layer h.
    Client k has n_kc examples of class c, whose features have the mean mu_kc and the covariance
    Sigma_kc. The server pools them exactly (Eqs. 3 and 4), with N_c = sum_k n_kc:

        mu_c = sum_k n_kc mu_kc / N_c,
        Sigma_c = (sum_k (n_kc - 1) Sigma_kc + sum_k n_kc mu_kc mu_kc^T - N_c mu_c mu_c^T)
                  / (N_c - 1),
        min_h mean_c mean_m CE(h(z_cm), c), z_cm ~ N(mu_c, Sigma_c), m = 1 to M.

    The head starts from the head of `base`, or from a new one with `calibrates_new_head`. It learns
    by SGD with momentum. 0 epochs from the head of `base` are `base`. A class without examples at
    any client has no virtual features.

    Evaluated: (theta, calibrated h) in rounds with an evaluation. The calibration is post-hoc:
    clients go on from the model of `base`, so that each evaluation shows the calibration of this
    round's model. In rounds without an evaluation, the result is the model of `base`.

    Traffic: as `base`. In addition, counted once: the final model down to each client with data,
    and counts, means and covariances of all classes up, C (1 + d + d^2) numbers for d features.
    State: a model at the server, for the evaluation. Cost: one forward pass over all clients' data
    and the training of the head, in rounds with an evaluation.

    The simulation draws from the Gaussians without their covariances, see `draw_virtual_features`:
    the draws have the distribution that the paper's server draws from. Features of networks with
    batch norm are computed in evaluation mode.

    Defaults: the values of smduan/Fed-CCVR (MIT license), without its weight decay of 1e-5.

    Args:
      training: the choices of local training.
      plan: where the clients run, and the devices that share the server's work.
      base: `base(training, plan)`, the method whose head is calibrated.
      options: choices of the method.

    Returns:
      The method.

    Raises:
      ConfigError: if the network has no `embed` or no `head`.
    """
    task, model, head = training.task, training.task.model, training.task.model.head
    require_parts(model, "embed", "head")
    assert head is not None
    algorithm = base(training, plan)

    def calibrate(loops, cohort, hp, variables, key):
        draw_key, head_key, order_key = jax.random.split(key, 3)
        cohort = cohort._replace(loops=loops)
        features, counts = draw_virtual_features(
            task, plan, variables, cohort, draw_key, options.virtual_features
        )
        start = model.init(head_key) if options.calibrates_new_head else variables
        args = (hp, head.get_parameters(start), features, counts > 0, order_key)
        layer = plan.shard_server_work(train_head, *args, loops=loops)
        return head.replace_parameters(variables, layer)

    def train_head(parallelism: ServerParallelism, hp, layer, features, is_present, key):
        optimizer = optax.sgd(hp["calibration_lr"], hp["calibration_momentum"])
        server_training = ServerTraining(_make_head_loss(head), optimizer, parallelism=parallelism)
        labels = jnp.repeat(jnp.arange(len(features)), features.shape[1])
        examples = Examples(features.reshape(len(labels), -1), labels)
        batches = _plan_batches(key, is_present[labels], options.calibration_batch_size)
        epochs = EpochRange(options.calibration_epochs)
        trained = train_on_examples(server_training, {"params": layer}, examples, batches, epochs)
        return trained["params"]

    def run_server_step(hp, step_state, context: ServerStepContext):
        cohort, variables = context.cohort, context.variables_after
        schedule, key = cohort.schedule, fold_in_purpose(context.key, Purpose.SERVER)
        is_due = schedule.is_eval_round | schedule.is_verification
        result = cohort.loops.cond(
            is_due,
            lambda loops, *args: calibrate(loops, cohort, *args),
            lambda hp, variables, key: variables,
            *(hp, variables, key),
        )
        return result, step_state

    def initial_traffic(data):
        base_traffic = algorithm.initial_traffic(data)
        num_clients = int((data.partition.sizes > 0).sum())
        size = count_features(model)
        statistics = 4 * model.num_classes * (1 + size + size**2)
        model_size = num_bytes(jax.eval_shape(model.init, make_key(0)))
        return InitialTraffic(
            down=base_traffic.down + num_clients * model_size,
            up=base_traffic.up + num_clients * statistics,
        )

    return with_server_step(
        algorithm._replace(
            initial_traffic=initial_traffic,
            round_inputs=(*algorithm.round_inputs, CLASS_BATCHES),
        ),
        run_server_step,
        server_batch_size=options.calibration_batch_size,
        feeds_back=False,
    )


def _make_head_loss(head: Head):
    """Return the cross-entropy of a head on features, see `ServerTraining`."""

    def loss_and_gradient(variables, batch, key):
        def loss(layer):
            logits = head.apply(layer, batch.inputs)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
            return (losses * batch.mask).sum() / jnp.maximum(batch.mask.sum(), 1)

        value, gradient = jax.value_and_grad(loss)(variables["params"])
        return value, gradient, variables

    return loss_and_gradient


def _plan_batches(key: jax.Array, is_visited: jax.Array, batch_size: int) -> BatchPlan:
    """Plan epochs that visit the marked examples in random orders."""
    num_examples = len(is_visited)

    def order(epoch):
        shuffled = jax.random.permutation(jax.random.fold_in(key, epoch), num_examples)
        return shuffled[jnp.argsort(~is_visited[shuffled], stable=True)]

    return BatchPlan(order, is_visited.sum(), min(batch_size, num_examples))


SPEC = AlgorithmSpec(
    "ccvr",
    ccvr,
    "the head is trained on draws from Gaussians of all clients' features (Luo et al., 2021)",
    title="CCVR",
    paper="Luo et al., NeurIPS 2021, arXiv:2106.05001",
    options=CCVROptions,
    hyperparameters=CCVRHyperParameters,
    color="#1F9E89",
    dashes=(0, (3, 1)),
    wraps="model",
    needs_classes=True,
)
