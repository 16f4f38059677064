"""How much memory a program takes: at least, as it was traced, and exactly, once compiled."""

import math
from collections.abc import Iterator
from typing import Any

import jax

# What these make is in memory: XLA fuses what is done value by value, but not what it calls a
# library for, nor what a loop carries or collects.
_MATERIALIZING_PRIMITIVES = ("dot_general", "conv_general_dilated", "scan", "while", "sort")


def _count_bytes(tree: Any) -> int:
    """Of arrays or of their shapes, in full."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compute_compiled_bytes(program: Any, inputs: tuple) -> int:
    """What a jitted program needs on each device, arguments and results with it, as the compiler
    says. Compiles it; nothing is allocated for it."""
    return get_compiled_bytes(program.lower(*inputs).compile())


def get_compiled_bytes(compiled: Any) -> int:
    """The same of one that is compiled."""
    memory_stats = compiled.memory_analysis()
    return (
        memory_stats.argument_size_in_bytes
        + memory_stats.output_size_in_bytes
        - memory_stats.alias_size_in_bytes
        + memory_stats.temp_size_in_bytes
    )


def lower_bound_bytes(jaxpr: Any) -> int:
    """The most that one step of a traced program (a `ClosedJaxpr`, or `Jaxpr`) makes at a time, on
    each device: the program cannot do with less.

    Cost: a pass over what was traced.
    """
    return max(_materialized_bytes(getattr(jaxpr, "jaxpr", jaxpr)), default=0)


def _materialized_bytes(jaxpr: Any) -> Iterator[int]:
    live_variables = {id(var) for var in jaxpr.outvars}
    for equation in reversed(jaxpr.eqns):
        live_outputs = [var for var in equation.outvars if id(var) in live_variables]
        if not live_outputs and not equation.effects:
            continue  # XLA leaves it out, too
        live_variables |= {id(var) for var in equation.invars}
        has_single_iteration = equation.params.get("length") == 1  # a loop of one step is no loop
        if equation.primitive.name in _MATERIALIZING_PRIMITIVES and not has_single_iteration:
            yield _count_bytes([var.aval for var in live_outputs])
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _materialized_bytes(getattr(inner, "jaxpr", inner))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")
