"""The contract of a client algorithm: the work of one client in a round.

The functions `begin`, `step` and `end` of a `ClientAlgorithm` are called at the start of a round,
for each minibatch, and at the end of the round. `fedjax_het.methods` shows an example.

`context` is a `ClientContext`: hyperparameters, message of the server, properties of the client,
PRNG key. The engine computes the weighted average of `ClientUpdate.mean` over the round's clients,
with the weights of the run's `averaging`, and the sum of `ClientUpdate.sum`. A method never sees a
weight.

`core.contract_checks` checks the functions of a method while the program is traced.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedjax_het.core.resumable_loops import CLIENTS
from fedjax_het.nn.batch_axis import BatchAxis
from fedjax_het.utils.former_names import FORMER_INPUT_NAMES, accept_former_fields

Tree = Any
HyperParameters = dict[str, jax.Array]
"""Values of hyperparameters by name, float32 scalars."""


@accept_former_fields({"init_images": "init_inputs"})
class ClientInfo(NamedTuple):
    """Properties of one client in a round.

    Attributes:
      id: `[]` int32, index of the client, 0 to K - 1. For methods that condense data, index of the
        pair of client and class.
      num_samples: `[]` int32, number of training examples of the client.
      num_steps: `[]` int32, number of minibatches in the round, over all passes.
      init_inputs: `[I, ...]`, stored inputs from which a client that condenses data starts.
        I = 0 in local training.
      staleness: `[]` int32, updates of the server since the client received its model; 0 unless the
        method is asynchronous.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.methods import ClientInfo
      >>> count = jnp.int32(20)
      >>> int(ClientInfo(id=jnp.int32(3), num_samples=count, num_steps=count, init_inputs=()).id)
      3
    """

    id: jax.Array
    num_samples: jax.Array
    num_steps: jax.Array
    init_inputs: jax.Array
    staleness: jax.Array | int = 0


class ClientContext(NamedTuple):
    """Values that every function of a client reads in addition to the client's own arrays.

    Example:
      >>> from fedjax_het.methods import ClientContext, ServerMessage
      >>> message = ServerMessage({"params": 1.0, "state": {}})
      >>> context = ClientContext({"local_lr": 0.1}, message, client=None, key=None)
      >>> context.message.variables["params"]
      1.0
    """

    hp: HyperParameters
    "Values of the hyperparameters by name, `[]` float32, traced: a new value compiles nothing."
    message: Tree
    "Message of the server to all clients of the round, usually a `ServerMessage`."
    client: ClientInfo
    "Properties of the client."
    key: jax.Array
    """PRNG key: in `begin` and `end` the client's own key of the round, in `step` the key of that
    step, `fold_in(client's key, step_index)`."""


@accept_former_fields(FORMER_INPUT_NAMES)
class Batch(NamedTuple):
    """One minibatch as stored; `Task.normalize` computes the network's inputs.

    Attributes:
      inputs: images `[B, H, W, C]` or other inputs, or arrays by name; as stored, not normalized.
      labels: `[B]` int32.
      mask: `[B]` float32, 1 for examples, 0 for padding.
      step_index: `[]` int32, number of minibatches that the client has processed in this round.
      axis: devices that share the batch, of which this is one part. None for a whole batch, as
        clients always have.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.methods import Batch
      >>> inputs, labels = jnp.zeros((8, 28, 28, 1)), jnp.zeros(8, jnp.int32)
      >>> Batch(inputs, labels, mask=jnp.ones(8), step_index=jnp.int32(0)).inputs.shape
      (8, 28, 28, 1)
    """

    inputs: jax.Array
    labels: jax.Array
    mask: jax.Array
    step_index: jax.Array
    axis: BatchAxis | None = None


class ClientUpdate(NamedTuple):
    """The upload of a client; for the server, mean and sum over all clients of a round.

    Leaves may be arrays of any type except PRNG keys. Types of less than 32 bits are widened to 32
    bits before they are averaged or summed. Floats become float32. Booleans and integers become
    float32 in `mean` and integers in `sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.methods import ClientUpdate
      >>> ClientUpdate(mean={"change": jnp.ones(3)}, sum=jnp.int32(1)).mean["change"].shape
      (3,)
    """

    mean: Tree = ()
    """Averaged over the round's clients with the weights of the run's `averaging`. Zero if no
    client has trained."""
    sum: Tree = ()
    "Summed over the round's clients."


class ClientAlgorithm(NamedTuple):
    """The training of one client: pure functions of a single client, which jax can trace.

    State, local, update and output are pytrees of arrays of any type; updates without PRNG keys.

    Example:
      >>> from fedjax_het.methods import ClientAlgorithm, ClientUpdate
      >>> idle = ClientAlgorithm(
      ...     init=lambda hp, variables: (),
      ...     begin=lambda context, state: context.message.variables,
      ...     step=lambda context, local, batch: (local, 0.0),
      ...     end=lambda context, local, state: (ClientUpdate(mean=local), state, ()),
      ... )
      >>> idle.extra_passes
      0
    """

    init: Callable[[HyperParameters, Tree], Tree]
    """`init(hp, variables) -> state`: the arrays that the client stores between rounds, before its
    first round; `()` for none. `variables` contain the initial global model."""
    begin: Callable[[ClientContext, Tree], Tree]
    "`begin(context, state) -> local`: the arrays that the client carries from step to step."
    step: Callable[[ClientContext, Tree, Batch], tuple[Tree, jax.Array]]
    """`step(context, local, batch) -> (local, loss)`: `local` with unchanged structure, shapes and
    types; the mean loss of the minibatch, a float32 scalar."""
    end: Callable[[ClientContext, Tree, Tree], tuple[ClientUpdate, Tree, Tree]]
    """`end(context, local, state) -> (update, state, output)`: the client's upload, its new state,
    and any arrays that the round reads for each client. The state keeps its structure, shapes and
    types."""
    extra_passes: int = 0
    "Passes over the client's data before its local epochs."
    outputs_models: bool = False
    """Whether outputs are models, all of which every device receives: `CohortResult.outputs` is
    then a `ClientModels`."""
    phase: str = CLIENTS
    "Name of the training in the progress of a resumable round."
