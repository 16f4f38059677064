"""Count of the floating-point operations of a traced program whose loops depend on its inputs.

The shapes of a product determine its operations. The number of its executions is known only when
the program runs, since loops and branches depend on values. `FlopCounter` therefore adds a counter
to the traced program. It removes everything that neither the counter nor a loop or branch needs,
above all the products. The rest runs in next to no time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from fedjax_het.nn.flops import count_multiply_adds, iter_inner_jaxprs, iter_multiply_adds

Mask = tuple[bool, ...]
# Parameters of equations that hold a program which runs once, with the equation's inputs.
_CALL_PARAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


class FlopCounter:
    """The counting form of a traced program.

    A product counts 2 operations per multiply-add; elementwise work (norms, pooling, optimizers)
    does not count, nor do products whose result the program does not use. Loops over lanes that run
    in parallel, and padded batches, count as executed. The count is exact below 2^64.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.core.flops_interpreter import FlopCounter
      >>> def power(x, n):
      ...     return jax.lax.fori_loop(0, n, lambda i, product: product @ x, x)
      >>> counter = FlopCounter(jax.make_jaxpr(power)(jnp.ones((3, 3)), 5))
      >>> counter.find_inputs()
      (False, True)
      >>> counter.run([None, 5])
      ([], 270)
    """

    def __init__(self, closed_jaxpr: Any):
        """Add the counter.

        Cost: a trace of the program.

        Args:
          closed_jaxpr: the traced program, a `ClosedJaxpr`.

        Raises:
          NotImplementedError: if the program has a product inside an unknown operation.
        """
        self._liveness = _Liveness()
        jaxpr = closed_jaxpr.jaxpr

        def count(*inputs):
            used, zero = (True,) * len(jaxpr.outvars), (jnp.uint32(0), jnp.uint32(0))
            total, outputs = self._run(jaxpr, closed_jaxpr.consts, inputs, used, zero)
            return *outputs, *total

        inputs = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in jaxpr.invars]
        self._counting = jax.make_jaxpr(count)(*inputs)
        self._compiled: dict[Mask, Any] = {}

    def find_inputs(self, required: Mask = ()) -> Mask:
        """Find the inputs that decide how much is done.

        Args:
          required: for each of the program's first outputs, whether to compute it.

        Returns:
          For each input, whether the count or a required output depends on it.
        """
        return self._liveness.analyze(self._counting.jaxpr, self._mark_outputs(required)).inputs

    def run(self, leaves: Sequence[Any], required: Mask = ()) -> tuple[list[Any], int]:
        """Count the operations for these inputs.

        Cost: a compilation of the counting program for each value of `required`.

        Args:
          leaves: the inputs; None for inputs that `find_inputs` does not mark.
          required: for each of the program's first outputs, whether to compute it.

        Returns:
          The program's first `len(required)` outputs, with None for outputs that are not required;
          and the number of floating-point operations.
        """
        inputs = self.find_inputs(required)
        if required not in self._compiled:
            outputs, counting = self._mark_outputs(required), self._counting

            @jax.jit
            def program(leaves):
                values = _scatter(inputs, leaves)
                _, results = self._run(counting.jaxpr, counting.consts, values, outputs, None)
                return _select(outputs, results)

            self._compiled[required] = program
        *results, high, low = self._compiled[required](_select(inputs, leaves))
        return _scatter(required, results), (int(high) << 32) + int(low)

    def _mark_outputs(self, required: Mask) -> Mask:
        """Return a mask of the counting program's outputs, of which the last two are the count."""
        num_others = len(self._counting.jaxpr.outvars) - len(required) - 2
        return (*required, *(False,) * num_others, True, True)

    def _run(self, jaxpr, consts, values, used: Mask, count):
        """Evaluate the used part of a program; a counter of None does not count.

        Returns the counter and the outputs; unused ones are None or missing from the evaluation.
        """
        environment = dict(zip(jaxpr.constvars, consts, strict=True))
        environment |= dict(zip(jaxpr.invars, values, strict=True))

        def read(var):
            return var.val if isinstance(var, Literal) else environment.get(var)

        num_flops = 0
        for equation, outputs in self._liveness.analyze(jaxpr, used).steps:
            inputs = [read(var) for var in equation.invars]
            name, called = equation.primitive.name, _find_called_program(equation)
            if name in ("while", "scan", "cond"):
                run = getattr(self, f"_run_{name}")
                count, results = run(equation, inputs, outputs, count)
            elif called is not None:
                count, results = self._run(*called, inputs, outputs, count)
            else:
                num_flops += 2 * (count_multiply_adds(equation) or 0)
                for inner in iter_inner_jaxprs(equation):
                    _require_no_product(inner, equation)
                results = equation.primitive.bind(*inputs, **equation.params)
                results = results if equation.primitive.multiple_results else [results]
            environment |= dict(zip(equation.outvars, results, strict=True))
        return _add_to_count(count, num_flops), list(map(read, jaxpr.outvars))

    def _run_while(self, equation, inputs, outputs, count):
        loop = _Loop(equation)
        carry, _ = self._liveness.analyze_loop(loop, outputs)
        condition, body = loop.condition, loop.body
        condition_consts, consts, start = loop.split_inputs(inputs)
        _require_no_product(condition.jaxpr, equation)

        def is_continuing(state):
            values = [*condition_consts, *_scatter(carry, state[1])]
            return self._run(condition.jaxpr, condition.consts, values, (True,), None)[1][0]

        def step(state):
            values = [*consts, *_scatter(carry, state[1])]
            count, results = self._run(body.jaxpr, body.consts, values, carry, state[0])
            return count, _select(carry, results)

        count, results = jax.lax.while_loop(is_continuing, step, (count, _select(carry, start)))
        return count, _scatter(carry, results)

    def _run_scan(self, equation, inputs, outputs, count):
        loop = _Loop(equation)
        carry, _ = self._liveness.analyze_loop(loop, outputs)
        body, num_carry = loop.body, loop.num_carry
        _, consts, values = loop.split_inputs(inputs)
        start, rows = values[:num_carry], values[num_carry:]
        stacked, is_present = outputs[num_carry:], tuple(row is not None for row in rows)

        def step(state, row_values):
            values = [*_scatter(carry, state[1]), *_scatter(is_present, row_values)]
            count, results = self._run(
                body.jaxpr, body.consts, [*consts, *values], (*carry, *stacked), state[0]
            )
            next_state = count, _select(carry, results[:num_carry])
            return next_state, _select(stacked, results[num_carry:])

        (count, last), stacks = jax.lax.scan(
            step,
            (count, _select(carry, start)),
            _select(is_present, rows),
            length=equation.params["length"],
            reverse=equation.params["reverse"],
        )
        return count, [*_scatter(carry, last), *_scatter(stacked, stacks)]

    def _run_cond(self, equation, inputs, outputs, count):
        index, *operands = inputs
        is_present = tuple(operand is not None for operand in operands)

        def make_branch(branch):
            def run_branch(count, operands):
                values = _scatter(is_present, operands)
                count, results = self._run(branch.jaxpr, branch.consts, values, outputs, count)
                return count, [jnp.asarray(value) for value in _select(outputs, results)]

            return run_branch

        branches = [make_branch(branch) for branch in equation.params["branches"]]
        count, results = jax.lax.switch(index, branches, count, _select(is_present, operands))
        return count, _scatter(outputs, results)


class _Loop:
    """The programs of a `while` or `scan`, and the parts of its inputs."""

    def __init__(self, equation: Any):
        params = equation.params
        if equation.primitive.name == "while":
            self.condition, self.num_condition_consts = params["cond_jaxpr"], params["cond_nconsts"]
            self.body, self.num_consts = params["body_jaxpr"], params["body_nconsts"]
            self.num_carry = len(equation.outvars)
        else:
            self.condition, self.num_condition_consts = None, 0
            self.body, self.num_consts = params["jaxpr"], params["num_consts"]
            self.num_carry = params["num_carry"]

    def split_inputs(self, values: Sequence[Any]) -> tuple[Sequence, Sequence, Sequence]:
        """Return the constants of condition and body, and the other inputs."""
        start, end = self.num_condition_consts, self.num_condition_consts + self.num_consts
        return values[:start], values[start:end], values[end:]


class _LiveProgram(NamedTuple):
    jaxpr: Any  # keeps the key of the cache, its id, from being used again
    steps: list[tuple[Any, Mask]]  # equations with their used outputs, in order
    inputs: Mask


class _Liveness:
    """Finds the equations and inputs of a program that some of its outputs depend on."""

    def __init__(self) -> None:
        self._cache: dict[tuple[int, Mask], _LiveProgram] = {}

    def analyze(self, jaxpr: Any, used: Mask) -> _LiveProgram:
        """Return the part of a program that computes the used outputs."""
        key = id(jaxpr), used
        if key not in self._cache:
            live, steps = _select_variables(jaxpr.outvars, used), []
            for equation in reversed(jaxpr.eqns):
                outputs = tuple(var in live for var in equation.outvars)
                if any(outputs):
                    steps.append((equation, outputs))
                    live |= _select_variables(
                        equation.invars, self._find_equation_inputs(equation, outputs)
                    )
            inputs = tuple(var in live for var in jaxpr.invars)
            self._cache[key] = _LiveProgram(jaxpr, steps[::-1], inputs)
        return self._cache[key]

    def analyze_loop(self, loop: "_Loop", outputs: Mask) -> tuple[Mask, Mask]:
        """Return which carried values a loop needs, and which inputs its equation needs."""
        carry, stacked = outputs[: loop.num_carry], outputs[loop.num_carry :]
        condition_inputs: Mask = ()
        if loop.condition is not None:
            condition_inputs = self.analyze(loop.condition.jaxpr, (True,)).inputs
            carry = _union_masks(carry, condition_inputs[loop.num_condition_consts :])
        while True:
            inputs = self.analyze(loop.body.jaxpr, (*carry, *stacked)).inputs
            consts, others = inputs[: loop.num_consts], inputs[loop.num_consts :]
            grown = _union_masks(carry, others[: loop.num_carry])
            if grown == carry:
                condition_consts = condition_inputs[: loop.num_condition_consts]
                return carry, (*condition_consts, *consts, *carry, *others[loop.num_carry :])
            carry = grown

    def _find_equation_inputs(self, equation: Any, outputs: Mask) -> Mask:
        if equation.primitive.name in ("while", "scan"):
            return self.analyze_loop(_Loop(equation), outputs)[1]
        if equation.primitive.name == "cond":
            branches = equation.params["branches"]
            return (True, *_union_masks(*(self.analyze(b.jaxpr, outputs).inputs for b in branches)))
        called = _find_called_program(equation)
        if called is not None:
            return self.analyze(called[0], outputs).inputs
        return (True,) * len(equation.invars)


def _find_called_program(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return program and constants of an equation that calls one with all of its inputs."""
    if equation.primitive.name in ("shard_map", "while", "scan", "cond"):
        return None
    for name in _CALL_PARAMS:
        program = equation.params.get(name)
        jaxpr = getattr(program, "jaxpr", program)
        if jaxpr is not None and len(jaxpr.invars) == len(equation.invars):
            return jaxpr, getattr(program, "consts", ())
    return None


def _require_no_product(jaxpr: Any, equation: Any) -> None:
    """Raise NotImplementedError for a product that would not be counted."""
    if any(iter_multiply_adds(jaxpr)):
        raise NotImplementedError(f"a product inside {equation.primitive.name!r}")


def _select_variables(variables: Sequence[Any], mask: Mask) -> set:
    return {var for var in _select(mask, variables) if not isinstance(var, Literal)}


def _union_masks(*masks: Mask) -> Mask:
    return tuple(map(any, zip(*masks, strict=True)))


def _select(mask: Mask, values: Sequence[Any]) -> list[Any]:
    return [value for value, is_selected in zip(values, mask, strict=True) if is_selected]


def _scatter(mask: Mask, values: Sequence[Any]) -> list[Any]:
    """Return the inverse of `_select`, with None for the values that were left out."""
    remaining = iter(values)
    return [next(remaining) if is_selected else None for is_selected in mask]


def _add_to_count(count, increment: int):
    """Add to a counter of two words of 32 bits; None stays None."""
    if count is None:
        return None
    high, low = count
    low_word = np.uint32(increment & (2**32 - 1))
    low_sum = low + low_word
    carry = (low_sum < low_word).astype(jnp.uint32)
    return high + np.uint32(increment >> 32) + carry, low_sum
