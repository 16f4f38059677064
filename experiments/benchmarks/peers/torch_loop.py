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
    make = make_compiled_round_function if regime.compile else make_round_function
    print_record(*time_rounds(regime, make(regime, device), wait), version)


def make_round_function(regime: Regime, device: str):
    """Return the function of a round."""
    images, labels = to_tensors(regime.images, regime.labels, device)
    model = make_network(regime.network, regime.width, regime.layers).to(device)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    clients = [torch.tensor(client).long() for client in regime.clients]

    def run_round(cohort: np.ndarray) -> int:
        nonlocal weights
        total = regime.samples(cohort)
        average = {name: torch.zeros_like(value) for name, value in weights.items()}
        for positions in (clients[client] for client in cohort if len(clients[client])):
            model.load_state_dict(weights)
            permuted_positions = positions[torch.randperm(len(positions))].to(device)
            train_one_epoch(model, images[permuted_positions], labels[permuted_positions], regime)
            for name, value in model.state_dict().items():
                average[name].add_(value, alpha=len(positions) / total)
        weights = average
        return total

    return run_round


def make_compiled_round_function(regime: Regime, device: str):
    """Return the function of a round whose steps are compiled."""
    images, labels = to_tensors(regime.images, regime.labels, device)
    model = make_network(regime.network, regime.width, regime.layers).to(device)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    clients = [torch.tensor(client).long() for client in regime.clients]
    train_step = torch.compile(make_train_step(regime, model), dynamic=False)

    @torch.no_grad()
    def run_round(cohort: np.ndarray) -> int:
        nonlocal weights
        total = regime.samples(cohort)
        average = {name: torch.zeros_like(value) for name, value in weights.items()}
        for positions in (clients[client] for client in cohort if len(clients[client])):
            permuted_positions = positions[torch.randperm(len(positions))].to(device)
            client_weights = weights
            for batch in permuted_positions.split(regime.batch_size):
                client_weights = train_step(client_weights, images[batch], labels[batch])
            for name, value in client_weights.items():
                average[name].add_(value, alpha=len(positions) / total)
        weights = average
        return total

    return run_round


if __name__ == "__main__":
    main()
