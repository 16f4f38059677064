"""DynaFed's synthesis as one writes it by hand in PyTorch: a loop with `create_graph=True`.

Parity: as many images and inner steps, soft labels, a learned step size, Adam on all three, the
same network, float32; as many threads as cores, or a GPU. In its favour: no augmentation, a start
and a target that stay as they are, and no record of what was met.
"""

import json
import sys

import torch
from regime import print_record, time_repetitions
from torch.func import functional_call
from torch_networks import build_network


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    run_iteration = make_iteration_function(settings, device)
    seconds = time_repetitions(run_iteration, settings["iterations"], wait)
    samples = [settings["num_samples"] * settings["inner_steps"]] * len(seconds)
    print_record(seconds, samples, f"PyTorch {torch.__version__}, {device}")


def make_iteration_function(settings: dict, device: str):
    model = build_network(settings["network"], settings["width"]).to(device)
    names, parameters = zip(*model.named_parameters(), strict=True)
    sizes = [parameter.numel() for parameter in parameters]
    start = torch.cat([parameter.detach().flatten() for parameter in parameters])
    target = start + 0.01 * torch.randn_like(start)

    def logits_of(vector: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        vectors = torch.split(vector, sizes)
        named_parameters = {
            n: v.view_as(p) for n, v, p in zip(names, vectors, parameters, strict=True)
        }
        return functional_call(model, named_parameters, (images,))

    num_samples = settings["num_samples"]
    images = torch.randn(num_samples, 1, 28, 28, device=device, requires_grad=True)
    labels = torch.zeros(num_samples, 10, device=device, requires_grad=True)
    step_size = torch.tensor(0.04, device=device, requires_grad=True)
    optimizer = torch.optim.Adam(
        [
            {"params": [images], "lr": 0.05},
            {"params": [labels], "lr": 0.05},
            {"params": [step_size], "lr": 1e-5},
        ]
    )

    def run_iteration() -> None:
        vector = start.clone().requires_grad_(True)
        for _ in range(settings["inner_steps"]):
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
