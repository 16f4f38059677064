"""Pretraining: the server's model learns from the server's own examples before the first round."""

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.contract import Algorithm, ServerStage, require_global_model
from fedjax_het.algorithms.refined import ServerStepState, inner_state, with_server_step
from fedjax_het.common.records import Bounds, HyperParameter
from fedjax_het.engine.lanes import Examples
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.plan import ExecutionPlan
from fedjax_het.engine.server import train_on_server
from fedjax_het.engine.sharing import ServerParallelism

PRETRAINING_HYPERPARAMETERS = {"pretrain_lr": HyperParameter(0.01, Bounds(0))}


def with_pretraining(
    algorithm: Algorithm,
    training: LocalTraining,
    plan: ExecutionPlan,
    epochs: int,
    num_clients: int,
) -> Algorithm:
    """`algorithm`, whose first model has seen the server's examples for `epochs` epochs.

    SGD at `pretrain_lr` in batches of local training's size (FSL, section IV-B: 500 epochs at
    0.01). The method then begins as if that were the first draw of its network: what clients or the
    server derive from the first model is derived from it.
    Cost: epochs * ceil(n_0 / batch_size) steps, once; shown and resumed like rounds.
    """

    get_model, set_model = require_global_model(algorithm)

    def train_on_shard(
        server_parallelism: ServerParallelism, variables, examples, key, lr, num_epochs, first_epoch
    ):
        return train_on_server(
            training.task,
            variables,
            examples,
            key,
            batch_size=training.batch_size,
            lr=lr,
            epochs=num_epochs,
            first_epoch=first_epoch,
            server_parallelism=server_parallelism,
        )

    def advance(hp, state, key, num_iterations, server_examples: Examples | None):
        assert server_examples is not None  # a run that pretrains has a server with examples
        completed_epochs = state.server.step_state
        start_variables = get_model(inner_state(state))
        variables = plan.shard_server_work(
            train_on_shard,
            start_variables,
            server_examples,
            key,
            hp["pretrain_lr"],
            num_iterations,
            completed_epochs,
        )
        client_state_leaves = jax.tree.leaves(
            state.clients
        )  # of all clients, or of those that are here
        num_rows = client_state_leaves[0].shape[0] if client_state_leaves else num_clients
        initial_state = algorithm.init(hp, key, variables, num_rows)
        continued_state = set_model(inner_state(state), variables)
        new_inner_state = jax.tree.map(
            lambda a, b: jnp.where(completed_epochs + num_iterations == epochs, a, b).astype(
                b.dtype
            ),
            initial_state,
            continued_state,
        )
        return new_inner_state._replace(
            server=ServerStepState(new_inner_state.server, completed_epochs + num_iterations)
        )

    wrapped_algorithm = with_server_step(
        algorithm,
        lambda hp, step_state, context: (context.variables_after, step_state),
        init_step_state=lambda hp, key, variables: jnp.int32(0),
        server_batch_size=training.batch_size,
    )
    stage = ServerStage(
        "pretraining",
        before_round=0,
        num_iterations=epochs,
        count_completed=lambda state: int(state.server.step_state),
        advance=advance,
    )
    return wrapped_algorithm._replace(server_stages=(stage, *wrapped_algorithm.server_stages))
