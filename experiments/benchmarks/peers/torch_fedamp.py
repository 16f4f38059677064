"""FedAMP as one writes it by hand in PyTorch, without a data loader.

    python torch_fedamp.py REGIME METHOD

Parity: the same clients, all of them in every round, one epoch of SGD with the proximal gradient,
Eq. 5 with this package's relative scales, float32; as many threads as cores, or a GPU. In its
favour: images are float32 tensors, normalised beforehand, and a client's are gathered once per
round in shuffled order; the models of all clients are rows of one matrix, so that distances and
messages are a product each where public code goes through pairs of clients; the proximal term is
added to the gradient by hand, which autograd need not differentiate.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from regime import Regime, print_record, read_regime, time_rounds
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch_networks import load_tensors, make_network


def main() -> None:
    regime, method = read_regime(), json.loads(sys.argv[2])
    torch.set_num_threads(regime.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    if "start" in method:
        return train_from_snapshot(method, regime, device)
    clients = [torch.tensor(positions).long() for positions in regime.clients]
    vector = parameters_to_vector(make_network(regime).parameters()).detach()
    run_round, message_seconds = make_round_function(
        regime, method, device, vector.repeat(len(clients), 1)
    )

    def shuffle_client(client: int) -> torch.Tensor:
        return clients[client][torch.randperm(len(clients[client]))]

    timings = time_rounds(regime, lambda cohort: run_round(cohort, shuffle_client), wait)
    message_fraction = statistics.median(message_seconds[1:]) / statistics.median(timings[0])
    print_record(*timings, f"PyTorch {torch.__version__}, {device}", message_share=message_fraction)


def train_from_snapshot(method: dict, regime: Regime, device: str) -> None:
    """From given models and through given batches, to be compared with another program's."""
    with np.load(method["start"]) as file:
        models, orders = torch.tensor(file["models"]).to(device), torch.tensor(file["orders"])
    sizes = [len(positions) for positions in regime.clients]
    run_round, _ = make_round_function(regime, method, device, models)
    for order in orders:
        run_round(np.arange(len(sizes)), order.split(sizes).__getitem__)
    np.save(method["models"], models.cpu().numpy())


def make_round_function(regime: Regime, method: dict, device: str, models: torch.Tensor):
    """-> (one_round, seconds of the messages of every round so far). `models` [K, P] change."""
    images, labels = load_tensors(regime, device)
    model = make_network(regime).to(device)
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
    """Eq. 5 for models [K, P]: sigma in median distances, alpha in sigma / (K - 1), rows scaled
    where a client's own weight would be negative."""
    vectors, num_clients = models - models.mean(0), len(models)
    distances = torch.cdist(vectors, vectors).square()
    pairs = torch.triu_indices(num_clients, num_clients, 1)
    sigma = max(sigma * distances[pairs[0], pairs[1]].quantile(0.5).item(), 1e-12)
    weights = alpha / (num_clients - 1) * torch.exp(-distances / sigma)
    weights.fill_diagonal_(0)
    weights /= weights.sum(1, keepdim=True).clamp(min=1)
    return weights + torch.diag(1 - weights.sum(1))


def train_one_epoch(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    regime: Regime,
    prox_lambda: float,
) -> None:
    """One pass of SGD over a client's images, pulled to the model that it starts from."""
    optimizer = torch.optim.SGD(model.parameters(), lr=regime.local_lr)
    proximal_center = [p.detach().clone() for p in model.parameters()]
    for batch, target in zip(
        images.split(regime.batch_size), labels.split(regime.batch_size), strict=True
    ):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(batch), target).backward()
        with torch.no_grad():
            for p, u in zip(model.parameters(), proximal_center, strict=True):
                assert p.grad is not None
                p.grad.add_(p - u, alpha=prox_lambda)
        optimizer.step()


if __name__ == "__main__":
    main()
