"""FedAvg as a PyTorch loop over clients without a data loader.

With `compile` a step of a client, its gradient and update, is compiled by `torch.compile`.

Parity: clients and cohorts are equal; one epoch of SGD; weighted average; float32; one thread per
core, or a GPU. Advantages of this program: images are float32 tensors, normalized beforehand, where
this package gathers uint8 images and normalizes them in every step; the images of a client are
gathered once per round, in shuffled order; one model loads the global weights.
"""

import numpy as np
import torch
from regime import Regime, print_record, read_regime, time_rounds
from torch_networks import (
    make_network,
    make_train_step,
    set_up_torch,
    to_tensors,
    train_one_epoch,
)


def main() -> None:
    """Time the rounds of the regime."""
    regime = read_regime()
    device, wait, version = set_up_torch(regime.threads)
    print_record(*time_rounds(regime, make_round_function(regime, device), wait), version)


def make_round_function(regime: Regime, device: str):
    """Return the function of a round."""
    images, labels = to_tensors(regime.images, regime.labels, device)
    model = make_network(regime.network, regime.width, regime.layers).to(device)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    clients = [torch.tensor(client).long() for client in regime.clients]
    train_step = torch.compile(make_train_step(regime, model), dynamic=False)

    def train_client(positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the weights after an epoch on images in this order."""
        if not regime.compile:
            model.load_state_dict(weights)
            train_one_epoch(model, images[positions], labels[positions], regime)
            return model.state_dict()
        client_weights = weights
        with torch.no_grad():
            for batch in positions.split(regime.batch_size):
                client_weights = train_step(client_weights, images[batch], labels[batch])
        return client_weights

    def run_round(cohort: np.ndarray) -> int:
        nonlocal weights
        total = regime.samples(cohort)
        average = {name: torch.zeros_like(value) for name, value in weights.items()}
        for positions in (clients[client] for client in cohort if len(clients[client])):
            permuted_positions = positions[torch.randperm(len(positions))].to(device)
            for name, value in train_client(permuted_positions).items():
                average[name].add_(value, alpha=len(positions) / total)
        weights = average
        return total

    return run_round


if __name__ == "__main__":
    main()
