"""How many floating-point operations a traced program takes, where loops end by what they read.

A program is gone through as it was traced. Products are known by their shapes, and so is how often
they are made, up to loops and branches that are decided as the program runs. The counting program
has these loops and branches, what decides them, and a counter: nothing else, so that it takes next
to no time. What the program itself leaves out, since nothing comes of it, is not counted.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from fedjax_het.nn.flops import count_multiply_adds

Mask = tuple[bool, ...]
_CALL_PARAMS = (
    "jaxpr",
    "call_jaxpr",
    "fun_jaxpr",
)  # what equations name the program that they go into
_WORD_BITS = 32  # bits


class FlopsProgram(NamedTuple):
    """A program that counts.

    inputs, outputs: of the counted program's leaves, those that it takes and returns, in order.
    run(leaves) -> (leaves, number of floating-point operations).
    """

    inputs: Mask
    outputs: Mask
    run: Callable[[Sequence[Any]], tuple[list[Any], int]]


def make_flops_program(
    closed_jaxpr: Any, required_outputs: Sequence[bool] | None = None
) -> FlopsProgram:
    """The program that counts the floating-point operations of a traced one (`ClosedJaxpr`).

    wanted: which of its outputs to return besides (default: none).
    The number is 2 for each multiply-add of a product; what is done value by value (norms, pooling,
    optimisers) is not in it. It is exact below 2^64. Loops over lanes that go in step, and batches
    that are filled up, count as what they are: executed.
    Raises NotImplementedError for a product inside of something that is not known.
    """
    jaxpr = closed_jaxpr.jaxpr
    outputs = tuple(required_outputs or (False,) * len(jaxpr.outvars))
    analyzer = _JaxprAnalyzer()
    used_outputs = (True,) * len(jaxpr.outvars)
    inputs = analyzer.plan_counting(jaxpr, used_outputs, outputs).inputs

    @jax.jit
    def program(leaves):
        values = _scatter_values(inputs, leaves)
        total, results = analyzer.run_counting(
            jaxpr, closed_jaxpr.consts, values, used_outputs, outputs, _zero_count()
        )
        return _select(outputs, results), total

    def count(leaves: Sequence[Any]) -> tuple[list[Any], int]:
        results, (high, low) = program(list(leaves))
        return results, (int(high) << _WORD_BITS) + int(low)

    return FlopsProgram(inputs, outputs, count)


class _LiveProgram(NamedTuple):
    steps: list  # (equation, which of its results are used), the last first
    inputs: Mask


class _CountingPlan(NamedTuple):
    steps: list  # (equation, used, wanted) of what is to be done to count, in order
    inputs: Mask
    static_flops: int  # operations of all others


class _JaxprAnalyzer:
    """Goes through programs; what was found of one is kept.

    `used` says which results of a program or equation the counted program has a use for, `wanted`
    which of these the counting one has: what decides loops and branches, or is asked for.
    """

    def __init__(self) -> None:
        self._cache: dict[tuple, Any] = {}

    def analyze_live(self, jaxpr: Any, used: Mask) -> _LiveProgram:
        """What is left of a program where only these of its results are used."""
        key = (id(jaxpr), used)
        if key not in self._cache:
            live_variables, steps = _select_variables(jaxpr.outvars, used), []
            for equation in reversed(jaxpr.eqns):
                results = tuple(var in live_variables for var in equation.outvars)
                if any(results):
                    steps.append((equation, results))
                    live_variables |= _select_variables(
                        equation.invars, self._equation_inputs(equation, results)
                    )
            self._cache[key] = _LiveProgram(
                steps, tuple(var in live_variables for var in jaxpr.invars)
            )
        return self._cache[key]

    def plan_counting(self, jaxpr: Any, used: Mask, required: Mask) -> _CountingPlan:
        """What is to be done to count."""
        key = (id(jaxpr), used, required)
        if key not in self._cache:
            live_variables, steps, fixed = _select_variables(jaxpr.outvars, required), [], 0
            for equation, results in self.analyze_live(jaxpr, used).steps:
                required_results = tuple(var in live_variables for var in equation.outvars)
                num_flops = self.static_flops(equation, results)
                if num_flops is not None and not any(required_results):
                    fixed += num_flops
                    continue
                steps.append((equation, results, required_results))
                live_variables |= _select_variables(
                    equation.invars, self._equation_inputs(equation, results, required_results)
                )
            inputs = tuple(var in live_variables for var in jaxpr.invars)
            self._cache[key] = _CountingPlan(steps[::-1], inputs, fixed)
        return self._cache[key]

    def static_flops(self, equation: Any, used: Mask) -> int | None:
        """Floating-point operations; None where they are known only as it runs."""
        products = count_multiply_adds(equation)
        if products is not None:
            return 2 * products
        params, name = equation.params, equation.primitive.name
        if name == "while":
            carry = self._while_carry_mask(equation, used)
            condition_mask = self._program_static_flops(params["cond_jaxpr"].jaxpr, (True,))
            body_mask = self._program_static_flops(params["body_jaxpr"].jaxpr, carry)
            if condition_mask != 0:
                raise NotImplementedError("a product in the condition of a loop")
            return 0 if body_mask == 0 else None
        if name == "scan":
            body_flops = self._program_static_flops(
                params["jaxpr"].jaxpr, self._scan_result_mask(equation, used)
            )
            return None if body_flops is None else body_flops * params["length"]
        if name == "cond":
            outputs = {
                self._program_static_flops(branch.jaxpr, used) for branch in params["branches"]
            }
            return outputs.pop() if len(outputs) == 1 else None
        inner = _called_program(equation)
        if inner is not None:
            return self._program_static_flops(inner[0], used)
        for program in jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(program):
                jaxpr: Any = getattr(program, "jaxpr", program)
                if self._program_static_flops(jaxpr, (True,) * len(jaxpr.outvars)) != 0:
                    raise NotImplementedError(f"a product inside of {name!r}")
        return 0

    def _program_static_flops(self, jaxpr: Any, used: Mask) -> int | None:
        total = 0
        for step in self.analyze_live(jaxpr, used).steps:
            num_flops = self.static_flops(*step)
            if num_flops is None:
                return None
            total += num_flops
        return total

    def _program_inputs(self, jaxpr: Any, used: Mask, required: Mask | None) -> Mask:
        if required is None:
            return self.analyze_live(jaxpr, used).inputs
        return self.plan_counting(jaxpr, used, required).inputs

    def _equation_inputs(self, equation: Any, used: Mask, required: Mask | None = None) -> Mask:
        """Of an equation, those that its used results need; where `wanted` is given, those that the
        counting program needs."""
        params, name = equation.params, equation.primitive.name
        if name == "while":
            num_cond_consts, num_body_consts = params["cond_nconsts"], params["body_nconsts"]
            carry = self._while_carry_mask(equation, used, required)
            condition_mask = self._program_inputs(
                params["cond_jaxpr"].jaxpr, (True,), _mask_if_required(required, (True,))
            )
            body, live_mask = params["body_jaxpr"].jaxpr, self._while_carry_mask(equation, used)
            body_mask = self._program_inputs(body, live_mask, _mask_if_required(required, carry))
            return (*condition_mask[:num_cond_consts], *body_mask[:num_body_consts], *carry)
        if name == "scan":
            num_consts, num_carry = params["num_consts"], params["num_carry"]
            results = self._scan_result_mask(equation, used, required)
            live_mask = self._scan_result_mask(equation, used)
            outputs = self._program_inputs(
                params["jaxpr"].jaxpr, live_mask, _mask_if_required(required, results)
            )
            num_leading = num_consts + num_carry
            return (*outputs[:num_consts], *results[:num_carry], *outputs[num_leading:])
        if name == "cond":
            branch_masks = [
                self._program_inputs(branch.jaxpr, used, required) for branch in params["branches"]
            ]
            return (True, *_union_masks(*branch_masks))
        inner = _called_program(equation)
        if inner is not None:
            return self._program_inputs(inner[0], used, required)
        return (True,) * len(equation.invars)

    def _while_carry_mask(self, equation: Any, used: Mask, required: Mask | None = None) -> Mask:
        """What of a `while` is carried: its results, and what these and its end depend on."""
        params = equation.params
        num_cond_consts, num_body_consts = params["cond_nconsts"], params["body_nconsts"]
        condition_required = _mask_if_required(required, (True,))
        carry = used if required is None else required
        live_mask = None if required is None else self._while_carry_mask(equation, used)
        carry = _union_masks(
            carry,
            self._program_inputs(params["cond_jaxpr"].jaxpr, (True,), condition_required)[
                num_cond_consts:
            ],
        )
        while True:
            body = params["body_jaxpr"].jaxpr
            outputs = (
                self._program_inputs(body, carry, None)
                if live_mask is None
                else self._program_inputs(body, live_mask, carry)
            )
            grown_mask = _union_masks(carry, outputs[num_body_consts:])
            if grown_mask == carry:
                return carry
            carry = grown_mask

    def _scan_result_mask(self, equation: Any, used: Mask, required: Mask | None = None) -> Mask:
        """Of a `scan`: which of the results of its body, what is carried first."""
        params = equation.params
        num_consts, num_carry = params["num_consts"], params["num_carry"]
        results = used if required is None else required
        live_mask = None if required is None else self._scan_result_mask(equation, used)
        jaxpr = params["jaxpr"].jaxpr
        while True:
            outputs = (
                self._program_inputs(jaxpr, results, None)
                if live_mask is None
                else self._program_inputs(jaxpr, live_mask, results)
            )
            carried_mask = outputs[num_consts : num_consts + num_carry]
            grown_mask = (*_union_masks(results[:num_carry], carried_mask), *results[num_carry:])
            if grown_mask == results:
                return results
            results = grown_mask

    # --- the counting program ---------------------------------------------------------------------

    def run_counting(self, jaxpr, num_consts, values, used: Mask, required: Mask, total):
        """Count: -> (total, results; None for those not wanted). Nothing is `given` where nothing
        is needed."""
        plan = self.plan_counting(jaxpr, used, required)
        environment = dict(zip(jaxpr.constvars, num_consts, strict=True))
        environment |= dict(zip(jaxpr.invars, values, strict=True))

        def read(var):
            return var.val if isinstance(var, Literal) else environment.get(var)

        total = _add_to_count(total, plan.static_flops)
        for equation, results, required_results in plan.steps:
            inputs = [read(var) for var in equation.invars]
            total, outputs = self._run_equation(equation, inputs, results, required_results, total)
            environment |= dict(zip(equation.outvars, outputs, strict=True))
        return total, [
            read(var) if is_ else None for var, is_ in zip(jaxpr.outvars, required, strict=True)
        ]

    def _run_equation(self, equation, inputs, used: Mask, required: Mask, total):
        name = equation.primitive.name
        if name == "while":
            return self._run_while(equation, inputs, used, required, total)
        if name == "scan":
            return self._run_scan(equation, inputs, used, required, total)
        if name == "cond":
            return self._run_cond(equation, inputs, used, required, total)
        inner = _called_program(equation)
        if inner is not None:
            return self.run_counting(*inner, inputs, used, required, total)
        num_flops = self.static_flops(equation, used)
        assert num_flops is not None
        results = equation.primitive.bind(*inputs, **equation.params)
        results = results if equation.primitive.multiple_results else [results]
        return _add_to_count(total, num_flops), results

    def _run_while(self, equation, inputs, used, required, total):
        params = equation.params
        num_cond_consts, num_body_consts = params["cond_nconsts"], params["body_nconsts"]
        live_mask, carry = (
            self._while_carry_mask(equation, used),
            self._while_carry_mask(equation, used, required),
        )
        condition_consts, body_consts = (
            inputs[:num_cond_consts],
            inputs[num_cond_consts : num_cond_consts + num_body_consts],
        )
        condition, body = params["cond_jaxpr"], params["body_jaxpr"]

        def is_continuing(num_carry):
            values = [*condition_consts, *_scatter_values(carry, num_carry[1])]
            _, (outputs,) = self.run_counting(
                condition.jaxpr, condition.consts, values, (True,), (True,), _zero_count()
            )
            return outputs

        def step(num_carry):
            total, values = num_carry
            body_inputs = [*body_consts, *_scatter_values(carry, values)]
            total, outputs = self.run_counting(
                body.jaxpr, body.consts, body_inputs, live_mask, carry, total
            )
            return total, _select(carry, outputs)

        start = total, _select(carry, inputs[num_cond_consts + num_body_consts :])
        total, outputs = jax.lax.while_loop(is_continuing, step, start)
        return total, _scatter_values(carry, outputs)

    def _run_scan(self, equation, inputs, used, required, total):
        params = equation.params
        num_consts, num_carry = params["num_consts"], params["num_carry"]
        live_mask, results = (
            self._scan_result_mask(equation, used),
            self._scan_result_mask(equation, used, required),
        )
        carry, stacked = results[:num_carry], results[num_carry:]
        body, rows = params["jaxpr"], inputs[num_consts + num_carry :]
        is_present = tuple(row is not None for row in rows)

        def step(carry_values, row_values):
            total, values = carry_values
            body_inputs = [
                *inputs[:num_consts],
                *_scatter_values(carry, values),
                *_scatter_values(is_present, row_values),
            ]
            total, outputs = self.run_counting(
                body.jaxpr, body.consts, body_inputs, live_mask, results, total
            )
            return (total, _select(carry, outputs[:num_carry])), _select(
                stacked, outputs[num_carry:]
            )

        start = total, _select(carry, inputs[num_consts : num_consts + num_carry])
        (total, last), stacked_values = jax.lax.scan(
            step,
            start,
            _select(is_present, rows),
            length=params["length"],
            reverse=params["reverse"],
        )
        return total, [*_scatter_values(carry, last), *_scatter_values(stacked, stacked_values)]

    def _run_cond(self, equation, inputs, used, required, total):
        index, *operands = inputs
        is_present = tuple(operand is not None for operand in operands)

        def branch(closed_jaxpr):
            def run_branch(total, operands):
                values = _scatter_values(is_present, operands)
                total, outputs = self.run_counting(
                    closed_jaxpr.jaxpr, closed_jaxpr.consts, values, used, required, total
                )
                return total, [jnp.asarray(value) for value in _select(required, outputs)]

            return run_branch

        branches = [branch(closed) for closed in equation.params["branches"]]
        total, outputs = jax.lax.switch(index, branches, total, _select(is_present, operands))
        return total, _scatter_values(required, outputs)


def _called_program(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """(program, its constants) of an equation that calls one with all of its inputs."""
    if equation.primitive.name == "shard_map":
        return None
    for name in _CALL_PARAMS:
        program = equation.params.get(name)
        if program is not None and _is_jaxpr(program):
            jaxpr = getattr(program, "jaxpr", program)
            if len(jaxpr.invars) == len(equation.invars):
                return jaxpr, getattr(program, "consts", ())
    return None


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def _select_variables(variables: Sequence[Any], mask: Mask) -> set:
    pairs = zip(variables, mask, strict=True)
    return {var for var, is_ in pairs if is_ and not isinstance(var, Literal)}


def _mask_if_required(required: Mask | None, mask: Mask) -> Mask | None:
    return None if required is None else mask


def _union_masks(*masks: Mask) -> Mask:
    return tuple(map(any, zip(*masks, strict=True)))


def _select(mask: Mask, values: Sequence[Any]) -> list[Any]:
    return [value for value, is_ in zip(values, mask, strict=True) if is_]


def _scatter_values(mask: Mask, values: Sequence[Any]) -> list[Any]:
    """The inverse of `_chosen`, None in between."""
    remaining = iter(values)
    return [next(remaining) if is_ else None for is_ in mask]


def _zero_count():
    return jnp.uint32(0), jnp.uint32(0)


def _add_to_count(total, increment: int):
    """A number of two words and one of Python."""
    high, low = total
    low_word = np.uint32(increment & (2**_WORD_BITS - 1))
    low_sum = low + low_word
    return high + np.uint32(increment >> _WORD_BITS) + (low_sum < low_word).astype(
        jnp.uint32
    ), low_sum
