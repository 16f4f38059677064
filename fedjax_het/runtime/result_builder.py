"""Results of finished runs: curves, traffic and a summary of each."""

import dataclasses
import functools
import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import jax
import numpy as np

from fedjax_het.nn.precision import describe_precision
from fedjax_het.runtime.compiled_programs import flops_per_sample
from fedjax_het.runtime.group_state import GroupState
from fedjax_het.runtime.held_out_eval import evaluate_held_out_clients
from fedjax_het.runtime.history import build_traffic_curves, list_metric_names
from fedjax_het.runtime.provenance import describe_environment
from fedjax_het.runtime.results import Result, summarize_metrics
from fedjax_het.runtime.trained_model import InputSpec, TrainedModel, extract_model
from fedjax_het.utils.arrays import fetch_to_host
from fedjax_het.utils.errors import require


def build_results(group_state: GroupState) -> list[Result]:
    """Return the results of all runs, in their order."""
    return [
        _build_result(group_state, i, state) for i, state in enumerate(group_state.fetch_states())
    ]


def build_result(group_state: GroupState, i: int) -> Result:
    """Return the result of one run, which has just ended while others go on."""
    return _build_result(group_state, i, group_state.fetch_states()[i])


def compute_result_digest(group_state: GroupState, i: int) -> str:
    """Return the name of a run's files before its result exists."""
    summary = {**_summarize_data(group_state, i), **describe_environment()}
    return Result(group_state.prepared_runs[i].spec, {}, summary).digest()


def build_model_getter(group_state: GroupState, i: int, state: Any) -> Callable[..., TrainedModel]:
    """Return a function of a client's id, or None, to a trained model of a run in this state.

    The function refuses a `network` and an `optimizer`, which only states in files need.
    """
    group, prepared_run = group_state.group, group_state.prepared_runs[i]
    arguments = {
        "signature": group.program.signature,
        "spec": prepared_run.spec,
        "input_spec": InputSpec.from_dataset(prepared_run.dataset),
        "state": state,
        "hp": prepared_run.hp,
    }
    return functools.partial(_get_model, arguments)


def _get_model(
    arguments: dict[str, Any], client: int | None = None, **user_objects: Any
) -> TrainedModel:
    """Return a model of a run that `arguments` of `extract_model` describe."""
    for name, value in user_objects.items():
        require(value is None, name, value, "none: the run has its own")
    return extract_model(**arguments, client=client)


def _build_result(group_state: GroupState, i: int, state: Any) -> Result:
    algorithm, prepared_run = group_state.group.program.algorithm, group_state.prepared_runs[i]
    rounds, early_stop = group_state.count_rounds_completed(i), group_state.early_stops.get(i)
    initial_traffic = algorithm.initial_traffic(prepared_run.federation_data)
    traffic = algorithm.traffic(prepared_run.hp, state)
    traffic_by_round = build_traffic_curves(
        prepared_run.scheduler.work_counts, traffic, initial_traffic, rounds
    )
    metrics = group_state.curves[i] | traffic_by_round
    summary = {
        "algorithm": prepared_run.spec.algorithm,
        "dataset": prepared_run.dataset.name,
        "seed": prepared_run.spec.seed,
        **summarize_metrics(
            group_state.curves[i],
            prepared_run.dataset.domain_names,
            has_diverged=group_state.diverged_rounds[i] is not None,
            last_round=None if early_stop is None else rounds,
        ),
        **_summarize_requested_metrics(group_state, i),
        **_replace_nonfinite(algorithm.summary(prepared_run.hp, state)),
        "rounds": rounds,
        **({} if early_stop is None else {"stopped_early": early_stop.to_summary()}),
        **_summarize_costs(group_state, i),
        "bytes_up": float(metrics["bytes_up"].sum()),
        "bytes_down": float(metrics["bytes_down"].sum()),
        **_summarize_data(group_state, i),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        **describe_environment(),
        **({"begun_under": group_state.begun_under[i]} if i in group_state.begun_under else {}),
    }
    artifacts = {name: fetch_to_host(a) for name, a in algorithm.artifacts(state).items()}
    summary |= _evaluate_held_out_clients(group_state, i, state, artifacts)
    if group_state.pager is not None:
        state = state._replace(clients=group_state.pager.states[i])
    return Result(
        prepared_run.spec,
        metrics,
        summary,
        artifacts,
        state,
        prepared_run.partition,
        prepared_run.client_tests,
        build_model_getter(group_state, i, state),
        held_out=prepared_run.held_out,
    )


def _summarize_requested_metrics(group_state: GroupState, i: int) -> dict[str, float | None]:
    """Of the curves of its `measures` with one value a round, the mean of the last five that were
    measured, as `final_accuracy` is of accuracies."""
    summary: dict[str, float | None] = {}
    for name in list_metric_names(group_state.group.program.signature.evaluation):
        curve = group_state.curves[i][name]
        finite_values = curve[np.isfinite(curve)] if curve.ndim == 1 else curve[:0]
        if curve.ndim == 1:
            is_undefined = group_state.diverged_rounds[i] is not None or not len(finite_values)
            summary[f"final_{name}"] = None if is_undefined else float(finite_values[-5:].mean())
    return summary


def _evaluate_held_out_clients(
    group_state: GroupState, i: int, state: Any, artifacts: dict[str, Any]
) -> dict[str, Any]:
    """For the summary, the mean accuracies of clients that took no part, where there are any; each
    one's go to `artifacts`."""
    prepared_run, get_global_model = (
        group_state.prepared_runs[i],
        group_state.group.program.algorithm.global_model,
    )
    held_out = prepared_run.held_out
    if held_out is None or get_global_model is None:
        return {}
    program, variables = (
        group_state.group.program,
        jax.tree.map(fetch_to_host, get_global_model(state)),
    )
    accuracy = evaluate_held_out_clients(
        program.signature,
        prepared_run.spec,
        prepared_run.dataset,
        held_out,
        variables,
        prepared_run.hp,
    )
    artifacts["held_out_clients"] = held_out.clients
    artifacts["held_out_accuracy"] = accuracy.global_model
    if accuracy.tuned_model is not None:
        artifacts["held_out_tuned_accuracy"] = accuracy.tuned_model
    return {
        f"{name}_accuracy": float(np.mean(values))
        for name, values in (
            ("held_out", accuracy.global_model),
            ("held_out_tuned", accuracy.tuned_model),
        )
        if values is not None and np.isfinite(values).all()
    }


def _replace_nonfinite(summary: Any) -> Any:
    """Replace numbers that are not finite, which a file cannot hold, by None."""
    if isinstance(summary, dict):
        return {name: _replace_nonfinite(value) for name, value in summary.items()}
    return None if isinstance(summary, float) and not math.isfinite(summary) else summary


def _summarize_costs(group_state: GroupState, i: int) -> dict[str, Any]:
    """Summarize devices and time of a run: its share of the time of all runs in step."""
    timing, group, num_parallel = (
        group_state.timing,
        group_state.group,
        group_state.group.program.plan.num_parallel,
    )
    num_runs, first_on_device = len(group_state.prepared_runs), i // num_parallel * num_parallel
    device_runs = group_state.prepared_runs[first_on_device : first_on_device + num_parallel]
    seconds = group.lane_choice.seconds
    return {
        "client_samples_per_second": timing.samples_per_second,
        "useful_work_fraction": group.useful_work_fraction(device_runs),
        "sample_flops": flops_per_sample(group.program.signature),
        "compile_seconds": timing.compile_seconds,
        "round_seconds": timing.round_seconds / num_runs,
        "server_seconds": timing.server_seconds / num_runs,
        "wall_seconds": timing.compute_wall_seconds(num_runs),
        "made_together": num_runs,
        "lanes": group_state.group.program.plan.describe(),
        "lane_probe_seconds_per_step": {
            str(lanes): step_seconds for lanes, step_seconds in seconds.items()
        },
        "client_state": group.client_state,
        "precision": _get_precision(group_state),
        "conv_impl": group.lane_choice.conv_impl,
        "unfused": group.program.chunk.is_unfused,
    }


def _get_precision(group_state: GroupState) -> str:
    """Return the precision of the run's networks in words."""
    requested = describe_environment()["matmul_precision"]
    platform = group_state.group.program.plan.platform
    precision = group_state.prepared_runs[0].spec.precision
    return describe_precision(precision, None if requested == "default" else requested, platform)


def _summarize_data(group_state: GroupState, i: int) -> dict[str, Any]:
    """Summarize the data of a run."""
    group, prepared_run = group_state.group, group_state.prepared_runs[i]
    server = prepared_run.summarize_server_data()
    return {
        "dataset_digest": prepared_run.dataset.digest(),
        "partition_digest": prepared_run.partition.digest(),
        "split": dataclasses.asdict(prepared_run.summarize_partition()),
        "server": None if server is None else dataclasses.asdict(server),
        "dataset_note": prepared_run.dataset.note,
        **group.program.signature.compute_user_digests(prepared_run.spec),
        **prepared_run.user_digests,
        **({} if group.initial_model is None else {"initial_digest": group.initial_model.digest}),
    }
