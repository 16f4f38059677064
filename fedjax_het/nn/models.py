"""Networks as pairs of pure functions on plain dicts; flax stays behind `make_model`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.common.errors import require, require_name
from fedjax_het.nn.conv import CONV_IMPLS

Variables = dict[str, Any]  # {"params": tree, "state": tree}; "state" is {} without batch norm

MODELS = {
    "mlp": "fully connected with ReLU, two hidden layers of 128 unless `hidden` says otherwise",
    "convnet": "DynaFed's ConvNet: `depth` times 3x3 convolution, norm, ReLU, 2x2 average pool",
    "cnn": "FedAvg's CNN: 5x5 convolution, ReLU, 2x2 max pool, twice, and a hidden layer of 512",
    "fsl_cnn": "FSL's CNNs with dropout: two 3x3 convolutions, pooling as the image's colours ask",
    "resnet18": "ResNet-18 with batch norm; `stem` for large images (imagenet) or small (cifar)",
}
OPTIONS = {
    "mlp": ("hidden",),
    "convnet": ("width", "depth", "norm"),
    "cnn": (),
    "fsl_cnn": (),
    "resnet18": ("width", "stem"),
}
CNN_FILTERS, CNN_HIDDEN = (32, 64), 512
FSL_FILTERS, FSL_HIDDEN = (32, 64), 128
CACHED_ACTIVATIONS = 2**17  # of the first layer, 0.5 MB: a step holds several such arrays in L2
NORM_NAMES = ("group", "instance", "batch", "none")
STEMS = ("imagenet", "cifar")


class Head(NamedTuple):
    """A network's last fully connected layer by itself.

    of(variables) -> its parameters, of the network's.
    apply(parameters, features [B, F]) -> logits [B, num_classes].
    """

    of: Callable[[Variables], Any]
    apply: Callable[[Any, jax.Array], jax.Array]


class Model(NamedTuple):
    """A network. `init(key) -> Variables` and

    `apply(variables, x, *, train, key=None) -> (logits [B, num_classes], new_state)` for
    `x` [B, H, W, C] float32, normalised. `new_state` is `variables["state"]` after the batch where
    the network keeps running statistics and `train` is true, else unchanged. `key` is for networks
    that draw random numbers, as dropout does in training: one key, one mask for the whole batch.
    Without a key nothing is dropped.

    `embed(variables, x, *, train, key=None) -> (features [B, F], logits, new_state)` gives besides
    what the last fully connected layer reads, and `head` is that layer. A model of the user's own
    may do without (None) where the method does not ask for them.

    `micro_batch` is how many samples a training step should take at once, see
    `micro_batched_value_and_grad` (None: as many as there are, or the network mixes samples in
    training). `cached_samples` is how many samples' activations fit a core's cache (None: as many
    as there are), for passes with train=False, in which no network mixes samples.

    `norm_layers()` are the paths of the normalisation layers within the variables, see `norm_mask`.
    """

    name: str
    input_shape: tuple[int, int, int]
    num_classes: int
    init: Callable[[jax.Array], Variables]
    apply: Callable[..., tuple[jax.Array, Any]]
    micro_batch: int | None = None
    cached_samples: int | None = None
    embed: Callable[..., tuple[jax.Array, jax.Array, Any]] | None = None
    norm_layers: Callable[[], frozenset[tuple[str, ...]]] = frozenset
    head: Head | None = None


def make_model(
    name: str,
    input_shape: Sequence[int],
    num_classes: int,
    *,
    width: int | None = None,
    depth: int | None = None,
    norm: str | None = None,
    hidden: Sequence[int] | None = None,
    stem: str | None = None,
    conv_impl: str = "auto",
) -> Model:
    """The network `name` (see `MODELS`) for images of `input_shape` (height, width, channels).

    `mlp` takes `hidden` (default (128, 128)). `convnet` takes `width` (default 128 filters),
    `depth` (3), `norm` and `conv_impl` (see `conv2d`); `norm` is `group` (GroupNorm with one
    channel a group, which is instance normalisation: `instance` is the same), `batch` or `none`.
    Its first convolution pads 28x28 images of one channel to give 32x32, as DynaFed's code does.
    `cnn` is that of McMahan et al. (AISTATS 2017) without padding, as PFLlib has it: 32 and 64
    filters of 5x5, each with ReLU and a 2x2 max pool, a hidden layer of 512; 582,026 parameters for
    28x28x1.

    `fsl_cnn` has two forms (Mai, La and Zhang, arXiv 2210.02614). For images of one channel, Table
    II's: 32 and 64 filters of 3x3, each with ReLU, the first with padding, the second without, a
    2x2 max pool, dropout of 1/4, a hidden layer of 128 with ReLU, dropout of 1/2; 1,409,197
    parameters for 28x28x1 and 45 classes. For others, Table III's: both with padding, and each with
    a 2x2 max pool; 545,098 for 32x32x3 and 10 classes.

    `resnet18` (He et al., CVPR 2016, as torchvision has it) takes `stem`: `imagenet` (default), a
    7x7 convolution of stride 2 and a 3x3 max pool of stride 2, as FedAF's Table 6 must have used on
    32x32 images (its count of 11,181,642 parameters says so); or `cifar`, a 3x3 convolution and no
    pool (11,173,962). `width` (64) is the filters of its first stage; each of the three others has
    twice as many as the one before.

    An option that the network does not have, or an image that is too small for it, is a
    `ConfigError`.

    Weights and biases are drawn as PyTorch does by default, U(±1/√fan_in); the convolutions of
    `resnet18` as torchvision does, N(0, 2/fan_out); those of `fsl_cnn` as Keras does, weights
    U(±√(6 / (fan_in + fan_out))) and biases zero: the paper does not say.
    """
    require_name("model", name, MODELS)
    require(
        len(input_shape) == 3 and all(int(size) == size and size > 0 for size in input_shape),
        "input_shape",
        input_shape,
        "three positive integers: height, width, channels",
    )
    require(num_classes > 0, "num_classes", num_classes, "a positive number")
    input_shape = tuple(int(size) for size in input_shape)

    given = {"width": width, "depth": depth, "norm": norm, "hidden": hidden, "stem": stem}
    own = ", ".join(OPTIONS[name]) or "none"
    for option, value in given.items():
        unknown = f"no such option for {name} (its options: {own})"
        require(value is None or option in OPTIONS[name], option, value, unknown)
    require_name("conv_impl", conv_impl, CONV_IMPLS)

    from fedjax_het.nn import modules  # here, since flax is slow to import

    require(width is None or width > 0, "width", width, "a positive number of filters")

    micro_batch = cached_samples = None
    if name == "mlp":
        hidden = (128, 128) if hidden is None else tuple(hidden)
        require(all(size > 0 for size in hidden), "hidden", hidden, "positive layer sizes")
        module = modules.Mlp(num_classes, hidden)
    elif name == "cnn":
        require(min(input_shape[:2]) >= 16, "input_shape", input_shape, "at least 16x16 for cnn")
        module = modules.Cnn(num_classes, CNN_FILTERS, CNN_HIDDEN, conv_impl)
    elif name == "fsl_cnn":
        require(min(input_shape[:2]) >= 4, "input_shape", input_shape, "at least 4x4 for fsl_cnn")
        module = modules.FslCnn(num_classes, FSL_FILTERS, FSL_HIDDEN, conv_impl)
        height, length = input_shape[:2]
        cached_samples = max(2, CACHED_ACTIVATIONS // (height * length * FSL_FILTERS[0]))
    elif name == "resnet18":
        stem = "imagenet" if stem is None else stem
        require_name("stem", stem, STEMS)
        width = 64 if width is None else width
        module = modules.ResNet18(num_classes, width, stem, conv_impl)
        # Of the first stage: the stem's live for a moment only.
        height, length = (-(-size // (4 if stem == "imagenet" else 1)) for size in input_shape[:2])
        cached_samples = max(2, CACHED_ACTIVATIONS // (height * length * width))
    else:
        width = 128 if width is None else width
        depth = 3 if depth is None else depth
        norm = "group" if norm is None else norm
        require_name("norm", norm, NORM_NAMES)
        first_padding = 3 if input_shape == (28, 28, 1) else 1
        smallest = min(input_shape[:2]) + 2 * (first_padding - 1)
        fits = smallest.bit_length() - 1  # each block halves the image, rounding down
        require(1 <= depth <= fits, "depth", depth, f"1 to {fits} for images of {input_shape}")
        module = modules.ConvNet(num_classes, width, depth, norm, first_padding, conv_impl)
        height, length = (size + 2 * (first_padding - 1) for size in input_shape[:2])
        # A single sample would make the products of the last block too thin.
        cached_samples = max(2, CACHED_ACTIVATIONS // (height * length * width))
        micro_batch = None if norm == "batch" else cached_samples
    return _wrap(name, module, input_shape, num_classes, micro_batch, cached_samples)


def _wrap(name, module, input_shape, num_classes, micro_batch, cached_samples) -> Model:
    def init(key: jax.Array) -> Variables:
        variables = module.init(key, jnp.zeros((1, *input_shape)), train=False)
        return {"params": variables["params"], "state": variables.get("state", {})}

    def embed(variables, x, *, train, key=None):
        how = {"train": train, "rngs": None if key is None else {"dropout": key}}
        if not (train and variables["state"]):
            return *module.apply(variables, x, **how), variables["state"]
        (features, logits), updated = module.apply(variables, x, **how, mutable=["state"])
        return features, logits, updated["state"]

    def apply(variables, x, *, train, key=None):
        return embed(variables, x, train=train, key=key)[1:]

    @functools.cache
    def norm_layers():
        from fedjax_het.nn.modules import norm_paths

        return norm_paths(module, input_shape)

    head = Head(
        of=lambda variables: variables["params"]["head"],
        apply=lambda head, features: features @ head["kernel"] + head["bias"],
    )
    sizes = (micro_batch, cached_samples)
    return Model(name, input_shape, num_classes, init, apply, *sizes, embed, norm_layers, head)


def count_parameters(variables: Variables) -> int:
    """Trainable numbers in `variables["params"]` (running statistics not counted)."""
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
