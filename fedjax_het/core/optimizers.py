"""Local optimizers by name: SGD with its momentums, optimizers of optax, and users' own.

The signature of an optimizer's function defines its settings: arguments with numbers as defaults
are numeric hyperparameters `local_<argument>`, truth values are the setting `optimizer_options`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.core.lr_schedules import make_step_lr_factor
from fedjax_het.nn.network import hash_jaxprs
from fedjax_het.utils.config import Bounds, HyperParameter, validate_arguments
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.registry import (
    REQUIRED,
    Registry,
    format_entry,
    get_keyword_parameters,
    get_summary_line,
)

Tree = Any
HyperParameterRecords = dict[str, HyperParameter]
USER_OBJECT = "user"  # the name of an optimizer that is passed to the run itself
LOCAL_PREFIX = "local_"
LR_NAME = f"{LOCAL_PREFIX}lr"

# Transformations that precede any optimizer, if their hyperparameter is given.
_POSITIVE = Bounds(0, open_low=True)
_GRADIENT_TRANSFORMATIONS: dict[str, tuple[Callable[[Any], Any], HyperParameter]] = {
    f"{LOCAL_PREFIX}clip_value": (optax.clip, HyperParameter(1.0, _POSITIVE)),
    f"{LOCAL_PREFIX}clip_norm": (optax.clip_by_global_norm, HyperParameter(10.0, _POSITIVE)),
    f"{LOCAL_PREFIX}weight_decay": (optax.add_decayed_weights, HyperParameter(1e-4, Bounds(0))),
}
COMMON_HYPERPARAMETERS: HyperParameterRecords = {
    name: record for name, (_, record) in _GRADIENT_TRANSFORMATIONS.items()
}
"""Hyperparameters of every optimizer that are used only where they are given."""

_DECAY_BOUNDS = Bounds(0, 1, open_high=True)  # with 1 a moment would never change
_DECAY_NAMES = ("b1", "b2", "b3", "decay", "momentum", "rho")

# Optimizers of optax that clients may have, and their default rates other than 0.001.
_OPTAX_NAMES = (
    *("rmsprop", "adagrad", "adadelta", "adabelief", "nadam", "nadamw", "yogi", "lion", "lamb"),
    *("lars", "radam", "adamax", "adamaxw", "amsgrad", "novograd", "adan", "sign_sgd"),
)
_DEFAULT_LRS = {"adagrad": 1e-2, "adadelta": 1.0, "yogi": 1e-2, "lion": 1e-4, "lars": 0.1}


# Weights on which a user's optimizer is traced.
_SMALL_TREE = {
    "b": jax.ShapeDtypeStruct((2,), jnp.float32),
    "w": jax.ShapeDtypeStruct((3, 2), jnp.float32),
}


class LocalOptimizer(NamedTuple):
    """An optimizer of local training."""

    name: str
    make: Callable[..., optax.GradientTransformation]
    """`make(learning_rate, **hyperparameters_and_options)`: the rate and the hyperparameters are
    traced, and the rate may be a function of the number of steps."""
    description: str
    hyperparameters: HyperParameterRecords
    "Hyperparameters of every run with the optimizer, by their names in `hp`."
    optional_hyperparameters: HyperParameterRecords
    "Hyperparameters that are used only where they are given; else the default of `make` holds."
    options: dict[str, bool]
    "Static switches and their defaults."

    def __repr__(self) -> str:
        return format_entry(self)


class LocalTrainingOptions(NamedTuple):
    """Choices of local training in addition to the name of the optimizer; static."""

    optimizer_options: tuple[tuple[str, bool], ...] = ()
    "Options of the optimizer that differ from their defaults."
    optional_hyperparameters: tuple[str, ...] = ()
    "Names of the optional hyperparameters of local training that are given."
    lr_schedule: str | None = None
    "Schedule of the rate over a client's steps, one of `LR_SCHEDULES`; None: a constant rate."
    accumulation_steps: int = 1
    "Minibatches of a step."
    num_steps: int | None = None
    "Minibatches of a round; None: the steps of its epochs."
    user_optimizer: Any = None
    """For the optimizer "user": a `GradientTransformation`, or a function of `hp` for it."""


def _make_entry(
    name: str,
    make: Callable[..., optax.GradientTransformation],
    default_lr: float,
    description: str | None = None,
    *,
    defaults: Mapping[str, float] | None = None,
) -> LocalOptimizer:
    """Return the entry of a function `make(learning_rate, ...)`.

    An argument whose default is None is an optional number if others have a number of that name.
    All other arguments (masks, types) keep their defaults. With `defaults` these are the numbers
    that every run has, and the others are optional.
    """
    hyperparameters = {LR_NAME: HyperParameter(default_lr, Bounds(0))}
    optional: HyperParameterRecords = {}
    options: dict[str, bool] = {}
    for argument, default in get_keyword_parameters(make, exclude=("learning_rate",)).items():
        hp_name = f"{LOCAL_PREFIX}{argument}"
        bounds = _DECAY_BOUNDS if argument in _DECAY_NAMES else Bounds(0)
        if isinstance(default, bool):
            if not argument.endswith("mask"):
                options[argument] = default
        elif isinstance(default, int | float):
            records = hyperparameters if defaults is None or hp_name in defaults else optional
            default = (defaults or {}).get(hp_name, float(default))
            records[hp_name] = HyperParameter(default, bounds)
        elif default is None and argument in _DECAY_NAMES:
            optional[hp_name] = HyperParameter(0.9, bounds)
    description = get_summary_line(make) if description is None else description
    return LocalOptimizer(name, make, description, hyperparameters, optional, options)


def _sgd(learning_rate: Any) -> optax.GradientTransformation:
    """Plain steps along the gradient."""
    return optax.sgd(learning_rate)


def _momentum(learning_rate: Any, momentum: float = 0.9) -> optax.GradientTransformation:
    """SGD with heavy-ball momentum."""
    return optax.sgd(learning_rate, momentum=momentum)


def _nesterov(learning_rate: Any, momentum: float = 0.9) -> optax.GradientTransformation:
    """SGD with Nesterov's momentum."""
    return optax.sgd(learning_rate, momentum=momentum, nesterov=True)


def _sm3(learning_rate: Any, momentum: float = 0.9) -> optax.GradientTransformation:
    """Adagrad by rows and columns (Anil et al., 2019)."""
    # The rate of `optax.sm3` is no function of the number of steps.
    return optax.chain(optax.scale_by_sm3(momentum), optax.scale_by_learning_rate(learning_rate))


OPTIMIZERS: Registry[LocalOptimizer] = Registry(
    "local optimizer",
    (
        _make_entry("sgd", _sgd, 0.01),
        _make_entry("momentum", _momentum, 0.01),
        _make_entry("adam", optax.adam, 1e-3, defaults={}),
        _make_entry("adamw", optax.adamw, 1e-3, defaults={f"{LOCAL_PREFIX}weight_decay": 1e-4}),
        _make_entry("nesterov", _nesterov, 0.01),
        *(
            _make_entry(name, getattr(optax, name), _DEFAULT_LRS.get(name, 1e-3))
            for name in _OPTAX_NAMES
            if hasattr(optax, name)
        ),
        _make_entry("sm3", _sm3, 0.1),
    ),
    argument="local_optimizer",
)
"""Local optimizers by name, including entries that users registered.

Example:
  >>> from fedjax_het.core.optimizers import OPTIMIZERS
  >>> list(OPTIMIZERS)[:4]
  ['sgd', 'momentum', 'adam', 'adamw']
  >>> OPTIMIZERS["nadam"].options
  {'nesterov': True}
"""


@validate_arguments
def register_optimizer(name: str, make: Any, description: str = "") -> None:
    """Register an optimizer of the user for runs, sweeps and reports, until the process ends.

    Args:
      name: name of the optimizer in settings.
      make: a function `make(learning_rate, ...)` that returns an `optax.GradientTransformation`;
        its other arguments have defaults. Numbers are hyperparameters `local_<argument>`, traced;
        truth values are `optimizer_options`. The default rate is the signature's, otherwise 0.01.
      description: one line for `fedjax-het list`; default: the first line of the docstring.

    Raises:
      ConfigError: if the name belongs to an optimizer of the package or is not an identifier, or if
        `make` is no such function.

    Example:
      >>> import optax
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.core.optimizers import register_optimizer
      >>> def centered(learning_rate, decay=0.99):
      ...     return optax.rmsprop(learning_rate, decay, centered=True)
      >>> register_optimizer("centered", centered)
      >>> spec = RunSpec("fedavg", "digits", local_optimizer="centered", hp={"local_decay": 0.9})
      >>> spec.resolved().learning_rate
      0.01
    """
    expected = "a function of learning_rate that returns an optax.GradientTransformation"
    parameters = get_keyword_parameters(make) if callable(make) else {}
    is_factory = "learning_rate" in parameters and not inspect.isclass(make)
    require(
        is_factory and not isinstance(make, optax.GradientTransformation), "make", make, expected
    )
    require(
        name != USER_OBJECT,
        "name",
        name,
        "another name, as an optimizer passed to a run has this name",
    )
    signature_lr = parameters.pop("learning_rate")
    for argument, default in parameters.items():
        label = f"make's argument {argument}"
        require(default is not REQUIRED, label, "without a default", "a default")
    default_lr = float(signature_lr) if isinstance(signature_lr, int | float) else 0.01
    entry = _make_entry(name, make, default_lr, description or None)
    hp = {hp_name: record.default for hp_name, record in entry.hyperparameters.items()}
    check_transformation(
        name, functools.partial(_make_from_entry, entry, LocalTrainingOptions()), hp
    )
    OPTIMIZERS.add(entry)


def optimizer_hyperparameters(name: str) -> HyperParameterRecords:
    """Return the numeric hyperparameters of every run with the optimizer `name`."""
    return {} if name == USER_OBJECT else OPTIMIZERS[name].hyperparameters


def optional_optimizer_hyperparameters(name: str, hp: Mapping[str, Any]) -> HyperParameterRecords:
    """Return the hyperparameters of an optimizer that are used only where they are given.

    Args:
      name: name of the optimizer.
      hp: the hyperparameters that are given. A user's object reads any of them, so that every
        `local_...` may be one.

    Returns:
      Hyperparameters by name.
    """
    if name == USER_OBJECT:
        any_number = HyperParameter(0.0, Bounds())
        user_records = {key: any_number for key in hp if key.startswith(LOCAL_PREFIX)}
        lr_record = {LR_NAME: HyperParameter(0.01, Bounds(0))}
        return user_records | lr_record | COMMON_HYPERPARAMETERS
    entry = OPTIMIZERS[name]
    records = COMMON_HYPERPARAMETERS | entry.optional_hyperparameters
    return {key: record for key, record in records.items() if key not in entry.hyperparameters}


def make_local_optimizer(
    name: str, options: LocalTrainingOptions, hp: Any
) -> optax.GradientTransformation:
    """Return the local optimizer.

    If these hyperparameters are set, the gradient is first clipped entry by entry
    (`local_clip_value`), then as a whole (`local_clip_norm`, of all layers together). Then
    `local_weight_decay` times the weights is added: L2, as in papers on SGD. An optimizer with an
    argument `weight_decay` (adamw, nadamw, adamaxw, lion, lamb, lars, novograd, adan) applies it
    itself: decoupled from the gradient's moments (lars: added to the gradient that is scaled).

    Args:
      name: name of the optimizer.
      options: the choices of local training.
      hp: values of the hyperparameters by name; may be traced.

    Returns:
      The transformation of gradients into updates.

    Example:
      >>> from fedjax_het.core.optimizers import LocalTrainingOptions, make_local_optimizer
      >>> sgd = make_local_optimizer("sgd", LocalTrainingOptions(), {"local_lr": 0.5})
      >>> float(sgd.update(2.0, sgd.init(1.0))[0])
      -1.0
    """
    entry = None if name == USER_OBJECT else OPTIMIZERS[name]
    if entry is None:
        optimizer = make_user_transformation(options.user_optimizer, hp)
    else:
        optimizer = _make_from_entry(entry, options, hp)
    steps = _make_gradient_transformations(name, options, hp)
    optimizer = optax.chain(*steps, optimizer) if steps else optimizer
    # `optax.flatten` is no gain on CPUs: XLA vectorizes the concatenation by masked reads of all
    # leaves at each position. Reads outside of mapped memory take a microsecond each.
    return optimizer


def _make_gradient_transformations(
    name: str, options: LocalTrainingOptions, hp: Any
) -> list[optax.GradientTransformation]:
    """Return clipping and weight decay of the gradient, as far as their numbers are given."""
    own_names = optimizer_hyperparameters(name)
    return [
        make(hp[hp_name])
        for hp_name, (make, _) in _GRADIENT_TRANSFORMATIONS.items()
        if hp_name in options.optional_hyperparameters and hp_name not in own_names
    ]


def transform_gradient(
    name: str, options: LocalTrainingOptions, hp: Any, gradient: Tree, params: Tree
) -> Tree:
    """Clip a gradient and add weight decay, as the local optimizer does before its own rule.

    Args:
      name: name of the optimizer.
      options: the choices of local training.
      hp: values of the hyperparameters by name; may be traced.
      gradient: a gradient, like `params`.
      params: the weights.

    Returns:
      The direction of a step of plain SGD; `gradient` itself without clipping and weight decay.

    Example:
      >>> from fedjax_het.core.optimizers import LocalTrainingOptions, transform_gradient
      >>> options = LocalTrainingOptions(optional_hyperparameters=("local_weight_decay",))
      >>> transform_gradient("sgd", options, {"local_weight_decay": 0.5}, 1.0, 4.0)
      3.0
    """
    for step in _make_gradient_transformations(name, options, hp):
        gradient, _ = step.update(gradient, step.init(params), params)
    return gradient


def _make_from_entry(
    entry: LocalOptimizer, options: LocalTrainingOptions, hp: Any
) -> optax.GradientTransformation:
    learning_rate = hp[LR_NAME]
    if options.lr_schedule is not None:
        factor = make_step_lr_factor(options.lr_schedule, hp)
        learning_rate = lambda num_steps: hp[LR_NAME] * factor(num_steps)  # noqa: E731
    names = [*entry.hyperparameters]
    names += [
        key for key in options.optional_hyperparameters if key in entry.optional_hyperparameters
    ]
    numbers = {key.removeprefix(LOCAL_PREFIX): hp[key] for key in names if key != LR_NAME}
    return entry.make(learning_rate, **numbers, **dict(options.optimizer_options))


class AccumulatedGradient(NamedTuple):
    """State of an optimizer whose steps have several minibatches."""

    optimizer_state: Tree
    gradient_sum: Tree
    "Sum of the gradients since the last step."
    num_gradients: jax.Array
    "`[]` int32: number of these gradients."


def accumulate_gradient(
    accumulation_steps: int,
    optimizer: optax.GradientTransformation,
    params: Tree,
    gradient: Tree,
    state: AccumulatedGradient,
    is_last: jax.Array,
) -> tuple[Tree, AccumulatedGradient]:
    """Add a gradient; make a step along their mean when there are enough, or at the last one.

    Args:
      accumulation_steps: number of gradients of a step.
      optimizer: the optimizer.
      params: the weights.
      gradient: gradient of a minibatch, like `params`.
      state: the gradients since the last step.
      is_last: `[]` bool: whether the gradient is the client's last one in the round.

    Returns:
      The weights, changed or not, and the new state.
    """
    gradient_sum = jax.tree.map(jnp.add, state.gradient_sum, gradient)
    num_gradients = state.num_gradients + 1

    def apply_step(params, optimizer_state):
        mean = jax.tree.map(lambda g: g / num_gradients, gradient_sum)
        updates, optimizer_state = optimizer.update(mean, optimizer_state, params)
        zero = jax.tree.map(jnp.zeros_like, gradient_sum)
        new_state = AccumulatedGradient(optimizer_state, zero, jnp.int32(0))
        return optax.apply_updates(params, updates), new_state

    def accumulate(params, optimizer_state):
        return params, AccumulatedGradient(optimizer_state, gradient_sum, num_gradients)

    is_due = (num_gradients == accumulation_steps) | is_last
    return jax.lax.cond(is_due, apply_step, accumulate, params, state.optimizer_state)


def make_user_transformation(user_optimizer: Any, hp: Any) -> optax.GradientTransformation:
    """Return the transformation of a user's object.

    Args:
      user_optimizer: a `GradientTransformation`, or a function of `hp` that returns one.
      hp: values of the hyperparameters by name.

    Returns:
      The transformation.
    """
    is_transformation = isinstance(user_optimizer, optax.GradientTransformation)
    return user_optimizer if is_transformation else user_optimizer(hp)


def check_transformation(
    name: str, make: Callable[[Any], optax.GradientTransformation], hp: Mapping[str, float]
) -> None:
    """Check a user's optimizer on a small tree of weights. Cost: an abstract evaluation.

    Args:
      name: name of the optimizer, for messages.
      make: `make(hp)` returns the transformation.
      hp: values of the hyperparameters by name.

    Raises:
      ConfigError: unless `make(hp)` is a transformation whose updates have the shapes of the
        gradients, and whose state keeps its shapes.
    """
    label = f"optimizer {name!r}"
    expected = "an optax.GradientTransformation, or a function of hp that returns one"

    def init_and_update(hp, params):
        transformation = make(hp)
        is_transformation = isinstance(transformation, optax.GradientTransformation)
        require(is_transformation, label, transformation, expected)
        state = transformation.init(params)
        return params, state, *transformation.update(params, state, params)

    try:
        shapes = jax.eval_shape(init_and_update, _to_float32(hp), _SMALL_TREE)
    except ConfigError:
        raise
    except KeyError as error:
        text = f"expected one of the hyperparameters ({', '.join(hp) or 'none is given'})"
        raise ConfigError(f"{label} reads hp[{error}]: {text}") from error
    except Exception as error:  # of a user's function
        raise ConfigError(f"{label} fails: {type(error).__name__}: {error}") from error
    params, state, updates, new_state = (
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in shapes
    )
    expected = "updates of the shapes of the gradients"
    require(updates == params, label, "updates of other shapes", expected)
    require(state == new_state, label, "a state that changes its shapes", "constant shapes")


def compute_optimizer_digest(user_optimizer: Any, hp: Mapping[str, float]) -> str:
    """Hash the computation of a user's optimizer. Cost: two traces.

    The traces of `init` and `update` on a small tree enter, with the arrays that they close over.
    Names, and the nesting of the state, do not enter. Another version of jax or optax may give
    another digest.

    Args:
      user_optimizer: a `GradientTransformation`, or a function of `hp` that returns one.
      hp: values of the hyperparameters by name, which are traced.

    Returns:
      16 hexadecimal digits.

    Example:
      >>> import optax
      >>> from fedjax_het.core.optimizers import compute_optimizer_digest
      >>> first = compute_optimizer_digest(optax.adam(0.1), {})
      >>> first == compute_optimizer_digest(optax.chain(optax.adam(0.1)), {})
      True
    """

    def init(hp, params):
        return make_user_transformation(user_optimizer, hp).init(params)

    def init_leaves(hp, params):
        return jax.tree.leaves(init(hp, params))

    def update(hp, state, params):
        updates, state = make_user_transformation(user_optimizer, hp).update(params, state, params)
        return updates, jax.tree.leaves(state)

    traced_hp = _to_float32(hp)
    state = jax.eval_shape(lambda hp: init(hp, _SMALL_TREE), traced_hp)
    traces = (
        jax.make_jaxpr(init_leaves)(traced_hp, _SMALL_TREE),
        jax.make_jaxpr(update)(traced_hp, state, _SMALL_TREE),
    )
    return hash_jaxprs(traces).hexdigest()[:16]


def _to_float32(hp: Mapping[str, float]) -> dict[str, jax.Array]:
    return {name: jnp.float32(value) for name, value in hp.items()}
