"""The results of runs that are done: curves, traffic and a summary of each."""

import dataclasses
import functools
import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import jax
import numpy as np

from fedjax_het.common.arrays import host_values
from fedjax_het.common.environment import environment
from fedjax_het.nn.computing import used_precision
from fedjax_het.running.accounts import measured_names, traffic_curves
from fedjax_het.running.federations import holdings_of
from fedjax_het.running.held_out import held_out_accuracy
from fedjax_het.running.programs import sample_flops
from fedjax_het.running.result import Result, summarise
from fedjax_het.running.runs import Runs
from fedjax_het.running.trained import Inputs, TrainedModel, trained_model


def results_of(runs: Runs) -> list[Result]:
    """What was made, in the order of the federations."""
    return [_result(runs, i, state) for i, state in enumerate(runs.host_states())]


def result_of(runs: Runs, i: int) -> Result:
    """That of one of them, which has just ended: the others may go on, and change its state."""
    return _result(runs, i, runs.host_states()[i])


def digest_of(runs: Runs, i: int) -> str:
    """The name of a run's files, before there is a result."""
    summary = {**_data(runs, i), **environment()}
    return Result(runs.federations[i].spec, {}, summary).digest()


def models_of(runs: Runs, i: int, state: Any) -> Callable[[int | None], TrainedModel]:
    """What gives the models of a run in this state."""
    group, federation = runs.group, runs.federations[i]
    return functools.partial(
        trained_model,
        group.program.signature,
        federation.spec,
        Inputs.of(group.dataset),
        state,
        federation.hp,
    )


def _result(runs: Runs, i: int, state: Any) -> Result:
    algorithm, group, federation = runs.algorithm, runs.group, runs.federations[i]
    rounds, early = runs.rounds_of(i), runs.early.get(i)
    once = algorithm.first_traffic(holdings_of(federation, group.dataset, group.pool))
    traffic = algorithm.traffic(federation.hp, state)
    moved = traffic_curves(federation.scheduler.work, traffic, once, rounds)
    metrics = runs.curves[i] | moved
    summary = {
        "algorithm": federation.spec.algorithm,
        "dataset": group.dataset.name,
        "seed": federation.spec.seed,
        **summarise(
            runs.curves[i],
            group.dataset.domain_names,
            stopped=runs.stopped[i] is not None,
            ended=None if early is None else rounds,
        ),
        **_measured(runs, i),
        **_finite(algorithm.summary(federation.hp, state)),
        "rounds": rounds,
        **({} if early is None else {"stopped_early": early.summary()}),
        **_costs(runs, i),
        "bytes_up": float(metrics["bytes_up"].sum()),
        "bytes_down": float(metrics["bytes_down"].sum()),
        **_data(runs, i),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        **environment(),
        **({"begun_under": runs.begun_under[i]} if i in runs.begun_under else {}),
    }
    artifacts = {name: host_values(a) for name, a in algorithm.artifacts(state).items()}
    summary |= _held_out(runs, i, state, artifacts)
    if runs.pager is not None:
        state = state._replace(clients=runs.pager.states[i])
    return Result(
        federation.spec,
        metrics,
        summary,
        artifacts,
        state,
        federation.partition,
        federation.tests,
        models_of(runs, i, state),
        held_out=federation.split.held_out,
    )


def _measured(runs: Runs, i: int) -> dict[str, float | None]:
    """Of the curves of its `measures` with one value a round, the mean of the last five that were
    measured, as `final_accuracy` is of accuracies."""
    found: dict[str, float | None] = {}
    for name in measured_names(runs.group.program.measuring):
        curve = runs.curves[i][name]
        seen = curve[np.isfinite(curve)] if curve.ndim == 1 else curve[:0]
        if curve.ndim == 1:
            gone = runs.stopped[i] is not None or not len(seen)
            found[f"final_{name}"] = None if gone else float(seen[-5:].mean())
    return found


def _held_out(runs: Runs, i: int, state: Any, artifacts: dict[str, Any]) -> dict[str, Any]:
    """For the summary, the mean accuracies of clients that took no part, where there are any; each
    one's go to `artifacts`."""
    federation, get = runs.federations[i], runs.algorithm.global_model
    held_out = federation.split.held_out
    if held_out is None or get is None:
        return {}
    program, variables = runs.group.program, jax.tree.map(host_values, get(state))
    found = held_out_accuracy(
        program.signature,
        federation.spec,
        runs.group.dataset,
        held_out,
        variables,
        federation.hp,
    )
    artifacts["held_out_clients"] = held_out.clients
    artifacts["held_out_accuracy"] = found.received
    if found.tuned is not None:
        artifacts["held_out_tuned_accuracy"] = found.tuned
    return {
        f"{name}_accuracy": float(np.mean(values))
        for name, values in (("held_out", found.received), ("held_out_tuned", found.tuned))
        if values is not None and np.isfinite(values).all()
    }


def _finite(summary: Any) -> Any:
    """The same, with None for numbers that are not finite, which a file cannot hold."""
    if isinstance(summary, dict):
        return {name: _finite(value) for name, value in summary.items()}
    return None if isinstance(summary, float) and not math.isfinite(summary) else summary


def _costs(runs: Runs, i: int) -> dict[str, Any]:
    """Where and how fast a run was made: its share of what those in step took together."""
    spent, group, width = runs.spent, runs.group, runs.plan.width
    made_together, on_device = len(runs.federations), i // width * width
    neighbours = runs.federations[on_device : on_device + width]
    seconds = group.lane_choice.seconds
    return {
        "client_samples_per_second": spent.samples_per_second,
        "useful_work_fraction": group.useful_fraction(neighbours),
        "sample_flops": sample_flops(group.program.signature),
        "compile_seconds": spent.compiling,
        "round_seconds": spent.rounds / made_together,
        "server_seconds": spent.host_work / made_together,
        "wall_seconds": spent.wall(made_together),
        "made_together": made_together,
        "lanes": runs.plan.describe(),
        "lane_probe_seconds_per_step": {str(lanes): taken for lanes, taken in seconds.items()},
        "client_state": group.client_state,
        "precision": _precision(runs),
        "conv_impl": group.lane_choice.conv_impl,
        "unfused": group.program.chunk.unfused,
    }


def _precision(runs: Runs) -> str:
    """In what the run's networks were computed."""
    asked = environment()["matmul_precision"]
    assert runs.plan.mesh is not None
    (platform,) = {device.platform for device in runs.plan.mesh.devices.flat}
    precision = runs.group.program.signature.precision
    return used_precision(precision, None if asked == "default" else asked, platform)


def _data(runs: Runs, i: int) -> dict[str, Any]:
    """What a run learned from, in numbers."""
    group, federation = runs.group, runs.federations[i]
    server = group.server_summary(federation)
    return {
        "dataset_digest": group.dataset.digest(),
        "partition_digest": federation.partition.digest(),
        "split": dataclasses.asdict(group.split(federation)),
        "server": None if server is None else dataclasses.asdict(server),
        "dataset_note": group.dataset.note,
        **group.program.own_digests(federation.spec.hp),
        **federation.split.own,
        **({} if federation.initial is None else {"initial_digest": federation.initial.digest}),
    }
