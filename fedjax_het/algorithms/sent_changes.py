"""The change of the model that a client sends, as a part of its upload."""

from collections.abc import Callable
from typing import Any

from fedjax_het.algorithms.local_parameters import ParameterSplit
from fedjax_het.core.client_algorithm import ClientUpdate
from fedjax_het.core.model_change import find_model_change

Tree = Any


def find_sent_change(
    update: ClientUpdate, variables: Tree, unsent: ParameterSplit | None
) -> tuple[Tree, Callable[[Tree], ClientUpdate]] | None:
    """Find the change of the sent parameters in an update.

    Args:
      update: the update of a client, or the average of a round.
      variables: variables of the message, `{"params": ..., "state": ...}`.
      unsent: places of variables that clients do not send; None for none.

    Returns:
      A pair of the change and a function, or None if the update contains no change of the model.
      The change has None in place of parameters that clients do not send. The function returns
      `update` with another change.

    Example:
      >>> from fedjax_het.algorithms.sent_changes import find_sent_change
      >>> from fedjax_het.methods import ClientUpdate
      >>> update, variables = ClientUpdate(mean={"params": [2.0]}), {"params": [1.0], "state": {}}
      >>> change, replace = find_sent_change(update, variables, unsent=None)
      >>> change, replace([5.0]).mean
      ([2.0], {'params': [5.0]})
    """
    found = find_model_change(update.mean, variables["params"])
    if found is None:
        return None
    change, replace_part = found

    def replace(sent: Tree) -> ClientUpdate:
        if unsent is not None:
            whole = {**variables, "params": change}
            shared = {**unsent.drop_local(whole), "params": sent}
            sent = unsent.join(shared, unsent.get_local(whole))["params"]
        return update._replace(mean=replace_part(sent))

    return select_sent_params({**variables, "params": change}, unsent), replace


def select_sent_params(variables: Tree, unsent: ParameterSplit | None) -> Tree:
    """Return the parameters that clients send.

    Args:
      variables: variables of the messages, `{"params": ..., "state": ...}`.
      unsent: places of variables that clients do not send; None for none.

    Returns:
      The parameters, with None in place of the others.
    """
    return (variables if unsent is None else unsent.drop_local(variables))["params"]
