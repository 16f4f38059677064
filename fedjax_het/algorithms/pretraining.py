"""Pretraining: the first model of a run is trained on the server's examples."""

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm, ServerStage
from fedjax_het.algorithms.server_step import ServerStepState, inner_state, with_server_step
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.core.server_training import train_on_server
from fedjax_het.utils.config import Bounds, HyperParameter

PRETRAINING_HYPERPARAMETERS = {"pretrain_lr": HyperParameter(0.01, Bounds(0))}


def with_pretraining(
    algorithm: Algorithm,
    training: LocalTraining,
    plan: ExecutionPlan,
    epochs: int,
    num_clients: int,
) -> Algorithm:
    """Return `algorithm` whose first model is trained on the server's examples.

    SGD at `pretrain_lr` in batches of local training's size (FSL, section IV-B: 500 epochs at
    0.01). The method then starts from the trained model, and derives all states from it.
    Cost: epochs * ceil(n_0 / batch_size) steps, once; shown and resumed like rounds.

    Args:
      algorithm: a method with one global model.
      training: the choices of local training.
      plan: devices that share the work.
      epochs: number of epochs over the server's examples.
      num_clients: number of clients in the federation, K.

    Returns:
      The method with a server stage "pretraining".
    """
    get_model, set_model = algorithm.global_model, algorithm.with_global_model
    assert get_model is not None and set_model is not None, "a method with a global model"

    def train_on_shard(parallelism: ServerParallelism, variables, examples, key, lr, count, first):
        return train_on_server(
            *(training.task, variables, examples, key),
            batch_size=training.batch_size,
            lr=lr,
            epochs=count,
            first_epoch=first,
            server_parallelism=parallelism,
        )

    def advance(hp, state, key, num_iterations, server_examples: Examples | None):
        assert server_examples is not None  # a run that pretrains has a server with examples
        first, inner = state.server.step_state, inner_state(state)
        args = (get_model(inner), server_examples, key, hp["pretrain_lr"], num_iterations, first)
        variables = plan.shard_server_work(train_on_shard, *args)
        completed = first + num_iterations
        leaves = jax.tree.leaves(state.clients)  # rows of all clients, or of a table
        num_rows = leaves[0].shape[0] if leaves else num_clients
        initial = algorithm.init(hp, key, variables, num_rows)
        new = jax.tree.map(
            lambda a, b: jnp.where(completed == epochs, a, b).astype(b.dtype),
            initial,
            set_model(inner, variables),
        )
        return new._replace(server=ServerStepState(new.server, completed))

    wrapped = with_server_step(
        algorithm,
        lambda hp, step_state, context: (context.variables_after, step_state),
        init_step_state=lambda hp, key, variables: jnp.int32(0),
        server_batch_size=training.batch_size,
    )
    stage = ServerStage(
        "pretraining",
        before_rounds=(0,),
        num_iterations=epochs,
        count_completed=lambda state: int(state.server.step_state),
        advance=advance,
    )
    return wrapped._replace(server_stages=(stage, *wrapped.server_stages))
