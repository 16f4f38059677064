"""FedDM's condensation as one writes it by hand in PyTorch.

    python torch_condensation.py PROBLEM.npz WIDTH IPC BATCH STEPS THREADS

Parity: the same pairs of client and class, steps, batches and network (batch norm with running
statistics), float32; a network at distance 5 from the received one in every step; gradient clipped
at 2; SGD with momentum. In its favour: images are normalised beforehand.
"""

import json
import sys
import time

import numpy as np
import torch
from torch import nn


def network(width: int) -> tuple[nn.Module, nn.Module]:
    layers = []
    for channels, padding in ((1, 3), (width, 1), (width, 1)):
        layers += [
            nn.Conv2d(channels, width, 3, padding=padding),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.AvgPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten()).eval(), nn.Linear(16 * width, 10)


def main() -> None:
    problem = np.load(sys.argv[1])
    width, ipc, batch, steps, threads = map(int, sys.argv[2:])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    images = torch.tensor(problem["images"], dtype=torch.float32).permute(0, 3, 1, 2).contiguous()
    pairs = [torch.tensor(problem[name]) for name in problem.files if name.startswith("pair")]
    body, head = network(width)
    parameters = [*body.parameters(), *head.parameters()]
    global_parameters = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.requires_grad_(False)

    def run_round() -> None:
        for positions in pairs:
            synthetic = images[positions[torch.randperm(len(positions))[: 5 * ipc]]]
            synthetic = synthetic[: len(synthetic) // ipc * ipc].reshape(ipc, -1, *images.shape[1:])
            synthetic = synthetic.mean(1).requires_grad_(True)
            optimizer = torch.optim.SGD([synthetic], lr=1.0, momentum=0.9)
            for _ in range(steps):
                noise = [torch.randn_like(p) for p in global_parameters]
                norm = torch.sqrt(sum((n.square().sum() for n in noise), torch.zeros(())))
                for p, w, n in zip(parameters, global_parameters, noise, strict=True):
                    p.copy_(w + n * torch.clamp(5 / norm, max=1.0))
                with torch.no_grad():
                    real = body(images[positions[torch.randperm(len(positions))[:batch]]])
                    targets = real.mean(0), head(real).mean(0)
                features = body(synthetic)
                synthetic_means = features.mean(0), head(features).mean(0)
                loss = sum(
                    (a - b).square().sum() for a, b in zip(targets, synthetic_means, strict=True)
                )
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_([synthetic], 2.0)
                optimizer.step()

    run_round()
    round_seconds = []
    for _ in range(3):
        start = time.perf_counter()
        run_round()
        round_seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": sorted(round_seconds)[1]}))


if __name__ == "__main__":
    main()
