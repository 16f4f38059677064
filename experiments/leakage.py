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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from scipy.stats import combine_pvalues

from experiments.fedaf.table1 import of_condensing
from fedjax_het.condensation import SyntheticData, train_from_scratch
from fedjax_het.condensation.quality import random_subset
from fedjax_het.data import Dataset, load_dataset
from fedjax_het.engine.task import Task
from fedjax_het.measures.leakage import attack, nearest, neighbours
from fedjax_het.nn import make_model
from fedjax_het.report.paper_table import Experiment, Outcome, Preset, program
from fedjax_het.report.render import Section, TextTable, number_text, p_text
from fedjax_het.report.write import publish
from fedjax_het.running.result import Result
from fedjax_het.running.splits import split_clients

SURE = 30.0  # the label logit of an image's own class, those of the others being 0
EPOCHS = 300  # of the attacker's network
PICTURED = 8
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


def preset(dataset: str, seeds: tuple[int, ...], clients: int, **condensing: Any) -> Preset:
    options = {"ipc": 10, "server_epochs": 50, **condensing}
    return Preset(
        datasets=(dataset,),
        models=("mlp",),
        alphas=(0.1,),
        seeds=seeds,
        rows=ROWS,
        settings={"num_clients": clients, "participation": 1.0},
        method_settings={
            "dynafed": {"rounds": 21, "local_epochs": 5 if dataset == "digits" else 1},
            **of_condensing(rounds=3, batch_size=256, options=options),
        },
    )


LEAKAGE = Experiment(
    name="leakage",
    paper="dynafed",
    item="table1",
    title="What made-up images give away of the clients'.",
    reported=False,
    presets={
        "quick": preset("digits", (0,), 5, steps=100, threshold=10),
        "cpu": preset("fashion_mnist", (0, 1, 2), 10, steps=300, threshold=10),
    },
)


def made_by(result: Result, num_classes: int) -> SyntheticData:
    """The made-up images of a run, of all clients, with soft labels."""
    kept = result.artifacts
    if "synthetic_images" in kept:
        images, logits = kept["synthetic_images"], kept["synthetic_label_logits"]
    else:
        images = kept["condensed_images"].astype(np.float32)
        labels = np.repeat(kept["condensed_classes"], images.shape[1])
        images = images.reshape(-1, *images.shape[2:])
        logits = SURE * np.eye(num_classes)[labels]
    return SyntheticData(jnp.asarray(images), jnp.asarray(logits, jnp.float32), jnp.float32(0.01))


def losses_of(task: Task, data: SyntheticData, images: np.ndarray, labels: np.ndarray, key):
    """[N] of a network that was trained on the data alone."""
    variables = task.model.init(key)

    def apply(params, inputs):
        return task.model.apply({**variables, "params": params}, inputs, train=True)[0]

    params = train_from_scratch(
        apply,
        variables["params"],
        data,
        key,
        epochs=EPOCHS,
        augment_strategy="none",
        loss_scaling="cross_entropy",
    )

    def loss(piece):
        image, label = piece
        inputs = task.normalise(image[None])
        logits = task.model.apply({**variables, "params": params}, inputs, train=False)[0]
        return -jax.nn.log_softmax(logits[0])[label]

    return jax.lax.map(loss, (images, labels), batch_size=500)


def leaks_of(result: Result, dataset: Dataset) -> list[dict[str, Any]]:
    """A row for each kind of data."""
    spec = result.spec
    model = make_model(spec.model, dataset.input_shape, dataset.num_classes, **spec.model_options)
    task = Task(model, dataset.mean, dataset.std)
    own = made_by(result, dataset.num_classes)
    rng = np.random.default_rng(spec.seed)
    held = np.unique(split_clients(spec, dataset).indices)
    labels = np.asarray(own.label_logits).argmax(1)
    chosen = random_subset(dataset.train_labels[held], labels, seed=spec.seed)

    def inputs(images):
        return np.asarray(task.normalise(jnp.asarray(images)))

    members, others = inputs(dataset.train_images[held]), inputs(dataset.test_images)
    # As many members as others; those that stand in for the made ones are among them.
    rest = rng.permutation(np.setdiff1d(np.arange(len(members)), chosen))
    few = np.concatenate([chosen, rest])[: len(others)]
    kinds = {
        "made": own,
        "real": own._replace(images=jnp.asarray(members[chosen])),
        "noise": own._replace(images=jnp.asarray(rng.normal(size=own.images.shape), jnp.float32)),
    }
    losses = jax.jit(partial(losses_of, task))
    key, rows = jax.random.key(spec.seed), []
    for kind, data in kinds.items():
        made = np.asarray(data.images)
        by_distance = attack(-nearest(members, made), -nearest(others, made))
        given = (
            (dataset.train_images[held], dataset.train_labels[held]),
            (dataset.test_images, dataset.test_labels),
        )
        by_loss = attack(*(-np.asarray(losses(data, *map(jnp.asarray, g), key)) for g in given))
        near = neighbours(made, members[few], others[: len(few)])
        rows.append(
            {
                "images": kind,
                "number": len(made),
                **{f"distance_{name}": value for name, value in by_distance._asdict().items()},
                **{f"loss_{name}": value for name, value in by_loss._asdict().items()},
                "nearest_share": near.share,
                "nearest_p": near.p_value,
                "nearest_member": float(np.median(near.members)),
                "nearest_other": float(np.median(near.others)),
            }
        )
    return rows


def text_table(table: pd.DataFrame, title: str) -> TextTable:
    """A section for each data set, a row for each method and kind: means over seeds."""
    sections = []
    for dataset, rows in table.groupby("dataset", sort=False):
        texts = []
        for (method, kind), own in rows.groupby(["method", "images"], sort=False):
            mean = own.mean(numeric_only=True)
            texts.append(
                {
                    "Method": method,
                    "Images": kind,
                    "Number": f"{mean['number']:.0f}",
                    "AUC by distance": number_text(mean["distance_auc"], ".3f"),
                    "Found": number_text(100 * mean["distance_found"], ".2f"),
                    "AUC by loss": number_text(mean["loss_auc"], ".3f"),
                    "Found by loss": number_text(100 * mean["loss_found"], ".2f"),
                    "Nearest is a member": number_text(100 * mean["nearest_share"], ".1f"),
                    "p": p_text(combine_pvalues(own["nearest_p"]).pvalue),
                    "Distance": number_text(mean["nearest_member"], ".3f"),
                    "To others": number_text(mean["nearest_other"], ".3f"),
                    "Seeds": str(len(own)),
                }
            )
        sections.append(Section(rows=tuple(texts), title=dataset, labels={"Data": dataset}))
    names = ("Method", "Images")
    values = tuple(name for name in texts[0] if name not in names)
    return TextTable(title, names, values, tuple(sections), (CAPTION,))


def draw(pictured: dict[str, tuple[np.ndarray, np.ndarray]]):
    """Two rows for each method: made-up images, and under each the nearest training image."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.7 * PICTURED + 2.2, 1.5 * len(pictured)), layout="constrained")
    axes = figure.subplots(2 * len(pictured), PICTURED, squeeze=False)
    for number, (method, pair) in enumerate(pictured.items()):
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


def pictures(result: Result, dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Made-up images of a run, evenly picked, and the nearest of the clients' training images."""
    made = np.asarray(made_by(result, dataset.num_classes).images)
    picked = made[np.linspace(0, len(made) - 1, PICTURED).astype(int)]
    held = np.unique(split_clients(result.spec, dataset).indices)
    real = (dataset.train_images[held] / 255 - dataset.mean) / dataset.std
    return picked, np.stack(
        [real[np.square(real - image).sum((1, 2, 3)).argmin()] for image in picked]
    )


def write(outcome: Outcome) -> list[str]:
    rows: list[dict[str, Any]] = []
    pictured: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for cell, result in outcome.made():
        spec = result.spec
        dataset = load_dataset(spec.dataset, normalisation=spec.normalisation)
        about = {"dataset": cell.dataset, "method": cell.method, "seed": spec.seed}
        rows += [{**about, **leaks} for leaks in leaks_of(result, dataset)]
        if cell.method not in pictured:
            pictured[cell.method] = pictures(result, dataset)
    if not rows:
        print("No run is there to be attacked.")
        return []
    table = pd.DataFrame(rows)
    texts = text_table(table, f"{outcome.title}.")
    figures = {"leakage.png": draw(pictured)}
    return publish(outcome.directory, "leakage", texts, table, figures)


main = program(LEAKAGE, write)

if __name__ == "__main__":
    raise SystemExit(main())
