"""FedAvg in PyTorch with all clients of a round in one `torch.func.vmap`.

With `compile` the step of all clients is compiled by `torch.compile`.

Parity: clients and cohorts are equal; one epoch of SGD; weighted average; float32; one thread per
core, or a GPU. Clients of a round have equal numbers of images. Advantages of this program: images
are float32 tensors, normalized beforehand; the images of a round are gathered once.
"""

import numpy as np
import torch
from regime import Regime, print_record, read_regime, time_rounds
from torch_networks import make_network, make_train_step, set_up_torch, to_tensors


def main() -> None:
    """Time the rounds of the regime."""
    regime = read_regime()
    device, wait, version = set_up_torch(regime.threads)
    run_round, warm_up = make_round_function(regime, device)
    print_record(*time_rounds(regime, run_round, wait, warm_up), version)


def make_round_function(regime: Regime, device: str):
    """Return the function of a round, and one that makes the first and the last step of a round."""
    images, labels = to_tensors(regime.images, regime.labels, device)
    model = make_network(regime.network, regime.width, regime.layers).to(device)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    clients = [torch.tensor(client).long() for client in regime.clients]
    train_step = make_train_step(regime, model, is_batched=True)
    if regime.compile:
        train_step = torch.compile(train_step, dynamic=False)

    def repeat_weights() -> dict[str, torch.Tensor]:
        num_clients = len(regime.cohorts[0])
        return {name: w.expand(num_clients, *w.shape).contiguous() for name, w in weights.items()}

    def draw_batches(cohort: np.ndarray) -> tuple[torch.Tensor, ...]:
        orders = [clients[k][torch.randperm(len(clients[k]))] for k in cohort]
        return torch.stack(orders).to(device).split(regime.batch_size, dim=1)

    @torch.no_grad()
    def warm_up() -> None:
        batches = draw_batches(regime.cohorts[0])
        for batch in (batches[0], batches[-1]):
            train_step(repeat_weights(), images[batch], labels[batch])

    @torch.no_grad()
    def run_round(cohort: np.ndarray) -> int:
        nonlocal weights
        client_weights = repeat_weights()
        for batch in draw_batches(cohort):
            client_weights = train_step(client_weights, images[batch], labels[batch])
        weights = {name: w.mean(0) for name, w in client_weights.items()}
        return regime.samples(cohort)

    return run_round, warm_up


if __name__ == "__main__":
    main()
