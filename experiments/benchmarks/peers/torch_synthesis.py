"""DynaFed's synthesis as a plain PyTorch loop with `create_graph=True`.

Parity: images, inner steps and network are equal; soft labels; a learned step size; Adam on all
three; float32; one thread per core, or a GPU. Advantages of this program: no augmentation, one
start and one target, and no record of the losses.
"""

import json
import sys

import torch
from regime import print_record, time_repetitions
from torch.func import functional_call
from torch_networks import make_network, set_up_torch


def main() -> None:
    """Time the iterations of the synthesis."""
    settings = json.loads(sys.argv[1])
    device, wait, version = set_up_torch(settings["threads"])
    run_iteration = make_iteration_function(settings, device)
    seconds = time_repetitions(run_iteration, settings["rounds"], wait)
    options = settings["spec"]["options"]
    samples = [options["num_samples"] * options["inner_steps"]] * len(seconds)
    print_record(seconds, samples, version)


def make_iteration_function(settings: dict, device: str):
    """Return the function of an iteration."""
    options = settings["spec"]["options"]
    model = make_network(settings["network"], settings["width"]).to(device)
    names, parameters = zip(*model.named_parameters(), strict=True)
    sizes = [parameter.numel() for parameter in parameters]
    start = torch.cat([parameter.detach().flatten() for parameter in parameters])
    target = start + 0.01 * torch.randn_like(start)

    def logits_of(vector: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        vectors = torch.split(vector, sizes)
        parts = zip(names, vectors, parameters, strict=True)
        named_parameters = {name: part.view_as(p) for name, part, p in parts}
        return functional_call(model, named_parameters, (images,))

    num_samples = options["num_samples"]
    images = torch.randn(num_samples, 1, 28, 28, device=device, requires_grad=True)
    labels = torch.zeros(num_samples, 10, device=device, requires_grad=True)
    step_size = torch.tensor(0.04, device=device, requires_grad=True)
    optimizer = torch.optim.Adam(
        [{"params": [images, labels], "lr": 0.05}, {"params": [step_size], "lr": 1e-5}]
    )

    def run_iteration() -> None:
        vector = start.clone().requires_grad_(True)
        for _ in range(options["inner_steps"]):
            logits = logits_of(vector, images)
            products = torch.softmax(labels, 1) * torch.log_softmax(logits, 1)
            (gradient,) = torch.autograd.grad(-products.mean(), vector, create_graph=True)
            vector = vector - step_size * gradient
        loss = (vector - target).square().sum() / (start - target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return run_iteration


if __name__ == "__main__":
    main()
