"""FedAF's Figure 9: images of one class by domain, in a network's feature space (t-SNE).

python experiments/fedaf/fig9.py                  six domains of the embedded digits, a minute
python experiments/fedaf/fig9.py --preset paper   DomainNet

The paper uses the features of a ResNet50 trained on ImageNet. Nothing is downloaded here: this
script trains the network for the features on the same images of all domains, for a few epochs. The
figure differs from the paper's, as its title states.
"""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from fedjax_het.analysis.figures.style import (
    PALETTE,
    FigureFormat,
    add_legend,
    make_panels,
    write_figure,
)
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.data import Dataset, load_dataset
from fedjax_het.papers.fedaf.domains import make_digit_domains
from fedjax_het.papers.programs import make_config_program
from fedjax_het.runtime.progress import show_progress
from fedjax_het.runtime.result_display import format_run_label
from fedjax_het.runtime.session import simulate
from fedjax_het.utils.config import Bounds, NonNegativeInt, PositiveInt
from fedjax_het.utils.errors import require_name
from fedjax_het.utils.io import make_output_directory


class EmbeddingPreset(NamedTuple):
    """Images, and the network that is trained on them."""

    make_dataset: Callable[[], Dataset]
    images_description: str
    spec: RunSpec


def make_centralized_spec(dataset: str, epochs: int, **settings: Any) -> RunSpec:
    """Return the settings of centralized training: FedAvg with one client and one epoch per round.

    Args:
      dataset: name of the data set.
      epochs: number of epochs.
      **settings: further fields of `RunSpec`.

    Returns:
      The settings.
    """
    return RunSpec(
        "fedavg",
        dataset,
        protocol="dynafed",  # the optimizer keeps its state over epochs
        model="convnet",
        norm="batch",
        partition="iid",
        num_clients=1,
        participation=1.0,
        local_epochs=1,
        batch_size=64,
        rounds=epochs,
        local_optimizer="momentum",
        **settings,
    )


DOMAIN_MARKERS = "o^sDvP"
PRESETS = {
    "quick": EmbeddingPreset(
        make_digit_domains,
        "the digits in six artificial domains",
        make_centralized_spec("user", 20, width=32, depth=2),
    ),
    "paper": EmbeddingPreset(
        lambda: load_dataset("domainnet", normalization="fedaf"),
        "DomainNet's ten classes",
        make_centralized_spec("domainnet", 10, normalization="fedaf"),
    ),
}


@dataclasses.dataclass
class Arguments:
    """The command line."""

    preset: str = "quick"
    """Size of the figure: quick or paper."""
    epochs: PositiveInt | None = None
    """Epochs of the network's training (default: the preset's)."""
    images: Annotated[int, Bounds(100)] = 3000
    """Maximal number of training images in the figure, which are drawn from all."""
    seed: NonNegativeInt = 0
    """Seed of the training, of the images and of t-SNE."""
    output_dir: Path | None = None
    """Folder of the figure (default: results/fedaf-fig9-PRESET)."""
    list: bool = False
    """Print the network and its training; do nothing."""
    pictures: tuple[FigureFormat, ...] = ()
    """Additional files of each figure: pdf, svg (default: PNG only)."""


def embed_images(
    spec: ResolvedRunSpec, dataset: Dataset, positions: np.ndarray
) -> tuple[np.ndarray, float]:
    """Train the network and compute features of training images.

    Args:
      spec: settings of the training.
      dataset: the data set.
      positions: positions of the images, int `[N]`.

    Returns:
      Features `[N, F]`, and the test accuracy of the network as a fraction.
    """
    import jax
    import jax.numpy as jnp

    from fedjax_het.core.task import Task
    from fedjax_het.nn import make_model

    with show_progress(format_run_label(spec), transient=True) as show:
        result = simulate(spec, dataset=dataset, progress=show)
    model = make_model(spec.model, dataset.input_shape, dataset.num_classes, **spec.model_options)
    task, features_of = Task(model, dataset.mean, dataset.std), model.embed
    assert features_of is not None  # a ConvNet has them

    @jax.jit
    def embed(images):
        return features_of(result.state.server.variables, task.normalize(images), train=False)[0]

    batches = [
        np.asarray(embed(jnp.asarray(dataset.train_inputs[batch_positions])))
        for batch_positions in np.array_split(positions, -(-len(positions) // 256))
    ]
    return np.concatenate(batches), result.summary["last_accuracy"]


def plot_embedding(
    points: np.ndarray, labels: np.ndarray, domains: np.ndarray, dataset: Dataset, title: str
):
    """Plot the points of one t-SNE: a panel per class, a color and a marker per domain.

    Args:
      points: coordinates `[N, 2]`.
      labels: classes `[N]`.
      domains: domains `[N]`.
      dataset: data set with the names of classes and domains.
      title: title of the figure.

    Returns:
      The figure.
    """
    from matplotlib.lines import Line2D

    names = dataset.class_names or tuple(map(str, range(dataset.num_classes)))
    figure, panels = make_panels(names, columns=4, size=(2.4, 2.3), sharey="all")
    styles = itertools.cycle(zip(PALETTE, DOMAIN_MARKERS, strict=False))
    domain_styles = dict(zip(dataset.domain_names, styles, strict=False))
    low, high = points.min(0), points.max(0)
    margin = 0.05 * (high - low)
    for label, panel in enumerate(panels.values()):
        for domain, (color, marker) in enumerate(domain_styles.values()):
            x, y = points[(labels == label) & (domains == domain)].T
            panel.scatter(x, y, s=7, color=color, marker=marker, linewidth=0)
        panel.set_xlim(low[0] - margin[0], high[0] + margin[0])
        panel.set_ylim(low[1] - margin[1], high[1] + margin[1])
        panel.set_xticks([])
        panel.set_yticks([])
    figure.suptitle(title, fontsize=10)
    handles = [
        Line2D([], [], linestyle="none", marker=marker, color=color, label=name)
        for name, (color, marker) in domain_styles.items()
    ]
    add_legend(figure, handles)
    return figure


def make_figure(arguments: Arguments) -> int:
    """Make the figure, and print its file."""
    require_name("preset", arguments.preset, PRESETS)
    preset = PRESETS[arguments.preset]
    rounds = arguments.epochs or preset.spec.rounds
    spec = dataclasses.replace(preset.spec, seed=arguments.seed, rounds=rounds).resolved()
    if arguments.list:
        print(f"{spec.model} on {preset.images_description}, {spec.rounds} epochs; then t-SNE")
        return 0
    from sklearn.manifold import TSNE

    dataset = preset.make_dataset()
    rng = np.random.default_rng(arguments.seed)
    count = min(arguments.images, len(dataset.train_labels))
    positions = np.sort(rng.permutation(len(dataset.train_labels))[:count])
    features, accuracy = embed_images(spec, dataset, positions)
    points = TSNE(random_state=arguments.seed, init="pca").fit_transform(features)
    title = (
        f"t-SNE of {count:,} training images' features: {preset.images_description}.\n"
        f"Features of a ConvNet trained here on these domains for {spec.rounds} epochs "
        f"(test accuracy {100 * accuracy:.1f} %),\nnot of the paper's ResNet50 trained on "
        "ImageNet."
    )
    output_dir = arguments.output_dir or f"results/fedaf-fig9-{arguments.preset}"
    directory = make_output_directory(output_dir)
    assert dataset.train_domains is not None  # both presets' data have domains
    labels, domains = dataset.train_labels[positions], dataset.train_domains[positions]
    figure = plot_embedding(points, labels, domains, dataset, title)
    write_figure(directory / "fig9.png", figure, formats=arguments.pictures)
    print(f"Written to {directory}: fig9.png.")
    return 0


main = make_config_program(
    Arguments,
    make_figure,
    "FedAF, Figure 9: features of domains by t-SNE, from a network trained here.",
)
