"""Measure the errors of tf32 and bfloat16 in the gradients of the papers' methods, on a CPU.

    python experiments/accelerator/precision.py --output experiments/accelerator/results

Each number is the relative error ||found - exact|| / ||exact|| of one gradient, by the precision of
networks (`RunSpec.precision`); the exact gradient is computed in float64. A CPU computes in
bfloat16 like other backends, except for the order of sums. A CPU has no tf32: parameters and images
are rounded to 10 bits of fraction instead, as a GPU rounds the operands of a product. Activations
between layers stay float32 here, so the error of a GPU is larger. The effect on accuracies is
unknown without runs.
"""

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedjax_het.algorithms.client_attention import compute_squared_distances
from fedjax_het.condensation.distribution_matching import distribution_distance
from fedjax_het.condensation.synthetic_data import SyntheticData, SyntheticTask
from fedjax_het.condensation.unrolling import matching_loss, unroll
from fedjax_het.nn import Model, make_model
from fedjax_het.nn.precision import BFLOAT16, FLOAT32, TF32, configure_compute
from fedjax_het.papers.programs import make_config_program
from fedjax_het.utils.config import NonNegativeInt, PositiveInt
from fedjax_het.utils.io import make_output_directory

# jax before 0.8 has the context in `jax.experimental`.
_x64_module = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
enable_x64 = _x64_module.enable_x64
Tree = Any
NETWORKS: dict[str, dict[str, Any]] = {"mlp": {}, "convnet": {"width": 32, "norm": "instance"}}
IMAGE_SHAPE, NUM_CLASSES = (16, 16, 1), 10
STEP_SIZE = 0.05  # of the inner loop, and of clients
DROPPED_FRACTION_BITS = 13  # bits of float32's 23 that tf32 has not


@dataclass
class Arguments:
    """Measure the errors of gradients in tf32 and bfloat16."""

    steps: tuple[PositiveInt, ...] = (5, 20)
    """Numbers of steps of DynaFed's inner loop."""
    images: PositiveInt = 30
    seed: NonNegativeInt = 0
    output: Path | None = None
    """Folder of the table, a JSON file."""


def compare_precisions(arguments: Arguments) -> int:
    """Print and write the relative errors of all gradients; return the exit status, 0."""
    rows = {}
    for name, options in NETWORKS.items():
        for title, gradient in _gradient_functions(arguments).items():
            model = make_model(name, IMAGE_SHAPE, NUM_CLASSES, **options)
            rows[f"{title}, {name}"] = _relative_errors(model, gradient, arguments)
    print("| gradient | float32 | tf32 (operands) | bfloat16 |\n|---|---|---|---|")
    for title, errors in rows.items():
        print(f"| {title} | {' | '.join(f'{error:.1e}' for error in errors.values())} |")
    if arguments.output is not None:
        text = json.dumps(rows, indent=1) + "\n"
        (make_output_directory(arguments.output) / "precision.json").write_text(text)
    return 0


def _relative_errors(model: Model, gradient: Callable, arguments: Arguments) -> dict[str, float]:
    """Return the relative errors of a gradient by precision."""
    with enable_x64(True):
        variables, data = _make_problem(model, arguments, np.float64)
        exact = np.asarray(ravel_pytree(jax.jit(partial(gradient, model))(variables, data))[0])
    variables, data = _make_problem(model, arguments, np.float32)
    models_by_precision = {
        FLOAT32: configure_compute(model, precision=FLOAT32),
        TF32: _with_tf32_operands(model),
        BFLOAT16: configure_compute(model, precision=BFLOAT16),
    }
    errors = {}
    for precision, model_variant in models_by_precision.items():
        vector = ravel_pytree(jax.jit(partial(gradient, model_variant))(variables, data))[0]
        absolute_error = np.linalg.norm(np.asarray(vector, np.float64) - exact)
        errors[precision] = float(absolute_error / np.linalg.norm(exact))
    return errors


def _make_problem(model: Model, arguments: Arguments, dtype: Any) -> tuple[Tree, Tree]:
    """Return variables and data, images around a mean for each class, in a dtype."""
    with enable_x64(False):
        initial_variables = jax.tree.map(np.asarray, model.init(jax.random.key(arguments.seed)))
    rng = np.random.default_rng(arguments.seed)
    labels = np.arange(arguments.images) % NUM_CLASSES
    means = rng.normal(size=(NUM_CLASSES, *IMAGE_SHAPE))
    images = means[labels] + rng.normal(size=(2, arguments.images, *IMAGE_SHAPE))
    images = images.astype(np.float32)  # what every type can hold
    cast = partial(jax.tree.map, lambda leaf: jnp.asarray(leaf, dtype))
    data = {"real": cast(images[0]), "made": cast(images[1]), "labels": labels}
    return cast(initial_variables), data


def _with_tf32_operands(model: Model) -> Model:
    """Round the parameters and images of a network to tf32, as products do."""

    def with_rounding(function: Callable) -> Callable:
        def call(variables, x, **apply_options):
            params = jax.tree.map(_round_to_tf32, variables["params"])
            return function({**variables, "params": params}, _round_to_tf32(x), **apply_options)

        return call

    assert model.embed is not None
    return model._replace(apply=with_rounding(model.apply), embed=with_rounding(model.embed))


@jax.custom_jvp
def _round_to_tf32(x: jax.Array) -> jax.Array:
    """Round to the nearest number with 10 bits of fraction; the derivative is 1."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    half = jnp.uint32(1 << (DROPPED_FRACTION_BITS - 1))
    rounded_bits = (bits + half) >> DROPPED_FRACTION_BITS << DROPPED_FRACTION_BITS
    return jax.lax.bitcast_convert_type(rounded_bits, jnp.float32)


@_round_to_tf32.defjvp
def _(primals, tangents):
    return _round_to_tf32(*primals), tangents[0]


# --- the gradients -------------------------------------------------------------------------------


def _gradient_functions(arguments: Arguments) -> dict[str, Callable]:
    """Return the functions `(model, variables, data) -> tree` by title."""
    return {
        "a client's step (FedAvg; FSL's clients and server)": _step_gradient,
        **{
            f"DynaFed's synthesis, {steps} inner steps": partial(_synthesis_gradient, steps=steps)
            for steps in arguments.steps
        },
        "FedDM's and FedAF's matching": _matching_gradient,
        "FedAMP's distances of models, after 5 steps": _model_distances,
    }


def _loss(model: Model, variables: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = model.apply(variables, images, train=True)[0]
    return -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels].mean()


def _step_gradient(model: Model, variables: Tree, data: Tree) -> Tree:
    """Return the gradient of a batch with respect to the parameters."""
    return jax.grad(
        lambda params: _loss(model, {**variables, "params": params}, data["real"], data["labels"])
    )(variables["params"])


def _train_sgd(model: Model, variables: Tree, images: jax.Array, labels: jax.Array, steps: int):
    """Return the parameters after some steps of SGD."""

    def step(params, _):
        variables_with_params = {**variables, "params": params}
        gradient = _step_gradient(model, variables_with_params, {"real": images, "labels": labels})
        return jax.tree.map(lambda w, g: w - STEP_SIZE * g, params, gradient), None

    return jax.lax.scan(step, variables["params"], length=steps)[0]


def _synthesis_gradient(model: Model, variables: Tree, data: Tree, *, steps: int) -> Tree:
    """Return the gradient with respect to the synthetic images through the inner loop.

    The target is the model after equally many steps on real images in the same precision.
    """
    start, unravel = ravel_pytree(variables["params"])
    target = ravel_pytree(_train_sgd(model, variables, data["real"], data["labels"], steps))[0]
    labels = jax.nn.one_hot(data["labels"], NUM_CLASSES, dtype=start.dtype)

    def loss(synthetic: SyntheticData) -> jax.Array:
        task = SyntheticTask(
            lambda params, x: model.apply({**variables, "params": params}, x, train=True)[0],
            augment_strategy="none",
        )
        end = unroll(task, unravel, start, synthetic, jax.random.key(0), num_steps=steps)
        return matching_loss(end, start, target)

    step_size = jnp.asarray(STEP_SIZE, start.dtype)
    return jax.grad(loss)(SyntheticData(data["made"], labels, step_size)).inputs


def _matching_gradient(model: Model, variables: Tree, data: Tree) -> Tree:
    """Return the gradient of the distance of mean embeddings with respect to the images."""
    embed = model.embed
    assert embed is not None

    def mean_embedding(images):
        return embed(variables, images, train=False)[0].mean(0)

    target = mean_embedding(data["real"])
    return jax.grad(lambda images: distribution_distance(target, mean_embedding(images)))(
        data["made"]
    )


def _model_distances(model: Model, variables: Tree, data: Tree) -> Tree:
    """Return the squared distances of the models of three clients."""
    examples_per_client = len(data["labels"]) // 3
    parts = [slice(k * examples_per_client, (k + 1) * examples_per_client) for k in range(3)]
    models = [
        _train_sgd(model, variables, data["real"][part], data["labels"][part], 5) for part in parts
    ]
    return compute_squared_distances(jax.tree.map(lambda *leaves: jnp.stack(leaves), *models))


main = make_config_program(Arguments, compare_precisions)

if __name__ == "__main__":
    raise SystemExit(main())
