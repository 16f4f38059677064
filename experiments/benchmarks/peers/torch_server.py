"""Training of a server in PyTorch: on labels, or on the outputs of other models.

Parity: images, epochs, steps and network are equal; float32; a fresh shuffle in each epoch; SGD on
labels as FedAF's server, or Adam on the mean logits of `teachers` models as FedDF's; one thread per
core, or a GPU. Advantage of this program: images are normalized beforehand.
"""

import json
import sys

import torch
from regime import print_record, read_images, time_repetitions
from torch import nn
from torch_networks import make_network, set_up_torch, to_tensors


def main() -> None:
    """Time the training of the server."""
    settings = json.loads(sys.argv[1])
    device, wait, version = set_up_torch(settings["threads"])
    arrays = (array[: settings["num_images"]] for array in read_images(settings["images"]))
    images, labels = to_tensors(*arrays, device)
    model, *teachers = (
        make_network(settings["network"], settings["width"]).to(device)
        for _ in range(1 + settings["teachers"])
    )

    def run_round() -> None:
        targets = labels
        if teachers:
            targets = ensemble_probabilities(teachers, images, settings["batch_size"])
        train(model, images, targets, settings)

    seconds = time_repetitions(run_round, settings["rounds"], wait)
    samples = [len(images) * settings["epochs"]] * len(seconds)
    print_record(seconds, samples, version)


@torch.no_grad()
def ensemble_probabilities(
    teachers: list[nn.Module], images: torch.Tensor, batch_size: int
) -> torch.Tensor:
    """Return the probabilities of the mean logits of the teachers."""
    batches = images.split(batch_size)
    logits = [torch.cat([teacher(batch) for batch in batches]) for teacher in teachers]
    return torch.softmax(torch.stack(logits).mean(0), 1)


def train(model: nn.Module, images: torch.Tensor, targets: torch.Tensor, settings: dict) -> None:
    """Train on labels with SGD, or on probabilities with Adam."""
    is_distillation = targets.ndim == 2
    optimizer_class = torch.optim.Adam if is_distillation else torch.optim.SGD
    optimizer = optimizer_class(model.parameters(), lr=1e-3 if is_distillation else 0.01)
    for _ in range(settings["epochs"]):
        order = torch.randperm(len(images), device=images.device)
        for batch in order.split(settings["batch_size"]):
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(images[batch]), targets[batch]).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
