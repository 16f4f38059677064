"""Networks that a function makes from random keys: flax.nnx modules, and modules of one example.

Each is converted to an (init, apply) pair for `make_pair_model`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.nn.adapters import make_flag_arguments, make_pair_model
from fedjax_het.nn.model import Model
from fedjax_het.utils.arrays import is_prng_key, make_key
from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.input_kinds import InputShape, NumTokens, count_rows
from fedjax_het.utils.registry import get_keyword_parameters

_STATS = "stats"  # collection of the variables that are not trained
_BATCH_AXIS = "batch"  # axis of the map over examples, for layers with a state


def make_nnx_model(
    make: Callable[[Any], Any],
    input_shape: InputShape,
    num_classes: int,
    num_tokens: NumTokens = None,
    *,
    per_token: bool = False,
) -> Model:
    """Convert a function that makes a flax.nnx module to a `Model`.

    The module is called `module(x)`, or with a training flag, by its signature. In training without
    a key nothing is dropped. `nnx.Param` are the parameters, random states follow the key, and all
    other variables are the model's state. The model has no head and no `embed`.

    Args:
      make: `make(rngs) -> module`.
      input_shape: shape of the input of one example.
      num_classes: number of logits.
      num_tokens: number of different tokens; None for inputs of floats.
      per_token: whether the network has logits for each token, see `Model.is_per_token`.

    Returns:
      The model.

    Raises:
      ConfigError: if `make` returns no nnx module. Its exceptions are raised unchanged.
    """
    from flax import nnx

    split: Any = nnx.split
    kinds = (nnx.Param, nnx.RngState, ...)

    def make_module(rngs: Any) -> Any:
        module = make(rngs)
        if not isinstance(module, nnx.Module):
            returned = type(module).__name__
            raise ConfigError(f"a function of rngs returned a {returned}: expected an nnx module")
        return module

    abstract = nnx.eval_shape(lambda: make_module(nnx.Rngs(make_key(0))))
    graph, abstract_params, abstract_rngs, abstract_stats = split(abstract, *kinds)
    flag_owner, has_stats = type(abstract).__call__, bool(jax.tree.leaves(abstract_stats))

    def join(params: Any, stats: Any) -> dict[str, Any]:
        variables = {"params": _to_names(nnx.to_pure_dict(params))}
        return variables | ({_STATS: _to_names(nnx.to_pure_dict(stats))} if has_stats else {})

    def fill(abstract_state: Any, values: Any) -> Any:
        state = jax.tree.map(lambda leaf: leaf, abstract_state)  # a copy
        nnx.replace_by_pure_dict(state, values)
        return state

    def init(key: jax.Array) -> dict[str, Any]:
        _, params, _, stats = split(make_module(nnx.Rngs(key)), *kinds)
        return join(params, stats)

    def apply(variables: Any, x: jax.Array, train: bool, key: jax.Array | None = None) -> Any:
        leaves = jax.tree.leaves(abstract_rngs)
        structure: Any = jax.tree.structure(abstract_rngs)
        base_key = make_key(0) if key is None else key
        rngs = structure.unflatten(
            jax.random.fold_in(base_key, i)
            if is_prng_key(leaf)
            else jnp.zeros(leaf.shape, leaf.dtype)
            for i, leaf in enumerate(leaves)
        )
        params = fill(abstract_params, variables["params"])
        module = nnx.merge(graph, params, rngs, fill(abstract_stats, variables.get(_STATS, {})))
        draws = train and key is not None
        module.set_attributes(
            deterministic=not draws, use_running_average=not train, raise_if_not_found=False
        )
        logits = _require_one_output(module(x, **make_flag_arguments(flag_owner, train)), module)
        if not has_stats:
            return logits
        _, params, _, stats = split(module, *kinds)
        return logits, {_STATS: join(params, stats)[_STATS]}

    norms = (nnx.BatchNorm, nnx.LayerNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.RMSNorm)
    paths = frozenset(
        tuple(map(str, path))
        for path, part in nnx.iter_modules(abstract)
        if isinstance(part, norms)
    )
    model = make_pair_model(
        *(init, apply, input_shape, num_classes, num_tokens), is_per_token=per_token
    )
    return model._replace(norm_layers=lambda: paths)


def make_single_example_model(
    make: Callable[[jax.Array], Any],
    input_shape: InputShape,
    num_classes: int,
    num_tokens: NumTokens = None,
    *,
    per_token: bool = False,
) -> Model:
    """Convert a function that makes a module of one example, such as equinox's, to a `Model`.

    The module is a pytree that is called `module(x)` or `module(x, key=key)` on the input of one
    example, such as an image `[H, W, C]`, and returns the logits `[num_classes]`. Its arrays are
    the parameters, named by their paths, such as `layers[0].weight`. Leaves of the name `inference`
    are true except in training with a key. The model has no head and no `embed`.

    `make` may return the module and a state, as `equinox.nn.make_with_state` does. The module is
    then called `module(x, state)` in a map over the axis "batch", and returns the logits and the
    state, which is equal for all examples. Integers and truth values of the state are stored as
    floats, so that servers can average them, and are rounded before the call. In layers with a
    state, such as batch norm, `inference` is true except in training.

    Args:
      make: `make(key) -> module`, or `make(key) -> (module, state)`.
      input_shape: shape of the input of one example.
      num_classes: number of logits.
      num_tokens: number of different tokens; None for inputs of floats.
      per_token: whether the network has logits for each token, see `Model.is_per_token`.

    Returns:
      The model.

    Raises:
      ConfigError: if `make` returns no such module. Its exceptions are raised unchanged.
    """

    def make_parts(key: jax.Array) -> tuple[Any, Any]:
        made = make(key)
        return made if isinstance(made, tuple) and len(made) == 2 else (made, None)

    def init(key: jax.Array) -> dict[str, Any]:
        module, state = make_parts(key)
        params = {name: leaf for name, leaf in _list_leaves(module) if _is_array(leaf)}
        return {"params": params} | ({_STATS: _to_floats(state)} if has_state else {})

    records: list[Any] = []

    def record_parts(key: jax.Array) -> None:
        module, state = make_parts(key)
        leaves = _list_leaves(module)
        constants = [(name, None if _is_array(leaf) else leaf) for name, leaf in leaves]
        # The arrays are those of an abstract evaluation: only names and structures are recorded.
        dtypes = [(name, leaf.dtype) for name, leaf in _list_leaves(state)]
        structures = jax.tree.structure(module), jax.tree.structure(state)
        records.append((type(module), constants, _list_stateful_layers(module), dtypes, structures))

    jax.eval_shape(record_parts, make_key(0))
    kind, constants, stateful_layers, state_dtypes, (structure, state_structure) = records[0]
    has_state = bool(state_dtypes)
    if "__call__" not in dir(kind) or structure.num_leaves < 2:
        returned = f"a function of key returned a {kind.__name__}"
        raise ConfigError(f"{returned}: expected a module, a pytree that maps an input to logits")
    takes_key = "key" in get_keyword_parameters(kind.__call__)
    flags = [name for name, _ in constants if name.endswith("inference")]

    def apply(variables: Any, x: jax.Array, train: bool, key: jax.Array | None = None) -> Any:
        key = key if train else None
        modes = {
            name: not train if name.startswith(stateful_layers) else key is None for name in flags
        }
        values = {**dict(constants), **modes, **variables["params"]}
        module = structure.unflatten(values[name] for name, _ in constants)
        keys = None if key is None else jax.random.split(key, count_rows(x))
        state = state_structure.unflatten(
            _from_float(variables[_STATS][name], dtype) for name, dtype in state_dtypes
        )

        def call(x: jax.Array, state: Any, key: jax.Array | None) -> Any:
            arguments = (x, state) if has_state else (x,)
            output = module(*arguments, **({"key": key} if takes_key else {}))
            return output if has_state else (_require_one_output(output, module), None)

        in_axes, out_axes = (0, None, None if keys is None else 0), (0, None)
        outputs = jax.vmap(call, in_axes, out_axes, axis_name=_BATCH_AXIS)(x, state, keys)
        logits, new_state = outputs
        return (logits, {_STATS: _to_floats(new_state)}) if has_state else logits

    return make_pair_model(
        *(init, apply, input_shape, num_classes, num_tokens), is_per_token=per_token
    )


def _list_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a tree with their paths, such as `layers[0].weight`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path).lstrip("."), leaf) for path, leaf in leaves]


def _to_floats(state: Any) -> dict[str, jax.Array]:
    """Return the arrays of a state by path, integers and truth values as float32."""
    return {
        name: leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.astype(jnp.float32)
        for name, leaf in _list_leaves(state)
    }


def _from_float(value: jax.Array, dtype: Any) -> jax.Array:
    """Return a value of a state in its own dtype."""
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return value if is_float else jnp.round(value).astype(dtype)


def _list_stateful_layers(module: Any) -> tuple[str, ...]:
    """Return the paths of the layers that equinox's `is_stateful` marks, each with its dot."""
    parts = jax.tree_util.tree_leaves_with_path(module, is_leaf=_is_stateful)
    paths = [path for path, part in parts if _is_stateful(part)]
    return tuple(f"{jax.tree_util.keystr(path).lstrip('.')}." for path in paths)


def _is_stateful(part: Any) -> bool:
    return hasattr(type(part), "is_stateful")


def _require_one_output(output: Any, module: Any) -> Any:
    """Return the output of a module. Raise ConfigError for several outputs."""
    if isinstance(output, tuple | list | dict):
        raise ConfigError(
            f"{type(module).__name__} returns a {type(output).__name__}: expected one array, the "
            "logits; for methods that read features, pass a `Model` with `embed`"
        )
    return output


def _to_names(tree: Any) -> Any:
    """Return nested dictionaries with texts as keys; nnx numbers the parts of a list."""
    if not isinstance(tree, dict):
        return tree
    return {str(name): _to_names(part) for name, part in tree.items()}


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")
