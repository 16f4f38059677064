"""FedAvg as one writes it by hand in PyTorch, without a data loader.

Parity: the same clients in the same rounds, one epoch of SGD each, weighted average, float32; as
many threads as cores, or a GPU. In its favour: images are float32 tensors, normalised beforehand,
where this package gathers uint8 and normalises inside every step; a client's images are gathered
once per round, in shuffled order; one model takes the global weights by `load_state_dict`.
"""

import numpy as np
import torch
from regime import Regime, read_regime, report, time_rounds
from torch_networks import make_network, tensors, train_one_epoch


def main() -> None:
    regime = read_regime()
    torch.set_num_threads(regime.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    one_round = rounds_of(regime, device)
    version = f"PyTorch {torch.__version__}, {device}"
    report(*time_rounds(regime, one_round, wait), version)


def rounds_of(regime: Regime, device: str):
    images, labels = tensors(regime, device)
    model = make_network(regime).to(device)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    clients = [torch.tensor(client).long() for client in regime.clients]

    def one_round(cohort: np.ndarray) -> int:
        nonlocal weights
        total = regime.samples(cohort)
        average = {name: torch.zeros_like(value) for name, value in weights.items()}
        for positions in (clients[client] for client in cohort if len(clients[client])):
            model.load_state_dict(weights)
            shuffled = positions[torch.randperm(len(positions))].to(device)
            train_one_epoch(model, images[shuffled], labels[shuffled], regime)
            for name, value in model.state_dict().items():
                average[name].add_(value, alpha=len(positions) / total)
        weights = average
        return total

    return one_round


if __name__ == "__main__":
    main()
