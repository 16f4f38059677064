"""The models of a run whose state was kept in a file."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_het.algorithms.contract import State
from fedjax_het.common.errors import require
from fedjax_het.engine.checkpoint import load_checkpoint
from fedjax_het.engine.randomness import Stream, make_stream_key
from fedjax_het.running.checkpoint_record import read_checkpoint_record
from fedjax_het.running.programs import Signature, build_algorithm, build_local_training
from fedjax_het.running.trained import (
    InputSpec,
    TrainedModel,
    build_signature_from_file,
    extract_model,
)
from fedjax_het.settings.layers import USER_PROVIDED
from fedjax_het.settings.spec import ResolvedRunSpec, RunSpec


def load_state_model(
    path: Path, client: int | None = None, *, network: Any = None, optimizer: Any = None
) -> TrainedModel:
    """The global model of a run that was written to a file as it ended, or that of a client.

    network, optimizer: the user's own, as they were given to the run. Raises DamagedFileError;
    ConfigError as `load_model` does. Cost: reading the states of all clients.
    """
    record = read_checkpoint_record(path)
    spec, input_spec = (
        RunSpec.from_dict(record["spec"]).resolved(),
        InputSpec.from_record(record["inputs"]),
    )
    has_user_optimizer = spec.local_optimizer == USER_PROVIDED
    expected = (
        "the optimizer that the run had" if has_user_optimizer else "none, as the run names its own"
    )
    require((optimizer is not None) == has_user_optimizer, "optimizer", optimizer, expected)
    digest = record.get("network_digest")
    signature = build_signature_from_file(spec, input_spec, network, digest, optimizer)
    hp = {name: np.float32(value) for name, value in spec.hp.items()}
    state = _load_state(path, record, signature, spec, hp)
    return extract_model(signature, spec, input_spec, state, hp, client)


def _load_state(
    path: Path, record: dict, signature: Signature, spec: ResolvedRunSpec, hp: dict[str, Any]
) -> State:
    """As it is in the file, which has the states of clients that were trained alone where they were
    on the host: then they have no models of their own."""
    key, num_stored_clients = make_stream_key(spec.seed, Stream.INIT), record["touched"]

    def init_state() -> State:
        variables = build_local_training(signature).task.model.init(key)
        return build_algorithm(signature).init(hp, key, variables, spec.num_clients)

    expected_state = jax.eval_shape(init_state)
    if num_stored_clients is not None:
        to_stored_rows = lambda a: jax.ShapeDtypeStruct((num_stored_clients, *a.shape[1:]), a.dtype)  # noqa: E731
        expected_state = expected_state._replace(
            clients=jax.tree.map(to_stored_rows, expected_state.clients)
        )
    (state,) = load_checkpoint(path, (expected_state,))
    return state
