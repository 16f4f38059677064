"""FSL's Figure 4: training examples of CIFAR-10 beside the server's of STL-10.

python experiments/fsl/fig4.py                  the embedded digits, seconds: a few clients' data
python experiments/fsl/fig4.py --preset cpu     CIFAR-10 and a few clients' data
python experiments/fsl/fig4.py --preset paper   CIFAR-10 and STL-10
"""

from fedjax_het.papers.fsl.server_examples import ServerExamplesPreset, make_examples_program

PRESETS = {
    "quick": ServerExamplesPreset("digits", "clients", {"clients": 5, "per_client": 10}),
    "cpu": ServerExamplesPreset("cifar10", "clients", {"clients": 10, "per_client": 50}),
    "paper": ServerExamplesPreset("cifar10", "stl10", {"per_class": 56}),
}
main = make_examples_program("fig4", PRESETS)
