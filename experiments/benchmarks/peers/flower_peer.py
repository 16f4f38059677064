"""Flower (`flwr[simulation]`) 1.41.0: FedAvg in its Ray simulation, PyTorch clients.

Parity: the same number of clients a round, one epoch of SGD each, weighted average, float32; one
single-threaded actor per core, its own recommendation for small clients. Deviations: Flower draws
the clients itself (all are of one size, so the work is the same); a client's images are gathered
once per round. The first round, which starts the actors, is not counted. Peak memory is of the
driver alone, without the actors.
"""

import sys
import time

import flwr
import numpy as np
import torch
from flwr.client import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from regime import Regime, print_record, read_regime
from torch_networks import make_network


def main() -> None:
    """Time the rounds of the regime."""
    regime = read_regime()
    sizes = {len(client) for client in regime.clients}
    assert len(sizes) == 1, "clients of one size: Flower draws them itself"
    ends = run(regime, rounds=1 + len(regime.cohorts))
    seconds = np.diff(ends).tolist()
    samples = [regime.samples(cohort) for cohort in regime.cohorts]
    print_record(seconds, samples, f"Flower {flwr.__version__}, PyTorch {torch.__version__}, cpu")


def run(regime: Regime, rounds: int) -> list[float]:
    """Run all rounds and return the time at the end of each."""
    participation = len(regime.cohorts[0]) / len(regime.clients)
    initial = [
        value.numpy() for value in make_network(regime.network, regime.width).state_dict().values()
    ]
    ends: list[float] = []

    class TimedFedAvg(FedAvg):
        def aggregate_fit(self, server_round, results, failures):
            assert not failures, failures
            aggregated = super().aggregate_fit(server_round, results, failures)
            ends.append(time.perf_counter())
            return aggregated

    def server(context) -> ServerAppComponents:
        strategy = TimedFedAvg(
            fraction_fit=participation,
            fraction_evaluate=0.0,
            initial_parameters=ndarrays_to_parameters(initial),
        )
        return ServerAppComponents(config=ServerConfig(num_rounds=rounds), strategy=strategy)

    settings = sys.argv[1]  # an actor starts without arguments

    def client(context):
        from flower_client import Client

        return Client(settings, int(context.node_config["partition-id"])).to_client()

    run_simulation(
        ServerApp(server_fn=server),
        ClientApp(client_fn=client),
        num_supernodes=len(regime.clients),
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": regime.threads, "include_dashboard": False},
        },
    )
    return ends


if __name__ == "__main__":
    main()
