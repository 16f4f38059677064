"""Methods with options of a test's own, and such that they are quick."""

from functools import partial
from typing import get_type_hints

from fedjax_het.algorithms import get_algorithm_spec
from fedjax_het.utils.config import parse_config
from support.data import CLIENT_SIZES
from support.small_federation import make_small_federation
from support.small_runs import CONDENSATION_OPTIONS, SYNTHESIS_OPTIONS
from support.two_layers import make_two_layer_model

FAST_SYNTHESIS = SYNTHESIS_OPTIONS | {"num_iterations": 2, "trajectory_rounds": 3}
FAST_SYNTHESIS |= {"augment_strategy": "none"}
FAST_CONDENSATION = {**CONDENSATION_OPTIONS, "server_batch_size": 4}
FAST_DISTILLATION = {"distill_epochs": 3, "distill_batch_size": 4}
FAST_GENERATOR = {"generator_hidden": 5, "generator_noise": 2, "generator_steps": 3}
FAST_SYNTHETIC_IMAGES = {"distill_iterations": 2, "distill_steps": 2, "distill_batch_size": 4}
FAST_SYNTHETIC_IMAGES |= {"image_noise": 2, "image_width": 2, "synthesis_loss": "paper"}
FAST_OPTIONS = {
    "dynafed": FAST_SYNTHESIS,
    "feddm": FAST_CONDENSATION,
    "fedaf": FAST_CONDENSATION,
    "ccvr": {"virtual_features": 4, "calibration_epochs": 2, "calibration_batch_size": 4},
    "fedftg": FAST_SYNTHETIC_IMAGES,
    "fedgen": FAST_GENERATOR,
    "feddf": FAST_DISTILLATION,
    "fedbe": {**FAST_DISTILLATION, "num_samples": 3},
    # Of these the variants with most work.
    "apfl": {"mixing": "outputs", "adaptive": True, "alpha_update": "step"},
    "per_fedavg": {"order": "exact"},
    "fedrep": {"head_epochs": 2},
    "fedala": {"initial_epochs": 2},
}
# The mean logits of linear models are those of their mean: FedDF would follow rounding errors.
# For images of 2x2 pixels batch norm removes the biases before it. Their gradients are rounding, of
# which Adam makes whole steps: `test_fedftg.py` compares its gradients on devices instead.
HYPER_PARAMETERS = {"feddf": {"server_lr": 0.7}, "fedftg": {"image_generator_lr": 1e-6}}


def fast_registered_builder(name, base=None):
    """-> (build, settings of `small`) of a registered method, such that it is quick."""
    algorithm_spec = get_algorithm_spec(name, {} if base is None else {"base": base})
    options = {**FAST_OPTIONS.get(base, {}), **FAST_OPTIONS.get(name, {})}
    hyper_parameters = default_hyper_parameters(algorithm_spec, options) | {
        "local_lr": 0.1,
        **HYPER_PARAMETERS.get(name, {}),
    }
    settings = {"hp": hyper_parameters, "client_test_model": algorithm_spec.evaluated_models[0]}
    if "head_layers" in algorithm_spec.option_names:  # a linear model is all head
        settings["model"] = make_two_layer_model()
    return make_builder(algorithm_spec, options), settings


def make_method_federation(name, options=None, hp=None, **settings):
    """A small federation of a registered method; what `hp` omits has its default.

    `options` may name a base. `settings`: see `FederationSetting`.
    """
    options = options or {}
    entry = get_algorithm_spec(name, options)
    optimizer = settings.get("optimizer", "sgd") if entry.trains_locally else None
    num_clients = len(settings.get("sizes", CLIENT_SIZES))
    defaults = default_hyper_parameters(entry, options, optimizer, num_clients)
    return make_small_federation(
        make_builder(entry, options), hp={**defaults, **(hp or {})}, **settings
    )


def bind_options(build, *, base=None, build_base=None, **values):
    """`build` with these options, and over this base."""
    options_type = get_type_hints(build.func if isinstance(build, partial) else build)["options"]
    bound_arguments = {"base": base, "build_base": build_base}
    bound_arguments = {name: other for name, other in bound_arguments.items() if other is not None}
    return partial(build, options=parse_config(options_type, values), **bound_arguments)


def default_hyper_parameters(
    algorithm_spec, options, optimizer="sgd", num_clients=len(CLIENT_SIZES)
) -> dict[str, float]:
    """A method's hyperparameters as they are where nothing is said."""
    hyperparameters = algorithm_spec.collect_hyperparameters(
        optimizer, algorithm_spec.complete_options(options), num_clients
    )
    return {name: hyper_parameter.default for name, hyper_parameter in hyperparameters.items()}


def make_builder(algorithm_spec, options):
    """The method's `build(training, plan)`."""
    return lambda training, plan: algorithm_spec.build_algorithm(
        training, plan, algorithm_spec.complete_options(options)
    )
