"""How much memory a program takes: at least, as it was traced, and exactly, once compiled."""

import math
from collections.abc import Iterator
from typing import Any

import jax

# What these make is in memory: XLA fuses what is done value by value, but not what it calls a
# library for, nor what a loop carries or collects.
_MADE = ("dot_general", "conv_general_dilated", "scan", "while", "sort")


def _bytes(tree: Any) -> int:
    """Of arrays or of their shapes, in full."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compiled_bytes(program: Any, inputs: tuple) -> int:
    """What a jitted program needs on each device, arguments and results with it, as the compiler
    says. Compiles it; nothing is allocated for it."""
    return bytes_of_compiled(program.lower(*inputs).compile())


def bytes_of_compiled(compiled: Any) -> int:
    """The same of one that is compiled."""
    need = compiled.memory_analysis()
    return (
        need.argument_size_in_bytes
        + need.output_size_in_bytes
        - need.alias_size_in_bytes
        + need.temp_size_in_bytes
    )


def least_bytes(jaxpr: Any) -> int:
    """The most that one step of a traced program (a `ClosedJaxpr`, or `Jaxpr`) makes at a time, on
    each device: the program cannot do with less.

    Cost: a pass over what was traced.
    """
    return max(_made_by_steps(getattr(jaxpr, "jaxpr", jaxpr)), default=0)


def _made_by_steps(jaxpr: Any) -> Iterator[int]:
    needed = {id(var) for var in jaxpr.outvars}
    for step in reversed(jaxpr.eqns):
        made = [var for var in step.outvars if id(var) in needed]
        if not made and not step.effects:
            continue  # XLA leaves it out, too
        needed |= {id(var) for var in step.invars}
        once = step.params.get("length") == 1  # a loop of one step is no loop
        if step.primitive.name in _MADE and not once:
            yield _bytes([var.aval for var in made])
        for inner in jax.tree.leaves(list(step.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                yield from _made_by_steps(getattr(inner, "jaxpr", inner))


def _is_program(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")
