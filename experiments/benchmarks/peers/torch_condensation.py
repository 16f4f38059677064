"""FedDM's condensation in PyTorch.

    python torch_condensation.py PROBLEM.npz WIDTH IPC BATCH STEPS THREADS [func] [compile]

The plain program is a loop over the pairs of client and class. With `func` one `torch.func.vmap`
has all pairs. With `compile` the gradient is compiled by `torch.compile`.

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
from torch.func import functional_call, grad, vmap
from torch_networks import convnet, set_up_torch

MOMENTUM, CLIP, RADIUS = 0.9, 2.0, 5.0


def main() -> None:
    """Time the condensation of all pairs."""
    problem = np.load(sys.argv[1])
    width, ipc, batch_size, steps, threads = map(int, sys.argv[2:7])
    variants = sys.argv[7:]
    _, wait, _ = set_up_torch(threads)
    images = torch.tensor(problem["images"], dtype=torch.float32).permute(0, 3, 1, 2).contiguous()
    pairs = [torch.tensor(problem[name]) for name in problem.files if name.startswith("pair")]
    network = convnet(width, batch_norm=True).eval()
    body, head = network[:-1], network[-1]
    body_weights, head_weights = dict(body.named_parameters()), dict(head.named_parameters())
    global_weights = [p.detach() for p in (*body_weights.values(), *head_weights.values())]

    def compute_means(weights, inputs, sample_weights):
        """Return the mean embedding and the mean logits."""
        parts = [dict(zip(body_weights, weights, strict=False))]
        parts.append(dict(zip(head_weights, weights[len(body_weights) :], strict=True)))
        features = functional_call(body, parts[0], (inputs,))
        logits = functional_call(head, parts[1], (features,))
        return sample_weights @ features, sample_weights @ logits

    def compute_loss(synthetic, weights, targets):
        uniform = torch.full((ipc,), 1 / ipc)
        means = compute_means(weights, synthetic, uniform)
        return sum((a - b).square().sum() for a, b in zip(targets, means, strict=True))

    def compute_gradient(synthetic, noise, real, real_weights):
        """Return the clipped gradient with a network near the received one."""
        norm = torch.sqrt(sum((n.square().sum() for n in noise), torch.zeros(())))
        scale = torch.clamp(RADIUS / norm, max=1.0)
        weights = [w + scale * n for w, n in zip(global_weights, noise, strict=True)]
        targets = compute_means(weights, real, real_weights)
        gradient = grad(compute_loss)(synthetic, weights, targets)
        return gradient * torch.clamp(CLIP / gradient.norm(), max=1.0)

    if "func" in variants:
        groups = [pairs]
        gradient_function = vmap(compute_gradient)
    else:
        groups = [[pair] for pair in pairs]

        def gradient_function(synthetic, noise, real, real_weights):
            first = [n[0] for n in noise]
            return compute_gradient(synthetic[0], first, real[0], real_weights[0])[None]

    if "compile" in variants:
        gradient_function = torch.compile(gradient_function, dynamic=False)

    @torch.no_grad()
    def run_round() -> None:
        for group in groups:
            size = min(batch_size, max(map(len, group)))
            synthetic = torch.stack([draw_initial_images(images, pair, ipc) for pair in group])
            velocity = torch.zeros_like(synthetic)
            for _ in range(steps):
                noise = [torch.randn(len(group), *w.shape) for w in global_weights]
                batches = [draw_batch(pair, size) for pair in group]
                positions = torch.stack([positions for positions, _ in batches])
                real_weights = torch.stack([weights for _, weights in batches])
                gradient = gradient_function(synthetic, noise, images[positions], real_weights)
                velocity.mul_(MOMENTUM).add_(gradient)
                synthetic = synthetic - velocity

    print(json.dumps({"seconds": statistics.median(time_repetitions(run_round, 3, wait))}))


def draw_initial_images(images: torch.Tensor, pair: torch.Tensor, ipc: int) -> torch.Tensor:
    """Return the means of up to five real images each, `[ipc, 1, 28, 28]`."""
    drawn = images[pair[torch.randperm(len(pair))[: 5 * ipc]]]
    return drawn[: len(drawn) // ipc * ipc].reshape(ipc, -1, *images.shape[1:]).mean(1)


def draw_batch(pair: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions of real images and their weights, padded with weight 0 to `size`."""
    drawn = pair[torch.randperm(len(pair))[:size]]
    positions = torch.cat([drawn, drawn.new_zeros(size - len(drawn))])
    weights = torch.zeros(size)
    weights[: len(drawn)] = 1 / len(drawn)
    return positions, weights


if __name__ == "__main__":
    main()
