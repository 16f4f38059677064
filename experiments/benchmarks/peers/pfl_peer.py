"""pfl-research 0.6.0: `FederatedAveraging` on its simulated backend, PyTorch, one process.

Parity: the same clients in the same rounds, one epoch of SGD each, weighted average (by datapoints,
central SGD with learning rate 1), float32; one thread per core, or a GPU. Deviations: pfl does
not reshuffle a client's samples, so it slices tensors where the others gather each round; it starts
at iteration 1, since iteration 0 evaluates. The first round it runs is not counted.
"""

import time

import pfl
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from regime import Regime, print_record, read_regime
from torch_networks import make_network, set_up_torch, to_tensors


class Timer(TrainingProcessCallback):
    """Callback that stores the time at the end of each round."""

    def __init__(self):
        self.ends = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Store the time."""
        self.ends.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    """Time the rounds of the regime."""
    regime = read_regime()
    device, _, torch_version = set_up_torch(regime.threads)
    version = f"pfl {pfl.__version__}, {torch_version}"
    timer, untimed = Timer(), regime.cohorts[:1]
    run(regime, [*untimed, *regime.cohorts], device, timer)
    seconds = [end - start for start, end in zip(timer.ends, timer.ends[1:], strict=False)]
    print_record(seconds, [regime.samples(cohort) for cohort in regime.cohorts], version)


def run(regime: Regime, cohorts: list, device: str, timer: Timer) -> None:
    """Run all rounds with `timer` as callback."""
    images, labels = to_tensors(regime.images, regime.labels, device)
    network = make_network(regime.network, regime.width)

    def loss(x, y, eval=False):
        return torch.nn.functional.cross_entropy(network(x), y)

    network.loss, network.metrics = loss, lambda *data, **settings: {}
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    data = [
        PyTorchTensorDataset((images[positions], labels[positions]), user_id=str(client))
        for client, positions in enumerate(map(torch.tensor, regime.clients))
    ]
    client_order = iter([client for cohort in cohorts for client in cohort])
    dataset = FederatedDataset(data.__getitem__, lambda: next(client_order))
    backend = SimulatedBackend(dataset, dataset, postprocessors=[WeightByDatapoints()])
    algorithm = FederatedAveraging()
    algorithm._current_central_iteration = 1
    algorithm.run(
        NNAlgorithmParams(
            central_num_iterations=1 + len(cohorts),
            evaluation_frequency=10**6,
            train_cohort_size=len(cohorts[0]),
            val_cohort_size=0,
        ),
        backend,
        model,
        NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=regime.local_lr,
            local_batch_size=regime.batch_size,
        ),
        callbacks=[timer],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
