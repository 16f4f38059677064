"""FedAMP as a plain PyTorch loop without a data loader.

    python torch_fedamp.py REGIME METHOD

Parity: clients are equal and all train in every round; one epoch of SGD with the proximal gradient;
Eq. 5 with this package's relative scales; float32; one thread per core, or a GPU. Advantages of
this program: images are float32 tensors, normalized beforehand, and gathered once per round in
shuffled order; the models of all clients are rows of one matrix, so that distances and messages are
one product each, where public code iterates over pairs of clients; the proximal term is added to
the gradient, so that autograd need not differentiate it.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from regime import Regime, print_record, read_regime, time_rounds
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch_networks import make_network, set_up_torch, to_tensors, train_one_epoch


def main() -> None:
    """Time the rounds of the regime, or train from a snapshot."""
    regime, method = read_regime(), json.loads(sys.argv[2])
    device, wait, version = set_up_torch(regime.threads)
    if "start" in method:
        return train_from_snapshot(method, regime, device)
    clients = [torch.tensor(positions).long() for positions in regime.clients]
    network = make_network(regime.network, regime.width)
    models = parameters_to_vector(network.parameters()).detach().repeat(len(clients), 1)
    run_round, message_seconds = make_round_function(regime, method, device, models)

    def shuffle_client(client: int) -> torch.Tensor:
        return clients[client][torch.randperm(len(clients[client]))]

    timings = time_rounds(regime, lambda cohort: run_round(cohort, shuffle_client), wait)
    message_fraction = statistics.median(message_seconds[1:]) / statistics.median(timings[0])
    print_record(*timings, version, message_share=message_fraction)


def train_from_snapshot(method: dict, regime: Regime, device: str) -> None:
    """Train from given models through given batches, to compare the models with another program."""
    with np.load(method["start"]) as file:
        models, orders = torch.tensor(file["models"]).to(device), torch.tensor(file["orders"])
    sizes = [len(positions) for positions in regime.clients]
    run_round, _ = make_round_function(regime, method, device, models)
    for order in orders:
        run_round(np.arange(len(sizes)), order.split(sizes).__getitem__)
    np.save(method["models"], models.cpu().numpy())


def make_round_function(regime: Regime, method: dict, device: str, models: torch.Tensor):
    """Return the function of a round, and the list of the seconds of its messages.

    `models` `[K, P]` change in place.
    """
    images, labels = to_tensors(regime.images, regime.labels, device)
    model = make_network(regime.network, regime.width).to(device)
    models, message_seconds = models.to(device), []

    def run_round(cohort: np.ndarray, shuffle_client: Callable[[int], torch.Tensor]) -> int:
        start = time.perf_counter()
        messages = collaboration_weights(models, **method["numbers"]) @ models
        message_seconds.append(time.perf_counter() - start)
        for client in cohort:
            order = shuffle_client(client).to(device)
            vector_to_parameters(messages[client].clone(), model.parameters())
            train_one_epoch(model, images[order], labels[order], regime, method["prox_lambda"])
            models[client] = parameters_to_vector(model.parameters()).detach()
        return regime.samples(cohort)

    return run_round, message_seconds


def collaboration_weights(models: torch.Tensor, sigma: float, alpha: float) -> torch.Tensor:
    """Compute Eq. 5 for models `[K, P]`.

    `sigma` is in median distances, `alpha` in sigma / (K - 1). Rows in which a client's own weight
    would be negative are scaled.
    """
    vectors, num_clients = models - models.mean(0), len(models)
    distances = torch.cdist(vectors, vectors).square()
    pairs = torch.triu_indices(num_clients, num_clients, 1)
    sigma = max(sigma * distances[pairs[0], pairs[1]].quantile(0.5).item(), 1e-12)
    weights = alpha / (num_clients - 1) * torch.exp(-distances / sigma)
    weights.fill_diagonal_(0)
    weights /= weights.sum(1, keepdim=True).clamp(min=1)
    return weights + torch.diag(1 - weights.sum(1))


if __name__ == "__main__":
    main()
