"""DynaFed's synthesis in PyTorch.

The plain program differentiates the inner steps with `create_graph=True`. With `func` it uses
`torch.func.grad` of a function that contains `torch.func.grad`, and with `compile` it compiles that
function by `torch.compile`, which cannot compile a graph of `create_graph=True`.

Parity: images, inner steps and network are equal; soft labels; a learned step size; Adam on all
three; float32; one thread per core, or a GPU. Advantages of this program: no augmentation, one
start and one target, and no record of the losses.
"""

import json
import sys
from collections.abc import Callable

import torch
from regime import print_record, time_repetitions
from torch.func import functional_call, grad
from torch_networks import make_network, set_up_torch

Weights = dict[str, torch.Tensor]


def main() -> None:
    """Time the iterations of the synthesis."""
    settings = json.loads(sys.argv[1])
    device, wait, version = set_up_torch(settings["threads"])
    run_iteration = make_iteration_function(settings, device)
    seconds = time_repetitions(run_iteration, settings["rounds"], wait)
    options = settings["spec"]["options"]
    samples = [options["num_samples"] * options["inner_steps"]] * len(seconds)
    print_record(seconds, samples, version)


def make_iteration_function(settings: dict, device: str) -> Callable[[], None]:
    """Return the function of an iteration."""
    options = settings["spec"]["options"]
    model = make_network(settings["network"], settings["width"]).to(device)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    target = {name: p + 0.01 * torch.randn_like(p) for name, p in start.items()}
    distance = squared_distance(start, target)

    def compute_inner_loss(weights: Weights, images: torch.Tensor, labels: torch.Tensor):
        logits = functional_call(model, weights, (images,))
        return -(torch.softmax(labels, 1) * torch.log_softmax(logits, 1)).mean()

    def compute_loss(images: torch.Tensor, labels: torch.Tensor, step_size: torch.Tensor):
        weights = start
        for _ in range(options["inner_steps"]):
            gradients = grad(compute_inner_loss)(weights, images, labels)
            weights = {name: w - step_size * gradients[name] for name, w in weights.items()}
        return squared_distance(weights, target) / distance

    def compute_loss_by_graph(images: torch.Tensor, labels: torch.Tensor, step_size: torch.Tensor):
        weights = {name: w.clone().requires_grad_(True) for name, w in start.items()}
        for _ in range(options["inner_steps"]):
            loss = compute_inner_loss(weights, images, labels)
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            pairs = zip(weights.items(), gradients, strict=True)
            weights = {name: w - step_size * gradient for (name, w), gradient in pairs}
        return squared_distance(weights, target) / distance

    num_samples = options["num_samples"]
    images = torch.randn(num_samples, 1, 28, 28, device=device, requires_grad=True)
    labels = torch.zeros(num_samples, 10, device=device, requires_grad=True)
    step_size = torch.tensor(0.04, device=device, requires_grad=True)
    variables = [images, labels, step_size]
    optimizer = torch.optim.Adam(
        [{"params": [images, labels], "lr": 0.05}, {"params": [step_size], "lr": 1e-5}]
    )
    compute_gradients = grad(compute_loss, argnums=(0, 1, 2))
    if settings["compile"]:
        compute_gradients = torch.compile(compute_gradients, dynamic=False)

    def run_iteration() -> None:
        if settings["func"]:
            gradients = compute_gradients(*(variable.detach() for variable in variables))
        else:
            gradients = torch.autograd.grad(compute_loss_by_graph(*variables), variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.grad = gradient
        optimizer.step()

    return run_iteration


def squared_distance(weights: Weights, target: Weights) -> torch.Tensor:
    """Return the squared distance of two sets of weights."""
    distances = [(weights[name] - target[name]).square().sum() for name in weights]
    return torch.stack(distances).sum()


if __name__ == "__main__":
    main()
