"""What DynaFed's, FedDM's and FedAF's images give away of the clients' images.

python experiments/leakage.py                  the embedded digits, a minute or two on 2 cores
python experiments/leakage.py --preset cpu     Fashion-MNIST, MLP: half an hour

No table of the papers, which say that made-up images protect the clients': an attacker who has
them alone tells clients' training images from test images, by how near the nearest made-up image is
(distance), and by the loss of a network that was trained on the made-up images (loss). Beside them
the same attacks on as many random training images with the same labels (real: all is given away,
but of few) and on noise (nothing is). The nearest real images are looked for among as many training
as test images. `leakage.md` lists what is found, `leakage.png` shows made-up images beside their
nearest training images.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from scipy.stats import combine_pvalues

from fedjax_het.analysis.render import TableSection, TextTable, format_number, format_p_value
from fedjax_het.analysis.report import write_table_files
from fedjax_het.condensation import SyntheticData, train_from_scratch
from fedjax_het.condensation.downstream_eval import random_subset
from fedjax_het.core.task import Task
from fedjax_het.data import Dataset, load_dataset
from fedjax_het.nn import make_model
from fedjax_het.papers.fedaf.settings import condensing_method_settings
from fedjax_het.papers.table import Preset, TableDeclaration, TableRun, make_table_program
from fedjax_het.runtime.data_assignment import build_partition
from fedjax_het.runtime.results import Result
from fedjax_het.utils.errors import require

HARD_LABEL_LOGIT = 30.0  # the label logit of an image's own class, those of the others being 0
ATTACKER_EPOCHS = 300  # of the attacker's network
NUM_SHOWN_IMAGES = 8
CAPTION = (
    "Images: made by the method; real: as many random training images with the same labels; noise. "
    "AUC: the chance that a client's training image scores above a test image, 0.5 is a guess; by "
    "the distance to the nearest of the images, and by the loss of a network trained on them. "
    "Found: percent of the training images above what one in a thousand test images reach (0.1 is "
    "a guess). Nearest is a member: percent of the images whose nearest real one, of as many "
    "training as test images, is a training image (50 where membership says nothing), p of the "
    "binomial test of that, combined over seeds by Fisher's method. Distance, to others: median "
    "distance to the nearest training and test image (root mean square of normalised pixels). "
    "Means over seeds."
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
    title="What made-up images give away of the clients'.",
    has_reported_values=False,
    presets={
        "quick": make_preset("digits", (0,), 5, steps=100, threshold=10),
        "cpu": make_preset("fashion_mnist", (0, 1, 2), 10, steps=300, threshold=10),
    },
)


def load_synthetic_data(result: Result, num_classes: int) -> SyntheticData:
    """The made-up images of a run, of all clients, with soft labels."""
    artifacts = result.artifacts
    if "synthetic_images" in artifacts:
        images, logits = artifacts["synthetic_images"], artifacts["synthetic_label_logits"]
    else:
        images = artifacts["condensed_images"].astype(np.float32)
        labels = np.repeat(artifacts["condensed_classes"], images.shape[1])
        images = images.reshape(-1, *images.shape[2:])
        logits = HARD_LABEL_LOGIT * np.eye(num_classes)[labels]
    return SyntheticData(jnp.asarray(images), jnp.asarray(logits, jnp.float32), jnp.float32(0.01))


def attacker_losses(task: Task, data: SyntheticData, images: np.ndarray, labels: np.ndarray, key):
    """[N] of a network that was trained on the data alone."""
    variables = task.model.init(key)

    def apply(params, inputs):
        return task.model.apply({**variables, "params": params}, inputs, train=True)[0]

    params = train_from_scratch(
        apply,
        variables["params"],
        data,
        key,
        epochs=ATTACKER_EPOCHS,
        augment_strategy="none",
        loss_scaling="cross_entropy",
    )

    def loss(example):
        image, label = example
        inputs = task.normalize(image[None])
        logits = task.model.apply({**variables, "params": params}, inputs, train=False)[0]
        return -jax.nn.log_softmax(logits[0])[label]

    return jax.lax.map(loss, (images, labels), batch_size=500)


def measure_leakage(result: Result, dataset: Dataset) -> list[dict[str, Any]]:
    """A row for each kind of data."""
    spec = result.spec.resolved()
    model = make_model(spec.model, dataset.input_shape, dataset.num_classes, **spec.model_options)
    task = Task(model, dataset.mean, dataset.std)
    synthetic = load_synthetic_data(result, dataset.num_classes)
    rng = np.random.default_rng(spec.seed)
    client_indices = np.unique(build_partition(spec, dataset).indices)
    labels = np.asarray(synthetic.label_logits).argmax(1)
    reference_indices = random_subset(dataset.train_labels[client_indices], labels, seed=spec.seed)

    def inputs(images):
        return np.asarray(task.normalize(jnp.asarray(images)))

    members, non_members = inputs(dataset.train_images[client_indices]), inputs(dataset.test_images)
    # As many members as others; those that stand in for the made ones are among them.
    remaining = rng.permutation(np.setdiff1d(np.arange(len(members)), reference_indices))
    member_subset = np.concatenate([reference_indices, remaining])[: len(non_members)]
    kinds = {
        "made": synthetic,
        "real": synthetic._replace(images=jnp.asarray(members[reference_indices])),
        "noise": synthetic._replace(
            images=jnp.asarray(rng.normal(size=synthetic.images.shape), jnp.float32)
        ),
    }
    losses = jax.jit(partial(attacker_losses, task))
    key, rows = jax.random.key(spec.seed), []
    for kind, data in kinds.items():
        probe_images = np.asarray(data.images)
        distance_attack = evaluate_membership_attack(
            -nearest_distances(members, probe_images), -nearest_distances(non_members, probe_images)
        )
        splits = (
            (dataset.train_images[client_indices], dataset.train_labels[client_indices]),
            (dataset.test_images, dataset.test_labels),
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
    """A section for each data set, a row for each method and kind: means over seeds."""
    sections = []
    for dataset, rows in table.groupby("dataset", sort=False):
        texts = []
        for (method, kind), method_rows in rows.groupby(["method", "images"], sort=False):
            mean = method_rows.mean(numeric_only=True)
            texts.append(
                {
                    "Method": method,
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
        sections.append(TableSection(rows=tuple(texts), title=dataset, labels={"Data": dataset}))
    names = ("Method", "Images")
    values = tuple(name for name in texts[0] if name not in names)
    return TextTable(title, names, values, tuple(sections), (CAPTION,))


def plot_nearest_images(image_pairs: dict[str, tuple[np.ndarray, np.ndarray]]):
    """Two rows for each method: made-up images, and under each the nearest training image."""
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(0.7 * NUM_SHOWN_IMAGES + 2.2, 1.5 * len(image_pairs)), layout="constrained"
    )
    axes = figure.subplots(2 * len(image_pairs), NUM_SHOWN_IMAGES, squeeze=False)
    for number, (method, pair) in enumerate(image_pairs.items()):
        for row, images in enumerate(pair):
            for axis, image in zip(axes[2 * number + row], images, strict=True):
                low, high = image.min(), image.max()
                axis.imshow(((image - low) / max(high - low, 1e-6)).squeeze(), cmap="gray")
                axis.set(xticks=[], yticks=[])
        labels = (method, "nearest training image")
        for row, label in enumerate(labels):
            axes[2 * number + row, 0].set_ylabel(
                label, rotation=0, ha="right", va="center", fontsize=7
            )
    return figure


def nearest_image_pairs(result: Result, dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Made-up images of a run, evenly picked, and the nearest of the clients' training images."""
    synthetic_images = np.asarray(load_synthetic_data(result, dataset.num_classes).images)
    shown_images = synthetic_images[
        np.linspace(0, len(synthetic_images) - 1, NUM_SHOWN_IMAGES).astype(int)
    ]
    client_indices = np.unique(build_partition(result.spec.resolved(), dataset).indices)
    client_images = (dataset.train_images[client_indices] / 255 - dataset.mean) / dataset.std
    return shown_images, np.stack(
        [
            client_images[np.square(client_images - image).sum((1, 2, 3)).argmin()]
            for image in shown_images
        ]
    )


def write_outputs(table_run: TableRun) -> list[str]:
    rows: list[dict[str, Any]] = []
    image_pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for cell, result in table_run.iterate_results():
        spec = result.spec
        dataset = load_dataset(spec.dataset, normalisation=spec.normalisation)
        identifiers = {"dataset": cell.dataset, "method": cell.method, "seed": spec.seed}
        rows += [
            {**identifiers, **measurements} for measurements in measure_leakage(result, dataset)
        ]
        if cell.method not in image_pairs:
            image_pairs[cell.method] = nearest_image_pairs(result, dataset)
    if not rows:
        print("No run is there to be attacked.")
        return []
    table = pd.DataFrame(rows)
    texts = make_text_table(table, f"{table_run.title}.")
    figures = {"leakage.png": plot_nearest_images(image_pairs)}
    return write_table_files(table_run.directory, "leakage", texts, table, figures)


FALSE_POSITIVE_RATE = 0.001
_BLOCK_SIZE = 2**24  # distances at a time


class AttackResult(NamedTuple):
    """How well scores tell members from others.

    auc: the chance that a member scores above another image; 0.5 is a guess. p_value: of
    Mann and Whitney's test that it is one. found: the share of members above the score that one in
    a thousand others reach (`FALSE_POSITIVE_RATE`), which a guess puts at that thousandth.
    """

    auc: float
    p_value: float
    found: float


def evaluate_membership_attack(members: np.ndarray, others: np.ndarray) -> AttackResult:
    """From the scores [N] of members and [M] of others; ConfigError where either has none or one
    that is not finite."""
    from scipy import stats

    members, others = (np.asarray(scores, np.float64) for scores in (members, others))
    for name, scores in (("members", members), ("others", others)):
        ok = scores.ndim == 1 and len(scores) > 0 and bool(np.isfinite(scores).all())
        require(ok, name, f"{scores.shape}", "finite scores, at least one")
    test_result = stats.mannwhitneyu(members, others)
    threshold = np.quantile(others, 1 - FALSE_POSITIVE_RATE, method="higher")
    auc = float(test_result.statistic) / (len(members) * len(others))
    return AttackResult(auc, float(test_result.pvalue), float((members > threshold).mean()))


class NeighborComparison(NamedTuple):
    """Where made-up images have their nearest real ones, of members and of as many others.

    members, others: [M] distances to the nearest of each. share: of those whose nearest is a
    member, ties counting half; 0.5 where membership says nothing. p_value: of the binomial test
    that it is 0.5, ties left out.
    """

    members: np.ndarray
    others: np.ndarray
    share: float
    p_value: float


def compare_neighbors(
    synthetic: np.ndarray, members: np.ndarray, others: np.ndarray
) -> NeighborComparison:
    """Of made-up images [M, ...]; ConfigError unless there are as many members as others, without
    which the larger side has the nearer neighbours."""
    from scipy import stats

    require(len(members) == len(others), "members", len(members), f"{len(others)}, as many others")
    member_distances, other_distances = (
        nearest_distances(synthetic, members),
        nearest_distances(synthetic, others),
    )
    num_closer, num_farther = (
        int((member_distances < other_distances).sum()),
        int((member_distances > other_distances).sum()),
    )
    num_decided = num_closer + num_farther
    p_value = stats.binomtest(num_closer, num_decided).pvalue if num_decided else 1.0
    member_share = (num_closer + (len(member_distances) - num_decided) / 2) / len(member_distances)
    return NeighborComparison(
        member_distances, other_distances, float(member_share), float(p_value)
    )


def nearest_distances(images: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """[M] the distance of each image [M, ...] to the nearest candidate [N, ...]: the root of the
    mean squared difference of their values.

    Cost: M N products; memory of a block of them.
    """
    require(len(candidates) > 0, "candidates", 0, "at least one image")
    images, candidates = (
        np.asarray(a, np.float32).reshape(len(a), -1) for a in (images, candidates)
    )
    squared_norms, distances = np.square(candidates).sum(1), []
    for block in np.array_split(images, max(1, len(images) * len(candidates) // _BLOCK_SIZE)):
        products = squared_norms - 2 * block @ candidates.T
        best = candidates[products.argmin(1)]
        # From the difference itself: that of the products would be rounding where both are alike.
        distances.append(np.sqrt(np.square(block - best).mean(1, dtype=np.float64)))
    return np.concatenate(distances)


main = make_table_program(LEAKAGE, write_outputs)
