"""FedDM's condensation as a plain PyTorch loop.

    python torch_condensation.py PROBLEM.npz WIDTH IPC BATCH STEPS THREADS

Parity: pairs of client and class, steps, batches and network (batch norm with running statistics)
are equal; float32; a network at distance 5 from the received one in every step; gradients clipped
at 2; SGD with momentum. Advantage of this program: images are normalized beforehand.
"""

import json
import statistics
import sys

import numpy as np
import torch
from regime import time_repetitions
from torch import nn
from torch_networks import convnet, set_up_torch


def main() -> None:
    """Time the condensation of all pairs."""
    problem = np.load(sys.argv[1])
    width, ipc, batch, steps, threads = map(int, sys.argv[2:])
    _, wait, _ = set_up_torch(threads)
    images = torch.tensor(problem["images"], dtype=torch.float32).permute(0, 3, 1, 2).contiguous()
    pairs = [torch.tensor(problem[name]) for name in problem.files if name.startswith("pair")]
    network = convnet(width, batch_norm=True)
    body, head = network[:-1].eval(), network[-1]
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
                means = features.mean(0), head(features).mean(0)
                loss = sum((a - b).square().sum() for a, b in zip(targets, means, strict=True))
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_([synthetic], 2.0)
                optimizer.step()

    print(json.dumps({"seconds": statistics.median(time_repetitions(run_round, 3, wait))}))


if __name__ == "__main__":
    main()
