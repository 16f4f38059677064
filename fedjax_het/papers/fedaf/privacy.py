"""Accuracy against epsilon: FedDM and FedAF with differential privacy for every example.

python experiments/fedaf/privacy.py                  the embedded digits, minutes on 2 cores
python experiments/fedaf/privacy.py --preset cpu     Fashion-MNIST, MLP: an hour

Not a table of the papers, which give no values of it. The same runs without privacy, and with more
and more noise; epsilon at delta 1e-5 is of one example of a client, over all rounds. Steps read a
class whole, and are few: noise falls with the examples that a mean is of, and epsilon grows with
the steps. The control (`image_lr=0`) sends the noise that images begin as, which spends nothing.
`privacy.png` draws what `privacy.md` lists.
"""

from fedjax_het.analysis.figures.privacy_accuracy import plot_privacy
from fedjax_het.papers.fedaf.table1 import ALPHAS, condensing_method_settings
from fedjax_het.papers.table import Preset, TableDeclaration, make_figure_writer, make_table_program

NOISE_MULTIPLIERS = (2, 4, 8, 12, 24, 48)
METHODS = ("feddm", "fedaf")
GROUPING = ("dataset", "algorithm", "options.private", "hp.dp_noise", "hp.image_lr")


def make_rows() -> tuple[str, ...]:
    return tuple(
        row
        for method in METHODS
        for row in (
            f"{method}(init='noise')",
            f"{method}(init='noise', image_lr=0, steps=1)",
            *(f"{method}(init='noise', private=True, dp_noise={n})" for n in NOISE_MULTIPLIERS),
        )
    )


def make_preset(dataset: str, seeds: tuple[int, ...], **condensation_options: int) -> Preset:
    return Preset(
        datasets=(dataset,),
        models=("mlp",),
        alphas=ALPHAS[-1:] if dataset == "fashion_mnist" else (1.0,),
        seeds=seeds,
        rows=make_rows(),
        settings={"num_clients": 10 if dataset == "fashion_mnist" else 5, "rounds": 5},
        method_settings=condensing_method_settings(
            batch_size=2048,
            options={"ipc": 10, "server_epochs": 100, **condensation_options},
            hp={"image_lr": 5.0, "server_lr": 0.01},
        ),
    )


PRIVACY = TableDeclaration(
    name="fedaf-privacy",
    paper="fedaf",
    item="table1",
    title="FedDM and FedAF with differential privacy.",
    has_reported_values=False,
    presets={
        "quick": make_preset("digits", (0,), steps=20, threshold=20),
        "cpu": make_preset("fashion_mnist", (0, 1), steps=20, threshold=100),
    },
)

main = make_table_program(
    PRIVACY, make_figure_writer("privacy", plot_privacy, by=GROUPING, metric="best_accuracy")
)

if __name__ == "__main__":
    raise SystemExit(main())
