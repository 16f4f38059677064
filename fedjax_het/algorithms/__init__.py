"""Federated methods: one file for each, and their registry `METHODS`."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Concatenate

from fedjax_het.algorithms import (
    abavg,
    apfl,
    ccvr,
    ditto,
    dynafed,
    fedaf,
    fedala,
    fedamp,
    fedasync,
    fedavg,
    fedbabu,
    fedbe,
    fedbn,
    fedbuff,
    fedcm,
    feddc,
    feddecorr,
    feddf,
    feddm,
    feddyn,
    fedexp,
    fedftg,
    fedgen,
    fedlc,
    fedmix,
    fednova,
    fedntd,
    fedopt,
    fedper,
    fedproto,
    fedprox,
    fedrep,
    fedrod,
    fedrs,
    fedsam,
    fine_tuning,
    fsl,
    ifca,
    levelled,
    lg_fedavg,
    moon,
    per_fedavg,
    pfedme,
    qfedavg,
    rofsl,
    scaffold,
    separate,
)
from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.spec import AlgorithmSpec, DefaultsRule, validate_algorithm_spec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.utils.config import make_config_class, validate_arguments
from fedjax_het.utils.errors import make_value_error, require_name
from fedjax_het.utils.former_names import rename_former_arguments
from fedjax_het.utils.registry import Registry

METHODS: Registry[AlgorithmSpec] = Registry(
    "method",
    (
        fedavg.SPEC,
        fedprox.SPEC,
        scaffold.SPEC,
        dynafed.SPEC,
        feddf.SPEC,
        fedbe.SPEC,
        abavg.SPEC,
        ccvr.SPEC,
        fedftg.SPEC,
        fedgen.SPEC,
        fedmix.FEDMIX,
        fedmix.NAIVEMIX,
        fedbn.SPEC,
        moon.SPEC,
        fedlc.SPEC,
        fedrs.SPEC,
        fedntd.SPEC,
        feddecorr.SPEC,
        feddyn.SPEC,
        feddc.SPEC,
        fednova.SPEC,
        fedopt.FEDAVGM,
        fedopt.FEDADAM,
        fedopt.FEDYOGI,
        fedopt.FEDADAGRAD,
        fedexp.SPEC,
        qfedavg.SPEC,
        fedbuff.SPEC,
        fedasync.SPEC,
        fedcm.SPEC,
        fedsam.FEDSAM,
        fedsam.MOFEDSAM,
        feddm.SPEC,
        fedaf.SPEC,
        separate.SPEC,
        fine_tuning.FEDAVG_FT,
        fine_tuning.FEDPROX_FT,
        apfl.SPEC,
        fedamp.FEDAMP,
        fedamp.HEURFEDAMP,
        ifca.SPEC,
        ditto.SPEC,
        pfedme.SPEC,
        per_fedavg.SPEC,
        fedper.SPEC,
        fedrod.SPEC,
        fedproto.SPEC,
        fedrep.SPEC,
        fedbabu.SPEC,
        lg_fedavg.SPEC,
        fedala.SPEC,
        fsl.DATA_SHARING,
        fsl.FSL,
        fsl.FSL_P,
        rofsl.SPEC,
        levelled.SPEC,
    ),
    argument="algorithm",
)
"""Registered methods, the values of the setting `algorithm`."""


def get_possible_bases(algorithm_spec: AlgorithmSpec) -> tuple[str, ...]:
    """Return the names of the methods that this method can wrap, the default first.

    Example:
      >>> from fedjax_het.algorithms import METHODS, get_possible_bases
      >>> get_possible_bases(METHODS["abavg"])[:3]
      ('fedavg', 'fedprox', 'scaffold')
    """
    return tuple(name for name, other in METHODS.items() if algorithm_spec.can_wrap(other))


def get_algorithm_spec(algorithm: str, options: Mapping[str, Any]) -> AlgorithmSpec:
    """Return the entry of a method, with the base that the option "base" names.

    Args:
      algorithm: name of the method.
      options: options of the method; others than "base" are not read.

    Returns:
      The entry. A method that wraps another one has a base, by default the first possible one.

    Raises:
      ConfigError: for an unknown method, or a base that the method cannot have.

    Example:
      >>> from fedjax_het.algorithms import get_algorithm_spec
      >>> get_algorithm_spec("dynafed", {"base": "fedprox"}).base.name
      'fedprox'
    """
    algorithm_spec = METHODS.require(algorithm)
    if not algorithm_spec.has_base:
        return algorithm_spec
    possible_bases = get_possible_bases(algorithm_spec)
    base = options.get("base")
    base = possible_bases[0] if base is None else base
    if isinstance(base, str) and base in METHODS and base not in possible_bases:
        expected = f"a base that {algorithm} can have: {', '.join(possible_bases)}"
        raise make_value_error("options base", base, expected)
    require_name("options base", base, possible_bases)
    return algorithm_spec.with_base(METHODS[base])


# Fields that a built-in function keeps under a new name.
_FUNCTION_FIELDS = (
    "options",
    "hyperparameters",
    "server_step",
    "required_data",
    "input_kinds",
    "needs_classes",
    "trains_locally",
    "evaluated_models",
    "has_global_model",
    "has_diagnostics",
    "min_clients",
    "min_rounds",
    "adapt_network",
)

# Arguments of `register_method` in version 0.6; to be removed after 0.7.
_DEPRECATED_FIELDS = {
    "colour": "color",
    "global_model": "has_global_model",
    "needs": "required_data",
    "network": "adapt_network",
    "numbers": "hyperparameters",
    "refinable": "wrappable_as",
    "refines": "wraps",
    "scored": "evaluated_models",
    "remarks": "settings_warnings",
    "surveys": "has_diagnostics",
}


@validate_arguments
def register_method(
    name: str,
    build: Callable[Concatenate[LocalTraining, ExecutionPlan, ...], Algorithm],
    description: str = "",
    **spec_fields: Any,
) -> AlgorithmSpec:
    """Register a method under a name, for runs, sweeps, tables and reports of this process.

    A name of the user may be registered again, for example when a notebook cell runs twice; later
    runs use the new method. A sweep repeats the runs of a changed method; `runtime.identity` lists
    the changes that it finds.

    Args:
      name: name of the method, a word that no method of the package has.
      build: function `build(training, plan) -> Algorithm`, with an argument `options` if the method
        has options; see `fedjax_het.methods`.
      description: one line for `fedjax-het list`.
      **spec_fields: fields of `AlgorithmSpec`, such as `local_parameters`, `evaluated_models`,
        `color`, and `options` and `hyperparameters` (classes of the method's choices and numbers).
        A dictionary of defaults >= 0 also serves as `hyperparameters`. A function of the package
        keeps its options, hyperparameters and required data under a new name.

    Returns:
      The method's entry in the registry.

    Raises:
      ConfigError: if `name` is a method of the package or not a word, or if a field is unknown or
        invalid.

    Example:
      >>> from fedjax_het import register_method
      >>> from fedjax_het.methods import build_federated_algorithm, make_local_sgd
      >>> def plain(training, plan):
      ...     return build_federated_algorithm(training, plan, make_local_sgd(training))
      >>> register_method("plain", plain, "FedAvg under another name").name
      'plain'

      FedPer, whose clients keep the last layer:

      >>> head = lambda model, variables: model.head.get_parameters(variables)
      >>> register_method("per_head", plain, local_parameters=head).evaluated_models
      ('personal',)
    """
    spec_fields = rename_former_arguments(spec_fields, _DEPRECATED_FIELDS, "register_method")
    valid_names = [field.name for field in fields(AlgorithmSpec) if field.name != "base"]
    for field_name in spec_fields:
        require_name("argument", field_name, valid_names)
    if spec_fields.get("local_parameters") is not None:
        derived: dict[str, Any] = {"evaluated_models": ("personal",), "has_global_model": False}
        spec_fields = derived | spec_fields
    for built_in in (METHODS[built_in_name] for built_in_name in METHODS.built_in):
        if built_in.build is build and not built_in.has_base:
            inherited = {field: getattr(built_in, field) for field in _FUNCTION_FIELDS}
            spec_fields = inherited | spec_fields
    if isinstance(spec_fields.get("hyperparameters"), dict):
        defaults = spec_fields["hyperparameters"]
        spec_fields["hyperparameters"] = make_config_class(f"{name}_numbers", defaults)
    algorithm_spec = validate_algorithm_spec(AlgorithmSpec(name, build, description, **spec_fields))
    METHODS.add(algorithm_spec)
    return algorithm_spec


__all__ = [
    "METHODS",
    "Algorithm",
    "AlgorithmSpec",
    "DefaultsRule",
    "get_algorithm_spec",
    "get_possible_bases",
    "register_method",
]
