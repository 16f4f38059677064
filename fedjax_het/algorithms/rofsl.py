"""RoFSL, robust federated learning with server learning (Mai et al., 2026, arXiv:2604.03226)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation import ClientUpdates, GeometricMedian, RobustAggregation
from fedjax_het.aggregation.base import compute_norms
from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.fsl import FSL, FSLHyperParameters, FSLOptions, fsl
from fedjax_het.core.client_loop import Cohort, Examples
from fedjax_het.core.client_rows import tile_over_clients
from fedjax_het.core.distillation import score_models
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.gradient_diagnostics import compute_gradient_moments
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.core.server_training import make_sequential_batches
from fedjax_het.utils.config import Bounds, SearchRange

_SMALLEST_NORM = 1e-12
_Margin = Annotated[float, Bounds(-1, 1)]


@dataclass(frozen=True)
class RoFSLOptions(FSLOptions):
    """Choices of RoFSL."""

    filter: Literal["loss", "angle", "none"] = "loss"
    """Updates that the server uses: "loss", updates that lower the server's loss; "angle", updates
    with a small angle to the server's negative gradient; "none", all updates."""
    clipping: Literal["median", "none"] = "median"
    """Largest norm of an update: "median", the median of the norms of the used updates; "none", no
    limit."""


@dataclass(frozen=True)
class RoFSLHyperParameters(FSLHyperParameters):
    """Hyperparameters of RoFSL."""

    filter_margin: Annotated[_Margin, SearchRange(-0.2, 0.2, is_log=False)] = 0.0
    """Threshold of the filter, in [-1, 1]. "loss": the loss may rise by this share of its value;
    "angle": smallest cosine of the angle."""


def rofsl(
    training: LocalTraining,
    plan: ExecutionPlan,
    *,
    base: Callable[..., Algorithm],
    options: RoFSLOptions,
) -> Algorithm:
    """RoFSL: the server filters the clients' updates by its own examples D_0, then learns itself.

    In each round the server
      1. keeps client i if f_0(x + u_i) <= (1 + m) f_0(x) ("loss"), or if
         cos(u_i, -grad f_0(x)) >= m ("angle"), with m `filter_margin`;
      2. scales the kept updates down to the median of their norms;
      3. takes their geometric median, or the rule of the setting `aggregation`;
      4. trains on D_0, as FSL does after the clients' average.
    Without a kept update the clients change nothing.

    This is a reading of the paper's abstract, introduction and public summaries; its full text was
    not read. They name filtering by angle or loss, norm clipping, the geometric median and the
    step of the server. They leave open the threshold of the filter, the bound of the norms, the
    order of clipping and filtering, and the weight `gamma`.

    Traffic and client state equal the traffic and state of `base`. Cost beyond FSL: a pass over D_0
    for each client ("loss") or a gradient on D_0 ("angle"), and the changes of S clients in memory.

    Args:
      training: the choices of local training.
      plan: where the clients run, and the devices that share the server's work.
      base: `base(training, plan)`, the method whose model the server trains.
      options: choices of the method.

    Returns:
      The method.
    """
    rules = training.aggregations
    if not any(isinstance(rule, RobustAggregation) for rule in rules):
        rules = (*rules, GeometricMedian())
    weigh = _make_filter(training, plan, options)
    return fsl(
        training._replace(aggregations=rules, weigh_updates=weigh), plan, base=base, options=options
    )


def _make_filter(
    training: LocalTraining, plan: ExecutionPlan, options: RoFSLOptions
) -> Callable[..., jax.Array]:
    """Return the function that `LocalTraining.weigh_updates` describes."""
    task = training.task
    compute_losses = partial(score_models, task, task.kind.compute_losses)

    def compute_gradient(parallelism: ServerParallelism, variables, examples: Examples):
        batches = make_sequential_batches(len(examples.labels), training.batch_size)
        args = (task, variables, examples, batches)
        return compute_gradient_moments(*args, server_parallelism=parallelism)[0]

    def is_accepted(hp, variables, updates: ClientUpdates, cohort: Cohort) -> jax.Array:
        examples, margin = cohort.server_examples, hp["filter_margin"]
        if options.filter == "loss":
            add = lambda p, u: jnp.concatenate([p[None], p + u])  # noqa: E731
            params = jax.tree.map(add, variables["params"], updates.changes)
            models = {**tile_over_clients(variables, len(updates.weights) + 1), "params": params}
            args = (compute_losses, models, examples)
            losses = plan.shard_server_work(*args, loops=cohort.loops).mean(0)
            return losses[1:] <= (1 + margin) * losses[0]
        if options.filter == "angle":
            # Collectives in order: first the collective of the clients' training.
            variables = plan.order_after(compute_norms(updates.changes).sum(), variables)
            gradient = plan.shard_server_work(
                compute_gradient, variables, examples, loops=cohort.loops
            )
            products = jax.tree.map(
                lambda u, g: (u * g).reshape(len(u), -1).sum(1), updates.changes, gradient
            )
            product = -sum(jax.tree.leaves(products))
            lengths = compute_norms(updates.changes) * optax.tree.norm(gradient)
            return product >= margin * jnp.maximum(lengths, _SMALLEST_NORM)
        return updates.is_present

    def weigh(hp, variables, updates: ClientUpdates, cohort: Cohort) -> jax.Array:
        is_kept = updates.is_present & is_accepted(hp, variables, updates, cohort)
        if options.clipping == "none":
            return is_kept.astype(jnp.float32)
        norms = compute_norms(updates.changes)
        median = jnp.nanmedian(jnp.where(is_kept, norms, jnp.nan))
        factors = jnp.minimum(1, median / jnp.maximum(norms, _SMALLEST_NORM))
        return jnp.where(is_kept, factors, 0)

    return weigh


SPEC = replace(
    FSL,
    name="rofsl",
    build=rofsl,
    description="FSL whose server filters updates by its examples and takes their median "
    "(Mai et al., 2026)",
    title="RoFSL",
    paper="Mai, Chakrabarti, La and Maity, 2026, arXiv:2604.03226",
    options=RoFSLOptions,
    hyperparameters=RoFSLHyperParameters,
    color="#4477AA",
)
