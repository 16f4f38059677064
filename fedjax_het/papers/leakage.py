"""Information that the images of DynaFed, FedDM and FedAF contain about the clients' images.

python experiments/leakage.py                  the embedded digits, a minute or two on 2 cores
python experiments/leakage.py --preset cpu     Fashion-MNIST, MLP: half an hour

The papers have no such table; they state that synthetic images protect the clients' images. Here an
attacker who has only the synthetic images distinguishes clients' training images from test images.
Attack `distance` uses the distance to the nearest synthetic image, attack `loss` the loss of a
network trained on the synthetic images. References are the same attacks on random training images
with the same labels (`real`) and on noise. Real images leak everything, but about few images; noise
leaks nothing. The nearest real image is searched among equally many training and test images.
`leakage.md` lists the results, `leakage.png` shows synthetic images beside their nearest training
images.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from scipy.stats import combine_pvalues

from fedjax_het.analysis.comparison import format_row
from fedjax_het.analysis.figures.synthetic_images import rescale_to_unit_range
from fedjax_het.analysis.membership import evaluate_membership_attack
from fedjax_het.analysis.render import TableSection, TextTable, format_number, format_p_value
from fedjax_het.analysis.synthetic_measures import load_synthetic_data
from fedjax_het.condensation import SyntheticData, SyntheticTask, train_from_scratch
from fedjax_het.condensation.downstream_eval import random_subset
from fedjax_het.core.task import Task
from fedjax_het.data import Dataset, load_dataset
from fedjax_het.nn import make_model
from fedjax_het.papers.fedaf.settings import condensing_method_settings
from fedjax_het.papers.table import Preset, TableDeclaration, TableRun, make_table_program
from fedjax_het.runtime.data_assignment import build_partition
from fedjax_het.runtime.results import Result
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.errors import require

ATTACKER_LR = 0.01
ATTACKER_EPOCHS = 300
NUM_SHOWN_IMAGES = 8
CAPTION = (
    "Images: made by the method; real: equally many random training images with the same labels; "
    "noise. AUC: the chance that a client's training image scores above a test image (0.5 for a "
    "guess), by the distance to the nearest of the images, and by the loss of a network trained on "
    "them. Found: percent of the training images above the score that one in a thousand test "
    "images reaches (0.1 for a guess). Nearest is a member: percent of the images whose nearest "
    "real image, among equally many training and test images, is a training image (50 for no "
    "leakage). p: binomial test of this percentage, combined over seeds by Fisher's method. "
    "Distance, to others: median distance to the nearest training and test image (root mean square "
    "of normalized pixels). Means over seeds."
)
ROWS = (
    "dynafed",
    "feddm",
    "feddm(init='real')",
    "feddm(init='noise')",
    "fedaf",
    "feddm(init='noise', private=True)",
)


def make_preset(
    dataset: str, seeds: tuple[int, ...], num_clients: int, **condensation_options: Any
) -> Preset:
    """Make a preset.

    Args:
      dataset: name of the data set.
      seeds: seeds of the runs.
      num_clients: number of clients.
      **condensation_options: options of FedDM and FedAF.

    Returns:
      The preset.
    """
    options = {"ipc": 10, "server_epochs": 50, **condensation_options}
    return Preset(
        datasets=(dataset,),
        models=("mlp",),
        alphas=(0.1,),
        seeds=seeds,
        rows=ROWS,
        settings={"num_clients": num_clients, "participation": 1.0},
        method_settings={
            "dynafed": {"rounds": 21, "local_epochs": 5 if dataset == "digits" else 1},
            **condensing_method_settings(rounds=3, batch_size=256, options=options),
        },
    )


LEAKAGE = TableDeclaration(
    name="leakage",
    paper="dynafed",
    item="table1",
    title="Membership leakage of synthetic images.",
    has_reported_values=False,
    presets={
        "quick": make_preset("digits", (0,), 5, steps=100, threshold=10),
        "cpu": make_preset("fashion_mnist", (0, 1, 2), 10, steps=300, threshold=10),
    },
)


def attacker_losses(task: Task, data: SyntheticData, images: np.ndarray, labels: np.ndarray, key):
    """Compute losses of a network that is trained on synthetic data only.

    Args:
      task: task with the network.
      data: the synthetic data.
      images: images `[N, H, W, C]`.
      labels: their labels `[N]`.
      key: PRNG key.

    Returns:
      Losses in nats, `[N]`.
    """
    variables = task.model.init(key)

    def apply(params, inputs):
        return task.model.apply({**variables, "params": params}, inputs, train=True)[0]

    attack = SyntheticTask(apply, "none", "cross_entropy")
    params = train_from_scratch(attack, variables["params"], data, key, epochs=ATTACKER_EPOCHS)

    def loss(example):
        image, label = example
        inputs = task.normalize(image[None])
        logits = task.model.apply({**variables, "params": params}, inputs, train=False)[0]
        return -jax.nn.log_softmax(logits[0])[label]

    return jax.lax.map(loss, (images, labels), batch_size=500)


def measure_leakage(result: Result, dataset: Dataset) -> list[dict[str, Any]]:
    """Attack the synthetic images of a run, and the references.

    Args:
      result: result of the run.
      dataset: its data set.

    Returns:
      A record for each kind of images: `made`, `real` and `noise`.
    """
    spec = result.spec.resolved()
    model = make_model(spec.model, dataset.input_shape, dataset.num_classes, **spec.model_options)
    task = Task(model, dataset.mean, dataset.std)
    synthetic = load_synthetic_data(result, dataset.num_classes)
    synthetic = synthetic._replace(step_size=jnp.float32(ATTACKER_LR))
    rng = np.random.default_rng(spec.seed)
    client_indices = np.unique(build_partition(spec, dataset).indices)
    labels = np.asarray(synthetic.label_logits).argmax(1)
    reference_indices = random_subset(dataset.train_labels[client_indices], labels, seed=spec.seed)

    def inputs(images):
        return np.asarray(task.normalize(jnp.asarray(images)))

    members, non_members = inputs(dataset.train_inputs[client_indices]), inputs(dataset.test_inputs)
    # The numbers of members and others are equal; the images of kind `real` are among the members.
    remaining = rng.permutation(np.setdiff1d(np.arange(len(members)), reference_indices))
    member_subset = np.concatenate([reference_indices, remaining])[: len(non_members)]
    kinds = {
        "made": synthetic,
        "real": synthetic._replace(inputs=jnp.asarray(members[reference_indices])),
        "noise": synthetic._replace(
            inputs=jnp.asarray(rng.normal(size=synthetic.inputs.shape), jnp.float32)
        ),
    }
    losses = jax.jit(partial(attacker_losses, task))
    key, rows = make_key(spec.seed), []
    for kind, data in kinds.items():
        probe_images = np.asarray(data.inputs)
        distance_attack = evaluate_membership_attack(
            -nearest_distances(members, probe_images), -nearest_distances(non_members, probe_images)
        )
        splits = (
            (dataset.train_inputs[client_indices], dataset.train_labels[client_indices]),
            (dataset.test_inputs, dataset.test_labels),
        )
        loss_attack = evaluate_membership_attack(
            *(-np.asarray(losses(data, *map(jnp.asarray, split), key)) for split in splits)
        )
        neighbors = compare_neighbors(
            probe_images, members[member_subset], non_members[: len(member_subset)]
        )
        rows.append(
            {
                "images": kind,
                "number": len(probe_images),
                **{f"distance_{name}": value for name, value in distance_attack._asdict().items()},
                **{f"loss_{name}": value for name, value in loss_attack._asdict().items()},
                "nearest_share": neighbors.share,
                "nearest_p": neighbors.p_value,
                "nearest_member": float(np.median(neighbors.members)),
                "nearest_other": float(np.median(neighbors.others)),
            }
        )
    return rows


def make_text_table(table: pd.DataFrame, title: str) -> TextTable:
    """Format means over seeds.

    Args:
      table: a row per run and kind of images with the records of `measure_leakage`.
      title: title of the table.

    Returns:
      A section for each data set, with a row for each method and kind.
    """
    sections = []
    for dataset, rows in table.groupby("dataset", sort=False):
        texts = []
        for (method, kind), method_rows in rows.groupby(["method", "images"], sort=False):
            mean = method_rows.mean(numeric_only=True)
            texts.append(
                {
                    "Method": format_row(method),
                    "Images": kind,
                    "Number": f"{mean['number']:.0f}",
                    "AUC by distance": format_number(mean["distance_auc"], ".3f"),
                    "Found": format_number(100 * mean["distance_found"], ".2f"),
                    "AUC by loss": format_number(mean["loss_auc"], ".3f"),
                    "Found by loss": format_number(100 * mean["loss_found"], ".2f"),
                    "Nearest is a member": format_number(100 * mean["nearest_share"], ".1f"),
                    "p": format_p_value(combine_pvalues(method_rows["nearest_p"]).pvalue),
                    "Distance": format_number(mean["nearest_member"], ".3f"),
                    "To others": format_number(mean["nearest_other"], ".3f"),
                    "Seeds": str(len(method_rows)),
                }
            )
        sections.append(TableSection(texts, dataset, {"Data": dataset}))
    return TextTable(title, ["Method", "Images"], sections, [CAPTION])


def plot_nearest_images(image_pairs: dict[str, tuple[np.ndarray, np.ndarray]]):
    """Plot two rows for each method: synthetic images, and below the nearest training images."""
    from matplotlib.figure import Figure

    size = (0.7 * NUM_SHOWN_IMAGES + 2.2, 1.5 * len(image_pairs))
    figure = Figure(figsize=size, layout="constrained")
    grid = iter(figure.subplots(2 * len(image_pairs), NUM_SHOWN_IMAGES, squeeze=False))
    for method, pair in image_pairs.items():
        for label, images in zip((format_row(method), "nearest training image"), pair, strict=True):
            axes = next(grid)
            for axis, image in zip(axes, images, strict=True):
                axis.imshow(rescale_to_unit_range(image).squeeze(), cmap="gray")
                axis.set(xticks=[], yticks=[])
            axes[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=7)
    return figure


def nearest_image_pairs(result: Result, dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return synthetic images of a run, and the nearest of the clients' training images.

    Args:
      result: result of the run.
      dataset: its data set.

    Returns:
      Two arrays `[NUM_SHOWN_IMAGES, H, W, C]`.
    """
    images = np.asarray(load_synthetic_data(result, dataset.num_classes).inputs)
    shown = images[np.linspace(0, len(images) - 1, NUM_SHOWN_IMAGES).astype(int)]
    client_indices = np.unique(build_partition(result.spec.resolved(), dataset).indices)
    candidates = (dataset.train_inputs[client_indices] / 255 - dataset.mean) / dataset.std
    nearest = [np.square(candidates - image).sum((1, 2, 3)).argmin() for image in shown]
    return shown, candidates[nearest]


def _write_outputs(table_run: TableRun) -> list[str]:
    rows: list[dict[str, Any]] = []
    image_pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for cell, result in table_run.iterate_results():
        spec = result.spec
        dataset = load_dataset(spec.dataset, normalization=spec.normalization)
        identifiers = {"dataset": cell.dataset, "method": cell.method, "seed": spec.seed}
        rows += [{**identifiers, **values} for values in measure_leakage(result, dataset)]
        if cell.method not in image_pairs:
            image_pairs[cell.method] = nearest_image_pairs(result, dataset)
    if not rows:
        print("There is no run to attack.")
        return []
    table = pd.DataFrame(rows)
    texts = make_text_table(table, f"{table_run.title}.")
    figures = {"leakage.png": plot_nearest_images(image_pairs)}
    return table_run.write_table("leakage", texts, table, figures)


_BLOCK_SIZE = 2**24  # distances per block


class NeighborComparison(NamedTuple):
    """Distances of synthetic images to members and to equally many other images."""

    members: np.ndarray
    """Distance to the nearest member, `[M]`."""
    others: np.ndarray
    """Distance to the nearest other image, `[M]`."""
    share: float
    """Fraction whose nearest image is a member, ties counting half; 0.5 without leakage."""
    p_value: float
    """Binomial test that the fraction is 0.5, without ties."""


def compare_neighbors(
    synthetic: np.ndarray, members: np.ndarray, others: np.ndarray
) -> NeighborComparison:
    """Compare the distances of synthetic images to members and to other images.

    Args:
      synthetic: images `[M, ...]`.
      members: images `[N, ...]`.
      others: images `[N, ...]`; the larger set would have the nearer neighbors.

    Returns:
      The distances and their comparison.

    Raises:
      ConfigError: if the numbers of members and others differ.
    """
    from scipy import stats

    require(len(members) == len(others), "members", len(members), f"{len(others)}, equal to others")
    to_members, to_others = (nearest_distances(synthetic, side) for side in (members, others))
    closer, farther = int((to_members < to_others).sum()), int((to_members > to_others).sum())
    decided, count = closer + farther, len(to_members)
    p_value = stats.binomtest(closer, decided).pvalue if decided else 1.0
    share = (closer + (count - decided) / 2) / count
    return NeighborComparison(to_members, to_others, float(share), float(p_value))


def nearest_distances(images: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Compute the distance of each image to its nearest candidate.

    The distance is the root of the mean squared difference of pixels. The cost is M N products in
    blocks.

    Args:
      images: images `[M, ...]`.
      candidates: images `[N, ...]`.

    Returns:
      Distances, float64 `[M]`.

    Raises:
      ConfigError: if there is no candidate.
    """
    require(len(candidates) > 0, "candidates", 0, "at least one image")
    images, candidates = (
        np.asarray(a, np.float32).reshape(len(a), -1) for a in (images, candidates)
    )
    squared_norms, distances = np.square(candidates).sum(1), []
    for block in np.array_split(images, max(1, len(images) * len(candidates) // _BLOCK_SIZE)):
        products = squared_norms - 2 * block @ candidates.T
        best = candidates[products.argmin(1)]
        # The difference of the images themselves: a difference of the products would be rounding
        # noise for equal images.
        distances.append(np.sqrt(np.square(block - best).mean(1, dtype=np.float64)))
    return np.concatenate(distances)


main = make_table_program(LEAKAGE, _write_outputs)
