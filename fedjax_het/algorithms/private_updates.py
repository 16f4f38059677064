"""Client-level differential privacy: clients clip their changes, and the server adds noise.

The guarantee holds if a client sends nothing but the change of the model. Methods whose clients
send more are refused.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm, State, with_inner_states
from fedjax_het.algorithms.local_parameters import ParameterSplit
from fedjax_het.algorithms.sent_changes import find_sent_change
from fedjax_het.core.client_algorithm import ClientAlgorithm, ClientUpdate, HyperParameters
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.privacy import ClientLevel, PrivacyMechanism
from fedjax_het.utils.errors import ConfigError, make_value_error

Tree = Any
_CLIP_NORM = "privacy_clip_norm"  # the adapted norm of a round, beside the hyperparameters


class PrivateServerState(NamedTuple):
    """The server's state of a method with adaptive clipping."""

    inner: Tree
    "The server's state of the method."
    clip_norm: jax.Array
    "`[]` float32: largest norm of a change in the next round."


def make_privacy_error(mechanism: PrivacyMechanism, expected: str) -> ConfigError:
    """Return the error of a mechanism whose guarantee would not hold.

    Args:
      mechanism: the run's mechanism.
      expected: the values that the method accepts.

    Returns:
      An error of one line.
    """
    return make_value_error("privacy", mechanism.name, expected)


def get_client_level(training: LocalTraining) -> ClientLevel | None:
    """Return the mechanism of a run with client-level privacy; None for other runs."""
    return training.privacy if isinstance(training.privacy, ClientLevel) else None


def get_clip_norm(mechanism: ClientLevel, hp: HyperParameters) -> Any:
    """Return the largest norm of a change in a round.

    Args:
      mechanism: the mechanism.
      hp: values of the hyperparameters by name, with the norm that adaptive clipping has reached.

    Returns:
      The norm, `[]`.
    """
    return hp.get(_CLIP_NORM, mechanism.clip_norm)


def clip_change(change: Tree, max_norm: Any) -> tuple[Tree, jax.Array]:
    """Scale a change down to a largest norm.

    Args:
      change: trees of arrays.
      max_norm: the largest L2 norm, `[]`.

    Returns:
      The change, and whether it was within the norm, bool `[]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.algorithms.private_updates import clip_change
      >>> change, is_within = clip_change({"w": jnp.array([3.0, 4.0])}, 1.0)
      >>> [round(float(v), 3) for v in change["w"]], bool(is_within)
      ([0.6, 0.8], False)
    """
    norm = optax.tree.norm(change)
    factor = max_norm / jnp.maximum(norm, max_norm)
    return jax.tree.map(lambda a: a * factor, change), norm <= max_norm


def with_private_change(
    client: ClientAlgorithm, mechanism: PrivacyMechanism, unsent: ParameterSplit | None
) -> ClientAlgorithm:
    """Return a client that sends nothing but the change of the model, which may be clipped.

    Args:
      client: a client algorithm whose messages have `variables`.
      mechanism: the run's mechanism.
      unsent: places of variables that clients do not send.

    Returns:
      The client. With client-level privacy, `ClientUpdate.sum` is 1 if the change was within the
      norm, else 0.
    """

    def end(context, local, state):
        update, state, output = client.end(context, local, state)
        found = find_sent_change(update, context.message.variables, unsent)
        if found is None:
            raise make_privacy_error(mechanism, "a method whose clients send changes of the model")
        sent, replace = found
        _require_no_more(mechanism, update, sent, unsent)
        if not isinstance(mechanism, ClientLevel):
            return update, state, output
        sent, is_within = clip_change(sent, get_clip_norm(mechanism, context.hp))
        return replace(sent)._replace(sum=jnp.int32(is_within)), state, output

    return client._replace(end=end)


def _require_no_more(
    mechanism: PrivacyMechanism, update: ClientUpdate, sent: Tree, unsent: ParameterSplit | None
) -> None:
    """Raise ConfigError for an upload that contains more than the change of the parameters."""
    if unsent is not None:
        update = unsent.drop_local_changes(update)
    if jax.tree.leaves(update.sum) or len(jax.tree.leaves(update.mean)) > len(
        jax.tree.leaves(sent)
    ):
        expected = "no value: clients send more than the change of the parameters, such as "
        expected += "statistics of batch norm, control variates or losses"
        raise make_privacy_error(mechanism, expected)


def add_private_noise(
    mechanism: ClientLevel,
    update: ClientUpdate,
    variables: Tree,
    unsent: ParameterSplit | None,
    *,
    hp: HyperParameters,
    num_trained: jax.Array,
    cohort_size: float,
    key: jax.Array,
) -> ClientUpdate:
    """Return the mean change with noise, over the expected number of clients.

    Args:
      mechanism: the mechanism.
      update: the mean over the clients that trained.
      variables: variables of the message.
      unsent: places of variables that clients do not send.
      hp: values of the hyperparameters by name, with the norm of the round.
      num_trained: number of clients that trained, `[]`.
      cohort_size: expected number of clients of a round, the divisor of the sum.
      key: PRNG key of the round.

    Returns:
      The update with the noisy mean, and without sums.
    """
    found = find_sent_change(update, variables, unsent)
    assert found is not None, "see `with_private_change`"
    mean, replace = found
    mean = jax.tree.map(lambda a: a * (num_trained / cohort_size), mean)
    multiplier = mechanism.compute_update_multiplier(cohort_size)
    if multiplier:
        std = multiplier * get_clip_norm(mechanism, hp) / cohort_size
        noise = optax.tree.random_like(fold_in_purpose(key, Purpose.PRIVACY), mean)
        mean = jax.tree.map(lambda a, n: a + std * n, mean, noise)
    return replace(mean)._replace(sum=())


def with_private_rounds(
    algorithm: Algorithm, mechanism: ClientLevel, cohort_size: float
) -> Algorithm:
    """Return a method that records the share of clipped changes, and adapts the norm if required.

    Args:
      algorithm: a method whose rounds return `RoundInfo.num_within_norm`.
      mechanism: the mechanism.
      cohort_size: expected number of clients of a round.

    Returns:
      The method with the records `clipped_fraction`, the share of the round's clients whose change
      was clipped, and `clip_norm`, the largest norm of the round. With adaptive clipping its
      server's state is a `PrivateServerState`.
    """
    adapts = mechanism.quantile is not None
    get_shapes = algorithm.record_shapes

    def get_inner(state: State) -> State:
        return state._replace(server=state.server.inner) if adapts else state

    def with_inner(state: State, inner: State) -> State:
        return inner._replace(server=state.server._replace(inner=inner.server)) if adapts else inner

    def init(hp, key, variables, num_clients):
        state = algorithm.init(hp, key, variables, num_clients)
        if not adapts:
            return state
        clip_norm = jnp.float32(mechanism.clip_norm)
        return state._replace(server=PrivateServerState(state.server, clip_norm))

    def round_(hp, state, key, cohort):
        if adapts:
            hp = {**hp, _CLIP_NORM: state.server.clip_norm}
        new, info = algorithm.round(hp, get_inner(state), key, cohort)
        num_trained, num_within_norm = info.num_trained, info.num_within_norm
        assert num_trained is not None and num_within_norm is not None
        clipped = num_trained - num_within_norm
        clip_norm = jnp.float32(get_clip_norm(mechanism, hp))
        clipped_fraction = clipped / jnp.maximum(num_trained, 1)
        records = {"clipped_fraction": clipped_fraction, "clip_norm": clip_norm}
        info = info._replace(records=info.records | records)
        new = with_inner(state, new)
        if mechanism.quantile is None:
            return new, info
        key = fold_in_purpose(key, Purpose.PRIVATE_COUNT)
        std = mechanism.get_count_std(cohort_size)
        # Each client adds 1/2 or -1/2, so the noise on the sum has the multiplier 2 std.
        total = num_within_norm - num_trained / 2 + std * jax.random.normal(key)
        share = 0.5 + total / cohort_size
        clip_norm = clip_norm * jnp.exp(-mechanism.clip_lr * (share - mechanism.quantile))
        return new._replace(server=new.server._replace(clip_norm=clip_norm)), info

    return with_inner_states(algorithm, get_inner, with_inner)._replace(
        init=init,
        round=round_,
        record_shapes=lambda k: {**get_shapes(k), "clipped_fraction": (), "clip_norm": ()},
    )
