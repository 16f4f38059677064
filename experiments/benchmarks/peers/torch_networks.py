"""The benchmark's networks in PyTorch, for every peer that trains PyTorch modules."""

from collections.abc import Callable

import numpy as np
import torch
from regime import Regime
from torch import nn
from torch.func import functional_call, grad, vmap


def set_up_torch(threads: int) -> tuple[str, Callable[[], None], str]:
    """Set threads and seed.

    Args:
      threads: number of CPU threads.

    Returns:
      `(device, wait, version)`: a GPU if there is one, a function that waits for it, and a text.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    wait = torch.cuda.synchronize if has_gpu else lambda: None
    return device, wait, f"PyTorch {torch.__version__}, {device}"


def make_network(name: str, width: int | None, layers: int | None = None) -> nn.Module:
    """Build a network with a fixed seed.

    Args:
      name: mlp, convnet or cnn for images `[B, 1, 28, 28]`, lstm or gru for tokens `[B, T]`.
      width: channels of a convnet, or width of a recurrent layer.
      layers: number of recurrent layers.

    Returns:
      The network.
    """
    torch.manual_seed(0)
    if name in ("lstm", "gru"):
        assert width is not None and layers is not None
        return CharacterModel(name, width, layers)
    if name == "convnet":
        assert width is not None
        return convnet(width)
    if name not in ("mlp", "cnn"):
        raise ValueError(f"network = {name!r}: expected mlp, cnn, convnet, lstm or gru")
    return {"mlp": mlp, "cnn": cnn}[name]()


class CharacterModel(nn.Module):
    """A recurrent network with logits of the next character `[B, C, T]` for tokens `[B, T]`."""

    num_tokens = 60
    embedding_width = 8

    def __init__(self, name: str, width: int, layers: int):
        """Build the layers."""
        super().__init__()
        self.embedding = nn.Embedding(self.num_tokens, self.embedding_width)
        layer = {"lstm": nn.LSTM, "gru": nn.GRU}[name]
        self.recurrent = layer(self.embedding_width, width, layers, batch_first=True)
        self.head = nn.Linear(width, self.num_tokens)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.recurrent(self.embedding(tokens))[0]).transpose(1, 2)


def mlp() -> nn.Module:
    """Build the MLP 784-128-128-10."""
    hidden = [nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, 10))


def convnet(width: int, *, batch_norm: bool = False) -> nn.Sequential:
    """Build a ConvNet with group norm, or with batch norm."""
    layers: list[nn.Module] = []
    for channels, padding in ((1, 3), (width, 1), (width, 1)):
        norm = nn.BatchNorm2d(width) if batch_norm else nn.GroupNorm(width, width)
        conv = nn.Conv2d(channels, width, 3, padding=padding)
        layers += [conv, norm, nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * width, 10))


def cnn() -> nn.Module:
    """Build FedAvg's CNN."""
    blocks = [
        layer
        for channels, filters in ((1, 32), (32, 64))
        for layer in (nn.Conv2d(channels, filters, 5), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))


def to_tensors(
    images: np.ndarray, labels: np.ndarray, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images [N, 1, 28, 28] or tokens [N, T], and labels in the device's memory."""
    inputs = torch.tensor(images)
    if inputs.ndim == 4:
        inputs = inputs.permute(0, 3, 1, 2).contiguous()
    return inputs.to(device), torch.tensor(labels).to(device)


def make_train_step(regime: Regime, model: nn.Module, *, is_batched: bool = False) -> Callable:
    """Make the function of a step of SGD on named weights.

    Args:
      regime: learning rate.
      model: the network.
      is_batched: whether weights, images and labels have a first axis of clients.

    Returns:
      A function of weights, images and labels that returns the new weights.
    """

    def compute_loss(weights, batch, target):
        return nn.functional.cross_entropy(functional_call(model, weights, (batch,)), target)

    compute_gradients = vmap(grad(compute_loss)) if is_batched else grad(compute_loss)

    def train_step(weights, batch, target):
        gradients = compute_gradients(weights, batch, target)
        return {name: w - regime.local_lr * gradients[name] for name, w in weights.items()}

    return train_step


def train_one_epoch(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    regime: Regime,
    prox_lambda: float = 0.0,
) -> None:
    """Make one pass of SGD over a client's images in their order; the last batch is smaller.

    Args:
      model: the network, which is trained in place.
      images: `[n, 1, 28, 28]`.
      labels: `[n]`.
      regime: batch size and learning rate.
      prox_lambda: weight of the proximal gradient towards the initial model; 0: none.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=regime.local_lr)
    center = [p.detach().clone() for p in model.parameters()] if prox_lambda else []
    batches = zip(images.split(regime.batch_size), labels.split(regime.batch_size), strict=True)
    for batch, target in batches:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(batch), target).backward()
        with torch.no_grad():
            for p, initial in zip(model.parameters(), center, strict=False):
                assert p.grad is not None
                p.grad.add_(p - initial, alpha=prox_lambda)
        optimizer.step()
