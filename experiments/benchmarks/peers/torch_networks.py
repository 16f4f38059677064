"""The benchmark's networks in PyTorch, for every peer that trains PyTorch modules."""

import torch
from regime import Regime
from torch import nn


def make_network(regime: Regime) -> nn.Module:
    """The regime's network for images [B, 1, 28, 28]; seeded."""
    return build_network(regime.network, regime.width)


def build_network(name: str, width: int | None) -> nn.Module:
    """mlp, convnet (of this width) or cnn for images [B, 1, 28, 28]; seeded."""
    torch.manual_seed(0)
    if name == "convnet":
        assert width is not None
        return convnet(width)
    if name not in ("mlp", "cnn"):
        raise ValueError(f"network = {name!r}: expected mlp, cnn or convnet")
    return {"mlp": mlp, "cnn": cnn}[name]()


def mlp() -> nn.Module:
    hidden = [nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, 10))


def convnet(width: int) -> nn.Module:
    layers = []
    for channels, padding in ((1, 3), (width, 1), (width, 1)):
        layers += [
            nn.Conv2d(channels, width, 3, padding=padding),
            nn.GroupNorm(width, width),
            nn.ReLU(),
            nn.AvgPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * width, 10))


def cnn() -> nn.Module:
    blocks = [
        layer
        for channels, filters in ((1, 32), (32, 64))
        for layer in (nn.Conv2d(channels, filters, 5), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))


def load_tensors(regime: Regime, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """All images [N, 1, 28, 28] and labels [N], in memory."""
    images = torch.tensor(regime.images).permute(0, 3, 1, 2).contiguous()
    return images.to(device), torch.tensor(regime.labels).to(device)


def train_one_epoch(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, regime: Regime
) -> None:
    """One pass of SGD over a client's images in a fresh order; the last batch is smaller."""
    optimizer = torch.optim.SGD(model.parameters(), lr=regime.local_lr)
    for batch, target in zip(
        images.split(regime.batch_size), labels.split(regime.batch_size), strict=True
    ):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(batch), target).backward()
        optimizer.step()
