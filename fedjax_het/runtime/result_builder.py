"""Results of finished runs: metrics, traffic and a summary of each run."""

import dataclasses
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import jax
import numpy as np

from fedjax_het.core.run_mapping import describe_plan
from fedjax_het.metrics.convergence import rise_time, rolling_mean, rounds_to_reach
from fedjax_het.metrics.personal import best_mean_accuracy, worst_decile
from fedjax_het.nn.precision import describe_precision
from fedjax_het.runtime.device_report import describe_environment
from fedjax_het.runtime.group_state import GroupState
from fedjax_het.runtime.held_out_eval import evaluate_held_out_clients
from fedjax_het.runtime.history import (
    HONEST_MEAN,
    VALIDATION_MEAN,
    Curves,
    build_traffic_curves,
    list_curve_names,
    list_metric_names,
)
from fedjax_het.runtime.identity import collect_function_digests, compute_class_names_digest
from fedjax_het.runtime.privacy_budget import build_privacy_curves, summarize_privacy
from fedjax_het.runtime.result_display import get_accuracy_name, to_json_value
from fedjax_het.runtime.results import (
    ACCURACIES,
    CLIENT_ACCURACIES,
    RISE_METRICS,
    Result,
)
from fedjax_het.runtime.signature import flops_per_sample
from fedjax_het.runtime.trained_model import InputSpec, TrainedModel, extract_model
from fedjax_het.utils.arrays import fetch_to_host
from fedjax_het.utils.errors import require


def build_results(group_state: GroupState, indices: Sequence[int]) -> dict[int, Result]:
    """Return the results of runs that ended, while other runs may continue.

    Args:
      group_state: the state of the runs.
      indices: indices of the runs.

    Returns:
      Their results by index.
    """
    states = group_state.fetch_states()
    return {i: _build_result(group_state, i, states[i]) for i in indices}


def compute_result_digest(group_state: GroupState, i: int) -> str:
    """Return the digest of a run's result before there is a result.

    Args:
      group_state: the state of the runs.
      i: index of the run.

    Returns:
      `Result.digest()` of the later result.
    """
    summary = {**_summarize_data(group_state, i), **describe_environment()}
    return Result(group_state.prepared_runs[i].spec, {}, summary).digest()


def build_model_getter(group_state: GroupState, i: int, state: Any) -> Callable[..., TrainedModel]:
    """Return a function of a client's id, or None, that returns a trained model.

    The function refuses a `network` and an `optimizer`, which only states in files need.

    Args:
      group_state: the state of the runs.
      i: index of the run.
      state: state of the run on the host.

    Returns:
      The function, for `Result.models`.
    """
    run, signature = group_state.prepared_runs[i], group_state.group.program.signature
    arguments = (signature, run.spec, InputSpec.from_dataset(run.dataset), state, run.hp)

    def get_model(client: int | None = None, **user_objects: Any) -> TrainedModel:
        for name, value in user_objects.items():
            require(value is None, name, value, "None: the result contains it")
        return extract_model(*arguments, client)

    return get_model


def _summarize_simulated_time(traffic: Curves) -> dict[str, float]:
    """Return the simulated seconds of a run; empty without simulated time."""
    name = "simulated_seconds"
    return {name: float(traffic[name].sum())} if name in traffic else {}


def _build_result(group_state: GroupState, i: int, state: Any) -> Result:
    run, curves = group_state.prepared_runs[i], group_state.curves[i]
    algorithm, early_stop = group_state.group.program.algorithm, group_state.early_stops.get(i)
    rounds = group_state.count_rounds_completed(i)
    traffic = build_traffic_curves(
        run.scheduler.work_counts,
        algorithm.traffic(run.hp, state),
        algorithm.initial_traffic(run.federation_data),
        rounds,
    )
    privacy = build_privacy_curves(run.spec, run.scheduler, rounds)
    measures = group_state.get_split_measures(i)
    has_diverged = group_state.diverged_rounds[i] is not None
    last_round = None if early_stop is None else rounds
    summary = {
        "algorithm": run.spec.algorithm,
        "dataset": run.dataset.name,
        "seed": run.spec.seed,
        **summarize_metrics(
            curves,
            run.dataset.domain_names,
            list_curve_names(run.partition),
            has_diverged=has_diverged,
            last_round=last_round,
        ),
        **_summarize_requested_metrics(group_state, i),
        **to_json_value(algorithm.summary(run.hp, state)),
        "rounds": rounds,
        "stopped_early": None if early_stop is None else early_stop.to_summary(),
        **_summarize_costs(group_state, i),
        "bytes_up": float(traffic["bytes_up"].sum()),
        "bytes_down": float(traffic["bytes_down"].sum()),
        **_summarize_simulated_time(traffic),
        **summarize_privacy(run.spec, privacy, rounds),
        **_summarize_data(group_state, i),
        "split": measures.to_summary(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        **describe_environment(),
        **({"begun_under": group_state.begun_under[i]} if i in group_state.begun_under else {}),
    }
    artifacts = {name: fetch_to_host(array) for name, array in algorithm.artifacts(state).items()}
    if measures.values:
        artifacts |= {f"split_{name}": array for name, array in measures.client_values.items()}
    if run.held_out is not None and algorithm.global_model is not None:
        accuracies = evaluate_held_out_clients(
            group_state.group.program.signature,
            run.spec,
            run.client_dataset,
            run.held_out,
            jax.tree.map(fetch_to_host, algorithm.get_result_model(state)),
            run.hp,
        )
        artifacts |= {"held_out_clients": run.held_out.clients, **accuracies}
        is_complete = {name: np.isfinite(values).all() for name, values in accuracies.items()}
        summary |= {name: float(v.mean()) for name, v in accuracies.items() if is_complete[name]}
    if group_state.pager is not None:
        state = state._replace(clients=group_state.pager.states[i])
    models = build_model_getter(group_state, i, state)
    partitions = (run.partition, run.client_tests)
    metrics = curves | traffic | privacy
    return Result(
        *(run.spec, metrics, summary, artifacts, state, *partitions, models),
        held_out=run.held_out,
        validation=run.validation,
    )


def _summarize_requested_metrics(group_state: GroupState, i: int) -> dict[str, float | None]:
    """Return the mean of the last five values of metrics of the settings, and of attacks."""
    summary: dict[str, float | None] = {}
    names = list_metric_names(group_state.group.program.signature.evaluation)
    for name in [*names, HONEST_MEAN]:
        curve = group_state.curves[i].get(name)
        if curve is not None and curve.ndim == 1:
            values = curve[np.isfinite(curve)]
            is_undefined = group_state.diverged_rounds[i] is not None or not len(values)
            summary[f"final_{name}"] = None if is_undefined else float(values[-5:].mean())
    return summary


def _summarize_costs(group_state: GroupState, i: int) -> dict[str, Any]:
    """Return devices and time of a run: an equal share of the time of all runs in lockstep."""
    timing, group, num_runs = group_state.timing, group_state.group, len(group_state.prepared_runs)
    plan, precision = group.program.plan, describe_environment()["matmul_precision"]
    first_on_device = i // plan.num_parallel * plan.num_parallel
    device_runs = group_state.prepared_runs[first_on_device : first_on_device + plan.num_parallel]
    return {
        "client_samples_per_second": timing.samples_per_second if timing.timed_rounds else None,
        "useful_work_fraction": group.useful_work_fraction(device_runs),
        "sample_flops": flops_per_sample(group.program.signature),
        "compile_seconds": timing.compile_seconds / num_runs,
        "round_seconds": timing.round_seconds / num_runs,
        "server_seconds": timing.server_seconds / num_runs,
        "wall_seconds": timing.compute_wall_seconds(num_runs),
        "made_together": num_runs,
        "lanes": describe_plan(plan),
        "lane_probe_seconds_per_step": {str(k): v for k, v in group.lane_choice.seconds.items()},
        "client_state": group.client_state,
        "precision": describe_precision(
            group_state.prepared_runs[0].spec.precision,
            None if precision == "default" else precision,
            plan.platform,
        ),
        "conv_impl": group.lane_choice.conv_impl,
        "unfused": group.program.chunk.is_unfused,
    }


def _summarize_data(group_state: GroupState, i: int) -> dict[str, Any]:
    group, run = group_state.group, group_state.prepared_runs[i]
    server, initial = run.summarize_server_data(), group.initial_model
    dataset, splits = run.dataset, {}
    if (tests := run.client_tests) is not None:
        summary = tests.summarize(dataset.test_classes, dataset.num_classes)
        splits["client_test_split"] = dataclasses.asdict(summary)
    if (validation := run.validation) is not None:
        withholds_none = (validation.sizes == 0) & (run.partition.sizes > 0)
        splits["validation_split"] = {
            "num_examples": len(validation.indices),
            "num_clients_without": int(withholds_none.sum()),
        }
    class_names_digest = compute_class_names_digest(run.spec, run.dataset)
    functions = collect_function_digests(run.spec)
    return {
        "dataset_digest": run.dataset.digest(),
        "partition_digest": run.partition.digest(),
        **splits,
        "server": None if server is None else dataclasses.asdict(server),
        "dataset_note": run.dataset.note,
        "dataset_source": run.dataset.source,
        "task": run.dataset.task,
        "dataset_order": run.dataset.order,
        **group.program.signature.compute_user_digests(run.spec),
        **run.user_digests,
        **({"class_names_digest": class_names_digest} if class_names_digest else {}),
        **({"functions": functions} if functions else {}),
        **({} if initial is None else {"initial_digest": initial.variables_digest}),
    }


def summarize_metrics(
    metrics: dict[str, np.ndarray],
    domain_names: Sequence[str] = (),
    client_names: Sequence[str] = (),
    *,
    has_diverged: bool = False,
    last_round: int | None = None,
) -> dict[str, Any]:
    """Return the numbers that represent the metrics of a run.

    All numbers of the global model are None for a method without one. Means are None if the run
    diverged. If a run ended early, the last five rounds are the last five measured rounds.

    * `final_accuracy`, `final_accuracy_std`: mean and standard deviation over the last five rounds
      (DynaFed's metric); `best_accuracy`, `last_accuracy`.
    * With validation examples, the best round is the first one with the highest validation accuracy
      instead of the highest test accuracy. `best_accuracy` is the test accuracy in that round,
      `best_validation_accuracy` its validation accuracy, and `best_round` its number. The values of
      domains are of `best_round`, and values of clients are of the round with the highest mean of
      clients' validation accuracies, `best_client_validation_accuracy`.
    * `window_accuracy`: last value of the running mean over 20 measured rounds; `rise_time`: first
      round at which that mean reaches 90 % of it; `rounds_to_half`: first round at which it reaches
      0.5, or None (FSL, section IV-A).
    * `diverged`: whether the run diverged, or its last round has no finite accuracy.
    * With domains: `best_domains_accuracy`, the highest unweighted mean over domains (FedAF,
      Table 2), its round `best_domain_round`, and `accuracy_<domain>` in that round.
    * With clients' own tests: `bmta`, the highest unweighted mean over clients (FedAMP, section 7),
      and its round `bmta_round`. `bmta_worst_decile` is the mean over the worst tenth of the
      clients in that round. Named clients have `client_accuracy_<name>` in that round.
      `final_client_accuracy` is the mean over clients and the last five rounds.

    Args:
      metrics: metrics of the run, `[rounds]` or more.
      domain_names: names of the domains of the data set.
      client_names: names of the clients, if they have names.
      has_diverged: whether the run ended because it diverged.
      last_round: the round after which the run was ended early, from 1.

    Returns:
      Numbers by name; rounds count from 1.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.runtime.result_builder import summarize_metrics
      >>> curves = {"test_accuracy": np.array([0.5, 0.7]), "train_loss": np.array([1.0, 0.5])}
      >>> round(summarize_metrics(curves)["final_accuracy"], 2)
      0.6
    """
    accuracy, main_accuracy = metrics["test_accuracy"], metrics[get_accuracy_name(metrics)]
    # A training loss of NaN is of a round without training: `has_diverged` has the other losses.
    diverged = has_diverged or (last_round is None and not np.isfinite(main_accuracy[-1]))
    last_values = _select_last_values(accuracy, last_round)
    summary: dict[str, Any] = dict.fromkeys((*ACCURACIES, *RISE_METRICS))
    best = _find_best_round(accuracy, metrics.get("validation_accuracy"))
    if best is not None:
        summary["best_accuracy"] = float(accuracy[best])
    if "validation_accuracy" in metrics:
        validation = None if best is None else float(metrics["validation_accuracy"][best])
        summary["best_validation_accuracy"] = validation
        summary["best_round"] = None if best is None else best + 1
    if len(last_values) and not diverged:
        means = rolling_mean(accuracy)
        summary |= {
            "final_accuracy": float(last_values.mean()),
            "final_accuracy_std": float(last_values.std()),
            "last_accuracy": float(last_values[-1]),
            "window_accuracy": float(means[np.isfinite(means)][-1]),
            "rise_time": rise_time(accuracy),
            "rounds_to_half": rounds_to_reach(accuracy, 0.5),
        }
    return {
        **summary,
        "diverged": bool(diverged),
        **_summarize_domains(metrics, domain_names),
        **_summarize_clients(metrics, client_names, diverged, last_round),
    }


def _find_best_round(curve: np.ndarray, validation: np.ndarray | None) -> int | None:
    """Return the first round, from 0, with the highest validation accuracy, or value of the curve.

    Return None if nothing was measured.
    """
    scores = curve if validation is None else validation
    scores = np.where(np.isfinite(curve) & np.isfinite(scores), scores, -np.inf)
    return int(scores.argmax()) if np.isfinite(scores).any() else None


def _select_last_values(curve: np.ndarray, last_round: int | None) -> np.ndarray:
    """Return the values of the last five rounds; if a run was ended early, the last five values."""
    if last_round is not None:
        curve = curve[np.isfinite(curve)]
    return curve[-5:][np.isfinite(curve[-5:])]


def _summarize_clients(
    metrics: dict[str, np.ndarray],
    client_names: Sequence[str],
    diverged: bool,
    last_round: int | None,
) -> dict[str, Any]:
    if "client_accuracy" not in metrics:
        return {}
    names = [f"client_accuracy_{name}" for name in client_names]
    summary: dict[str, Any] = dict.fromkeys((*CLIENT_ACCURACIES, *names))
    mean = metrics["mean_client_accuracy"]
    validation = metrics.get(VALIDATION_MEAN)
    if validation is not None:
        summary["best_client_validation_accuracy"] = None
    best = _find_best_round(mean, validation)
    if best is not None:
        # Only rounds count in which all clients with a test were measured, see `build_curves`.
        is_candidate = np.isfinite(mean)
        if validation is not None:
            is_candidate = np.arange(len(mean)) == best
            summary["best_client_validation_accuracy"] = float(validation[best])
        accuracy = np.where(is_candidate[:, None], metrics["client_accuracy"], np.nan)
        summary["bmta"], summary["bmta_round"] = best_mean_accuracy(accuracy)
        best = summary["bmta_round"] - 1
        summary["bmta_worst_decile"] = worst_decile(metrics["client_accuracy"][best])
        last_values = _select_last_values(mean, last_round)
        if len(last_values) and not diverged:
            summary["final_client_accuracy"] = float(last_values.mean())
        summary |= {name: float(metrics[name][best]) for name in names}
    return summary


def _summarize_domains(
    metrics: dict[str, np.ndarray], domain_names: Sequence[str]
) -> dict[str, Any]:
    if not domain_names:
        return {}
    mean = metrics["test_accuracy_domains"]
    curves = {f"accuracy_{name}": metrics[f"test_accuracy_{name}"] for name in domain_names}
    curves = {"best_domains_accuracy": mean, **curves}
    best = _find_best_round(mean, metrics.get("validation_accuracy"))
    if best is None:
        return dict.fromkeys(("best_domain_round", *curves))
    values = {name: float(curve[best]) for name, curve in curves.items()}
    return {"best_domain_round": best + 1, **values}
