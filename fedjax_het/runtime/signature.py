"""The static choices of runs: runs with equal choices share their compiled programs."""

import functools
import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from fedjax_het.aggregation import AGGREGATION_SETTING
from fedjax_het.algorithms import get_algorithm_spec
from fedjax_het.attacks import ATTACK_SETTING, Backdoor, UpdateAttack
from fedjax_het.compression import parse_compression
from fedjax_het.config.kind_settings import list_skews
from fedjax_het.config.resolve import USER_PROVIDED, optional_hyperparameters
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.lr_schedules import is_round_schedule_hyperparameter
from fedjax_het.core.memory import MAX_CACHED_PROGRAMS
from fedjax_het.core.optimizers import (
    OPTIMIZERS,
    LocalTrainingOptions,
    compute_optimizer_digest,
    make_user_transformation,
)
from fedjax_het.core.round_inputs import EvaluationOptions
from fedjax_het.core.task import Task
from fedjax_het.data import Dataset
from fedjax_het.metrics.registry import parse_metrics
from fedjax_het.nn import NETWORKS, Model, compute_network_digest, make_model, to_model
from fedjax_het.nn.conv_products import AUTO
from fedjax_het.nn.flops import count_training_flops
from fedjax_het.nn.model import USER_NETWORK
from fedjax_het.nn.precision import configure_compute
from fedjax_het.privacy import get_privacy_mechanism
from fedjax_het.skews import FeatureSkew, LabelSkew
from fedjax_het.systems import SYSTEM_SETTING, AdaptiveSelection, compute_expected_cohort_size
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.errors import require
from fedjax_het.utils.input_kinds import InputShape, NumTokens

log = logging.getLogger("fedjax_het")

# Settings in which runs that share their programs may differ: they decide the host's draws or its
# stopping rule, or are traced.
PER_RUN_SETTINGS = (
    "seed",
    "partition_seed",
    "partition",
    "partition_options",
    "alpha",
    "classes",
    "averaging",
    "lr_schedule",
    "skew",
    "system",
    "target_accuracy",
    "patience",
    "min_delta",
    "hp",
)


def compute_static_key(spec: RunSpec) -> str:
    """Return a key that is equal for runs that the same programs can execute, in lockstep."""
    key = repr(sorted((k, v) for k, v in spec.to_dict().items() if k not in PER_RUN_SETTINGS))
    names = [] if spec.lr_schedule is None else ["lr_schedule"]
    names += _list_static_skews(spec)
    names += ["adaptive_selection"] if _has_adaptive_selection(spec) else []
    names += _traced_optional_hyperparameters(spec)
    return f"{key} {names}" if names else key


def _has_adaptive_selection(spec: RunSpec) -> bool:
    """Return whether clients are selected by losses."""
    return any(isinstance(m, AdaptiveSelection) for m in SYSTEM_SETTING.parse(spec.system))


def _list_static_skews(spec: RunSpec) -> list[str]:
    """Return the skews on which the compiled programs depend, with their static values."""
    skews = list_skews(spec)
    names = [f"{s.name}{s.get_static()}" for s in skews if isinstance(s, FeatureSkew)]
    labels = [s.name for s in skews if isinstance(s, LabelSkew)]
    return names + labels


def _traced_optional_hyperparameters(spec: RunSpec) -> list[str]:
    """Return the optional hyperparameters of local training that the run sets and reads."""
    names = set(optional_hyperparameters(spec)) & spec.hyperparameters.keys()
    return sorted(name for name in names if not is_round_schedule_hyperparameter(name))


class ById(NamedTuple):
    """A function that makes a network or an optimizer; equal only to itself."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Signature(NamedTuple):
    """Every static choice of a run; equal signatures share their compiled programs.

    Attributes:
      algorithm: name of the method.
      options: the method's options by name, in alphabetical order.
      implementations: the functions for which the names of the method, of its base and of the
        optimizer stand at present.
      network: the network of the settings.
      training: how clients train, and the network as the method adapts it.
      evaluation: measurements in addition to the test set.
      has_server_data: whether the server has examples.
      pretrain_epochs: epochs of the server's training before the first round.
      has_lr_schedule: whether the local learning rate has a schedule over rounds.
      has_skew: whether the run has label skews or feature skews.
    """

    algorithm: str
    options: tuple
    implementations: tuple
    network: Model
    training: LocalTraining
    evaluation: EvaluationOptions
    has_server_data: bool
    pretrain_epochs: int
    has_lr_schedule: bool
    has_skew: bool = False

    def compute_user_digests(self, spec: ResolvedRunSpec) -> dict[str, str]:
        """Return the digests of a user's network and optimizer, for the record of a run."""
        digests = {}
        if spec.model == USER_PROVIDED:
            digests["network_digest"] = compute_network_digest(self.network)
        if spec.local_optimizer == USER_PROVIDED:
            optimizer = self.training.options.user_optimizer
            digests["optimizer_digest"] = compute_optimizer_digest(optimizer, spec.hyperparameters)
        return digests


def build_signature(
    spec: ResolvedRunSpec,
    dataset: Dataset,
    network: Any = None,
    optimizer: Any = None,
    *,
    conv_impl: str = AUTO,
) -> Signature:
    """Return the static choices of a run.

    Args:
      spec: the settings.
      dataset: the data set, or a record with its name, shape, classes and normalization.
      network: the user's network, for the model "user".
      optimizer: the user's optimizer, for the local optimizer "user".
      conv_impl: implementation of the convolutions that the network leaves open.

    Returns:
      The signature. Equal arguments return equal signatures until `evict_programs`.
    """
    is_user_network, name = spec.model == USER_PROVIDED, spec.local_optimizer
    base_model = _make_network(
        spec.model,
        ById(network if is_user_network else NETWORKS[spec.model].make),
        dataset.input_shape,
        dataset.num_outputs,
        dataset.num_tokens,
        dataset.task_kind.is_per_token,
        to_items(spec.model_options),
    )
    options = to_items(spec.options)
    algorithm_spec = get_algorithm_spec(spec.algorithm, spec.options)
    algorithm_spec.require_input_kind(dataset.input_shape, dataset.num_tokens)
    if algorithm_spec.needs_classes:
        dataset.task_kind.require_classes(spec.algorithm)
    implementations = algorithm_spec.identity_key
    model = _adapt_network(
        base_model, spec.algorithm, options, implementations, conv_impl, spec.precision
    )
    if name is not None and name != USER_PROVIDED:
        implementations += (OPTIMIZERS[name].make,)
    for metric in parse_metrics(spec.metrics):
        if metric.needs_classes:
            dataset.task_kind.require_classes(f"metric {metric.name!r}")
    # Measures of the split are no part of the rounds, so runs with and without them share programs.
    metrics = tuple(m for m in parse_metrics(spec.metrics) if not m.split_measure_names)
    evaluation = EvaluationOptions(
        spec.num_clients,
        len(dataset.domain_names),
        spec.has_client_tests,
        spec.gradient_gaps or 0,
        spec.validation is not None,
        metrics,
        **_describe_outputs(model, dataset) if metrics else {},
        records_client_losses=_has_adaptive_selection(spec),
        backdoor=_find_backdoor(spec) if algorithm_spec.has_global_model else None,
    )
    training = LocalTraining(
        Task(
            *(model, dataset.mean, dataset.std, dataset.task_kind),
            *(dataset.label_shape, dataset.label_dtype),
        ),
        name,
        spec.local_epochs,
        spec.optimizer_state == "keep",
        spec.batch_size,
        spec.evaluated_model if spec.has_client_tests else "global",
        measures_drift=bool(evaluation.update_metric_names),
        options=LocalTrainingOptions(
            to_items(spec.optimizer_options),
            tuple(_traced_optional_hyperparameters(spec)),
            spec.lr_step_schedule,
            spec.gradient_accumulation or 1,
            spec.local_steps,
            _wrap_optimizer(ById(optimizer)) if name == USER_PROVIDED else None,
        ),
        local_parameters=algorithm_spec.local_parameters,
        compressor=parse_compression(spec.compression),
        attacks=tuple(
            attack
            for attack in ATTACK_SETTING.parse(spec.attack)
            if isinstance(attack, UpdateAttack)
        ),
        aggregations=AGGREGATION_SETTING.parse(spec.aggregation),
        privacy=get_privacy_mechanism(spec),
        expected_cohort_size=compute_expected_cohort_size(spec),
    )
    return Signature(
        spec.algorithm,
        options,
        implementations,
        base_model,
        training,
        evaluation,
        spec.server_data is not None,
        spec.pretrain_epochs or 0,
        spec.lr_schedule is not None,
        any(isinstance(skew, FeatureSkew | LabelSkew) for skew in list_skews(spec)),
    )


def _find_backdoor(spec: RunSpec) -> Backdoor | None:
    """Return the run's backdoor attack, if it has one."""
    attacks = ATTACK_SETTING.parse(spec.attack)
    return next((attack for attack in attacks if isinstance(attack, Backdoor)), None)


def _describe_outputs(model: Model, dataset: Dataset) -> dict[str, Any]:
    """Return the formats of outputs and labels that metrics read, see `EvaluationOptions`."""
    formats = {"label_shape": dataset.label_shape, "label_dtype": dataset.label_dtype}
    return {"output_shape": model.output_shape, **formats}


@functools.lru_cache(maxsize=MAX_CACHED_PROGRAMS)
def _make_network(
    name: str,
    source: ById,
    input_shape: InputShape,
    num_classes: int,
    num_tokens: NumTokens,
    per_token: bool,
    options: tuple,
) -> Model:
    """Return the network of this name, or the user's network; equal arguments return one object."""
    if name == USER_PROVIDED:
        inputs = (input_shape, num_classes, USER_NETWORK, num_tokens, per_token)
        return to_model(source.value, *inputs, **dict(options))
    return make_model(name, input_shape, num_classes, num_tokens, per_token, **dict(options))


@functools.lru_cache(maxsize=MAX_CACHED_PROGRAMS)
def _adapt_network(
    network: Model,
    algorithm: str,
    options: tuple,
    implementations: tuple,
    conv_impl: str,
    precision: str | None,
) -> Model:
    """Return the network that clients train; equal arguments return one object."""
    values = dict(options)
    network = get_algorithm_spec(algorithm, values).get_trained_network(network, values)
    return configure_compute(network, conv_impl=conv_impl, precision=precision)


@functools.lru_cache(maxsize=MAX_CACHED_PROGRAMS)
def _wrap_optimizer(source: ById) -> Callable[[Any], optax.GradientTransformation]:
    """Return a user's optimizer as a function of `hp`; one object for each optimizer."""
    return lambda hp: make_user_transformation(source.value, hp)


def clear_network_caches() -> None:
    """Drop the networks of signatures, which hold compiled programs."""
    _make_network.cache_clear()
    _adapt_network.cache_clear()
    flops_per_sample.cache_clear()  # its keys hold networks


@functools.lru_cache(maxsize=MAX_CACHED_PROGRAMS)
def flops_per_sample(signature: Signature) -> int:
    """Return the floating-point operations of training on one sample."""
    return count_training_flops(signature.training.task.model)


def warn_missing_norm_layers(spec: ResolvedRunSpec, signature: Signature) -> None:
    """Warn of a network without the normalization layers that tell the method from its base.

    Args:
      spec: the settings.
      signature: the static choices of the run.
    """
    required_features = get_algorithm_spec(spec.algorithm, spec.options).required_data
    if "norms" in required_features and not signature.network.norm_layers():
        log.warning(
            "note: %s treats normalization layers apart, and network %r has none that are known: "
            "the run equals FedAvg",
            spec.algorithm,
            spec.model,
        )


def warn_batch_norm_padding(spec: ResolvedRunSpec, signature: Signature, sizes: np.ndarray) -> None:
    """Warn of a network whose running statistics may cover samples that fill up a minibatch.

    Args:
      spec: the settings.
      signature: the static choices of the run.
      sizes: examples of each client, `[K]`.
    """
    network = signature.network
    num_clients = int((sizes % spec.batch_size > 0).sum())
    if network.takes_sample_mask or not signature.training.optimizer or not num_clients:
        return
    if jax.eval_shape(network.init, make_key(0))["state"]:
        log.warning(
            "note: the last minibatch of %d clients is filled up, and statistics of network %r may "
            "cover these samples: use GroupNorm or LayerNorm in place of batch norm, nn.BatchNorm "
            "of flax.linen, or an (init, apply) pair with an argument sample_mask",
            num_clients,
            spec.model,
        )


def to_items(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return options as a hashable tuple in alphabetical order, with tuples in place of lists."""
    return tuple(sorted((name, _to_hashable(name, v)) for name, v in options.items()))


def _to_hashable(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_to_hashable(name, item) for item in value)
    is_hashable = isinstance(value, Hashable)
    require(is_hashable, f"option {name}", value, "a number, a text, or a list of such values")
    return value
