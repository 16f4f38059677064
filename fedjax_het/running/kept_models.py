"""The models of a run whose state was kept in a file."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_het.algorithms.contract import State
from fedjax_het.common.errors import require
from fedjax_het.engine.checkpoint import load_checkpoint
from fedjax_het.engine.randomness import Stream, device_key
from fedjax_het.running.checkpoint_record import read_record
from fedjax_het.running.programs import Signature, algorithm_of, training_of
from fedjax_het.running.trained import Inputs, TrainedModel, signature_with, trained_model
from fedjax_het.settings.layers import USER
from fedjax_het.settings.spec import ResolvedSpec, RunSpec


def kept_model(
    path: Path, client: int | None = None, *, network: Any = None, optimizer: Any = None
) -> TrainedModel:
    """The global model of a run that was written to a file as it ended, or that of a client.

    network, optimizer: the user's own, as they were given to the run. Raises DamagedFileError;
    ConfigError as `load_model` does. Cost: reading the states of all clients.
    """
    record = read_record(path)
    spec, inputs = RunSpec.from_dict(record["spec"]).resolved(), Inputs.read(record["inputs"])
    own = spec.local_optimizer == USER
    expected = "the optimizer that the run had" if own else "none, as the run names its own"
    require((optimizer is not None) == own, "optimizer", optimizer, expected)
    digest = record.get("network_digest")
    signature = signature_with(spec, inputs, network, digest, optimizer)
    hp = {name: np.float32(value) for name, value in spec.hp.items()}
    state = _state(path, record, signature, spec, hp)
    return trained_model(signature, spec, inputs, state, hp, client)


def _state(
    path: Path, record: dict, signature: Signature, spec: ResolvedSpec, hp: dict[str, Any]
) -> State:
    """As it is in the file, which has the states of clients that were trained alone where they were
    on the host: then they have no models of their own."""
    key, touched = device_key(spec.seed, Stream.INIT), record["touched"]

    def begin() -> State:
        variables = training_of(signature).task.model.init(key)
        return algorithm_of(signature).init(hp, key, variables, spec.num_clients)

    like = jax.eval_shape(begin)
    if touched is not None:
        rows = lambda a: jax.ShapeDtypeStruct((touched, *a.shape[1:]), a.dtype)  # noqa: E731
        like = like._replace(clients=jax.tree.map(rows, like.clients))
    (state,) = load_checkpoint(path, (like,))
    return state
