"""DynaFed's Figure 4: synthetic images of three classes over the course of their synthesis.

python experiments/dynafed/fig4.py                  the embedded digits, a minute on 2 cores
python experiments/dynafed/fig4.py --preset cpu     Fashion-MNIST, width 32: as Table 1
python experiments/dynafed/fig4.py --preset paper   CIFAR-10: a GPU's work

Of one run of Table 1, in its folder. The paper does not say at which alpha its images are: here at
the smallest.
"""

from dataclasses import replace

import jax.numpy as jnp

from fedjax_het.analysis.figures.synthetic_images import plot_synthesis
from fedjax_het.condensation import SyntheticData
from fedjax_het.data import load_dataset
from fedjax_het.papers.dynafed.settings import EXPERIMENT, FOLDER, PRESETS
from fedjax_het.papers.table import TableRun, make_table_program

NUM_CLASSES = 3


def single_run_preset(preset):
    return replace(preset, alphas=(0.01,), seeds=(0,), rows=("dynafed",))


FIG4 = EXPERIMENT(
    name="dynafed-fig4",
    results_folder=FOLDER,
    item="fig4",
    title="DynaFed, Figure 4: synthetic images over the iterations of their synthesis.",
    has_reported_values=False,
    presets={name: single_run_preset(preset) for name, preset in PRESETS.items()},
)


def write_outputs(table_run: TableRun) -> list[str]:
    results = (result for _, result in table_run.iterate_results())
    result = next((candidate for candidate in results if "snapshots" in candidate.artifacts), None)
    if result is None:
        print("No run is there to be drawn.")
        return []
    artifacts = result.artifacts
    logits = artifacts["synthetic_label_logits"][artifacts["snapshot_samples"]]
    steps = zip(artifacts["snapshot_iterations"], artifacts["snapshots"], strict=True)
    plot_synthesis(
        {int(n): SyntheticData(images, logits, jnp.float32(0)) for n, images in steps},
        table_run.directory / "fig4.png",
        num_samples=NUM_CLASSES,
        class_names=load_dataset(result.spec.dataset).class_names,
    )
    return ["fig4.png"]


main = make_table_program(FIG4, write_outputs)
