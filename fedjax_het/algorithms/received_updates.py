"""Updates as the server receives them: attacks of malicious clients, and robust aggregation.

Attacks and rules concern the change of the parameters. All other parts of an upload, such as
batch-norm statistics and control variates, are honest and averaged.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.aggregation import (
    Bucketing,
    ClientUpdates,
    RobustAggregation,
    UpdateClipping,
)
from fedjax_het.aggregation.base import average_changes, compute_clip_factors, scale_changes
from fedjax_het.algorithms.base import FederationData, RoundInput
from fedjax_het.algorithms.local_parameters import ParameterSplit
from fedjax_het.algorithms.private_updates import get_client_level, get_clip_norm
from fedjax_het.algorithms.sent_changes import find_sent_change
from fedjax_het.attacks import Attack
from fedjax_het.attacks.updates import replace_malicious
from fedjax_het.core.client_algorithm import ClientAlgorithm, ClientUpdate, HyperParameters
from fedjax_het.core.client_loop import Cohort
from fedjax_het.core.client_rows import ClientModels
from fedjax_het.core.contract_checks import ContractError
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.utils.arrays import normalize_weights

Tree = Any
MALICIOUS_INPUT = "malicious_clients"  # name of the rounds' input


def with_sent_change(client: ClientAlgorithm, unsent: ParameterSplit | None) -> ClientAlgorithm:
    """Return a client algorithm whose output is the change that the client sends.

    Args:
      client: a client algorithm whose messages have `variables`.
      unsent: places of variables that clients do not send.

    Returns:
      The client. `CohortResult.outputs` is a `ClientModels` of the changes.
    """

    def end(context, local, state):
        update, state, _ = client.end(context, local, state)
        found = find_sent_change(update, context.message.variables, unsent)
        if found is None:
            raise ContractError("attack, aggregation: expected clients that send model changes")
        return update, state, found[0]

    return client._replace(end=end, outputs_models=True)


def combine_received(
    training: LocalTraining,
    hp: HyperParameters,
    update: ClientUpdate,
    sent: ClientModels,
    variables: Tree,
    unsent: ParameterSplit | None,
    cohort: Cohort,
    key: jax.Array,
) -> ClientUpdate:
    """Return the round's update after attacks and robust aggregation.

    Without a rule that replaces the mean, the differences of the changes are averaged and added to
    the mean. Changes that no attack or clipping touches therefore leave every bit of it.

    Args:
      training: the attacks and rules: attacks, filter, clipping, bucketing, at most one rule.
      hp: values of the hyperparameters by name.
      update: the mean and sum over the round's clients.
      sent: the changes that the clients send, `[S, ...]`.
      variables: variables of the message.
      unsent: places of variables that clients do not send.
      cohort: the cohort of the round.
      key: PRNG key of the round.

    Returns:
      The update whose mean has the combined change.
    """
    found = find_sent_change(update, variables, unsent)
    assert found is not None, "see `with_sent_change`"
    mean, replace = found
    key = fold_in_purpose(key, Purpose.ATTACK)
    honest = ClientUpdates(*sent)
    received = honest
    for i, attack in enumerate(training.attacks):
        is_malicious = cohort.inputs[MALICIOUS_INPUT][i, cohort.schedule.participants]
        forged = attack.forge(received, is_malicious, jax.random.fold_in(key, i))
        received = received._replace(changes=replace_malicious(received, is_malicious, forged))
    client_level = get_client_level(training)
    if client_level is not None:  # the server does not rely on malicious clients
        max_norm = get_clip_norm(client_level, hp)
        factors = compute_clip_factors(received.changes, max_norm)
        received = received._replace(changes=scale_changes(received.changes, factors))
    if training.weigh_updates is not None:
        factors = training.weigh_updates(hp, variables, received, cohort)
        received = _scale_and_select(received, factors)
    for rule in training.aggregations:
        if isinstance(rule, UpdateClipping):
            factors = rule.compute_factors(received)
            received = received._replace(changes=scale_changes(received.changes, factors))
        elif isinstance(rule, Bucketing):
            received = rule.group(received, fold_in_purpose(key, Purpose.AGGREGATION))
    combine = [rule for rule in training.aggregations if isinstance(rule, RobustAggregation)]
    if not combine:
        differences = jax.tree.map(
            jnp.subtract,
            average_changes(received.changes, received.weights),
            average_changes(honest.changes, honest.weights),
        )
        return replace(jax.tree.map(jnp.add, mean, differences))
    combined = combine[0].combine(received)
    has_clients = received.num_present > 0
    return replace(jax.tree.map(lambda a: jnp.where(has_clients, a, 0), combined))


def _scale_and_select(updates: ClientUpdates, factors: jax.Array) -> ClientUpdates:
    """Return the updates times their factors; updates with the factor 0 count as absent."""
    is_present = updates.is_present & (factors > 0)
    weights = normalize_weights(jnp.where(is_present, updates.weights, 0))
    return ClientUpdates(scale_changes(updates.changes, factors), weights, is_present)


def make_malicious_input(attacks: Sequence[Attack]) -> RoundInput:
    """Return the rounds' input that names the malicious clients.

    Args:
      attacks: attacks on updates.

    Returns:
      An input of bool arrays `[A, K]`.
    """

    def make_inputs(federations: Sequence[FederationData]) -> list[np.ndarray]:
        return [
            np.array([attack.choose_clients(f.partition.num_clients, f.seed) for attack in attacks])
            for f in federations
        ]

    return RoundInput(MALICIOUS_INPUT, make_inputs)
