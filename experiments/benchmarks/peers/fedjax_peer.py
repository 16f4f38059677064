"""FedJAX 0.0.17: its `fed_avg` algorithm, clients by `tile_over_clients` in its jit mode.

Parity: clients and cohorts are equal; one epoch of SGD; weighted average; float32. Deviations:
FedJAX fills the last batch of a client with samples of the next epoch, so it trains on whole
batches, which count as processed here. It computes the norm of every client's update as part of
`fed_avg`. Images are float32, normalized beforehand. FedJAX uses `jax.tree_map`, which jax removed;
an alias restores it.
"""

import importlib.metadata
import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from regime import Regime, print_record, read_regime, time_rounds

# Before fedjax is imported; types do not name what jax removed.
jax.tree_map = jax.tree.map  # type: ignore[attr-defined]

import fedjax  # noqa: E402


def main() -> None:
    """Time the rounds of the regime."""
    regime = read_regime()
    device = jax.devices()[0].platform
    version = f"FedJAX {importlib.metadata.version('fedjax')}, jax {jax.__version__}, {device}"
    print_record(*time_rounds(regime, make_round_function(regime)), version)


def make_round_function(regime: Regime):
    """Return the function of a round."""
    network = hk.without_apply_rng(hk.transform(lambda x: make_network(regime)(x)))
    params = network.init(jax.random.PRNGKey(0), regime.images[:1])

    def loss(params, batch, rng):
        logits = jax.nn.log_softmax(network.apply(params, batch["x"]))
        return -jnp.take_along_axis(logits, batch["y"][:, None], axis=1).mean()

    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(regime.local_lr),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=regime.batch_size, num_epochs=1, seed=0),
    )
    data = [
        fedjax.ClientDataset(
            {"x": regime.images[positions], "y": regime.labels[positions].astype(np.int32)}
        )
        for positions in regime.clients
    ]
    state = algorithm.init(params)

    def run_round(cohort: np.ndarray) -> int:
        nonlocal state
        nonempty_clients = [client for client in cohort.tolist() if len(data[client])]
        keys = jax.random.split(jax.random.PRNGKey(1), len(nonempty_clients))
        clients = [(b"%d" % c, data[c], key) for c, key in zip(nonempty_clients, keys, strict=True)]
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)
        size = regime.batch_size
        return sum(math.ceil(len(data[client]) / size) * size for client in nonempty_clients)

    return run_round


def make_network(regime: Regime) -> hk.Sequential:
    """Build mlp, convnet or cnn in Haiku."""
    if regime.network == "mlp":
        return hk.Sequential([hk.Flatten(), hk.nets.MLP([128, 128, 10])])
    if regime.network == "cnn":
        blocks = [
            layer
            for filters in (32, 64)
            for layer in (
                hk.Conv2D(filters, 5, padding="VALID"),
                jax.nn.relu,
                hk.MaxPool((2, 2, 1), (2, 2, 1), "VALID"),
            )
        ]
        head = [hk.Flatten(), hk.Linear(512), jax.nn.relu, hk.Linear(10)]
        return hk.Sequential([*blocks, *head])
    if regime.network != "convnet":
        raise ValueError(f"network = {regime.network!r}: expected mlp, cnn or convnet")
    layers = []
    for padding in (3, 1, 1):
        layers += [
            hk.Conv2D(regime.width, 3, padding=[(padding, padding)] * 2),
            hk.InstanceNorm(create_scale=True, create_offset=True),
            jax.nn.relu,
            hk.AvgPool((2, 2, 1), (2, 2, 1), "VALID"),
        ]
    return hk.Sequential([*layers, hk.Flatten(), hk.Linear(10)])


if __name__ == "__main__":
    main()
