"""Dependence of a network's outputs on each other, from a trace of the network."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from fedjax_het.nn.flops import iter_inner_jaxprs

_Node = int  # a number for each value of a trace; equal operations on equal values have one number


def is_computed_from(function: Callable, x: Any) -> bool:
    """Return whether the second output of a network is computed from the first output alone.

    The second output may depend on parameters and constants, too, but on the input only through
    the first output. Cost: a trace.

    Args:
      function: `function(x) -> (first, second)`, two arrays.
      x: the input or its shape.

    Returns:
      True for (features, logits) whose logits are a function of the features.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.nn.output_dependence import is_computed_from
      >>> batch = jnp.zeros((2, 3))
      >>> is_computed_from(lambda x: (x + 1, jnp.tanh(x + 1) * 2), batch)
      True
      >>> is_computed_from(lambda x: (x, x * 2), batch)
      True
      >>> is_computed_from(lambda x: (x + 1, x * 2), batch)
      False
    """
    closed = jax.make_jaxpr(function)(x)
    graph = _Graph()
    inputs = [graph.add_source() for _ in closed.jaxpr.invars]
    first, second = graph.add_program(closed.jaxpr, inputs)
    reached = set(graph.list_ancestors(second, barrier=first))
    return first in reached and (first in inputs or reached.isdisjoint(inputs))


class _Graph:
    """The values of a trace, and the values from which each is computed."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.parents: dict[_Node, tuple[_Node, ...]] = {}
        self.known: dict[Any, list[_Node]] = {}

    def add_source(self) -> _Node:
        """Add a value that is computed from no other value."""
        return next(self.numbers)

    def add_program(self, jaxpr: Any, inputs: list[_Node]) -> list[_Node]:
        """Add the operations of a jaxpr, with the operations of functions that it calls.

        Args:
          jaxpr: the program.
          inputs: the values of its arguments.

        Returns:
          The values of its results.
        """
        nodes: dict[Any, _Node] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(variable: Any) -> _Node:
            if hasattr(variable, "val"):  # a literal number
                key = ("literal", str(variable.val), str(variable.aval))
                return self.known.setdefault(key, [self.add_source()])[0]
            if variable not in nodes:  # a constant
                nodes[variable] = self.add_source()
            return nodes[variable]

        for equation in jaxpr.eqns:
            arguments = [read(variable) for variable in equation.invars]
            results = self._add_operation(equation, arguments)
            nodes.update(zip(equation.outvars, results, strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def _add_operation(self, equation: Any, arguments: list[_Node]) -> list[_Node]:
        called = list(iter_inner_jaxprs(equation))
        if len(called) >= 1 and equation.primitive.name not in ("scan", "while", "cond"):
            program = called[0]
            sizes = len(program.invars), len(program.outvars)
            if sizes == (len(arguments), len(equation.outvars)):
                return self.add_program(program, arguments)
        key = (equation.primitive.name, str(equation.params), tuple(arguments))
        if key not in self.known or equation.effects:
            results = [self.add_source() for _ in equation.outvars]
            self.parents.update(dict.fromkeys(results, tuple(arguments)))
            self.known[key] = results
        return self.known[key]

    def list_ancestors(self, node: _Node, *, barrier: _Node) -> Iterator[_Node]:
        """Yield a value and the values from which it is computed, not beyond a barrier."""
        pending, visited = [node], set()
        while pending:
            current = pending.pop()
            if current not in visited:
                visited.add(current)
                yield current
                if current != barrier:
                    pending.extend(self.parents.get(current, ()))
