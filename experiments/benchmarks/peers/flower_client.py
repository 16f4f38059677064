"""The clients of `flower_peer.py`: imported by the actors, so that each reads the data once."""

import functools
import sys

import torch
from flwr.client import NumPyClient
from regime import Regime, read_regime
from torch_networks import make_network, to_tensors, train_one_epoch


class Client(NumPyClient):
    """Local training of one client on one thread."""

    def __init__(self, settings: str, number: int):
        self.settings, self.client_id = settings, number

    def fit(self, parameters, config):
        """Train one epoch and return the weights."""
        regime, (images, labels), model = load_actor_state(self.settings)
        positions = torch.tensor(regime.clients[self.client_id]).long()
        weights = zip(model.state_dict(), map(torch.as_tensor, parameters), strict=True)
        model.load_state_dict(dict(weights))
        shuffled = positions[torch.randperm(len(positions))]
        train_one_epoch(model, images[shuffled], labels[shuffled], regime)
        return [value.numpy() for value in model.state_dict().values()], len(positions), {}


@functools.cache
def load_actor_state(
    settings: str,
) -> tuple[Regime, tuple[torch.Tensor, torch.Tensor], torch.nn.Module]:
    """Return the regime, its tensors and one model, which an actor stores."""
    torch.set_num_threads(1)
    sys.argv[1:] = [settings]
    regime = read_regime()
    return (
        regime,
        to_tensors(regime.images, regime.labels, "cpu"),
        make_network(regime.network, regime.width),
    )
