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

from fedjax_het.nn.products import multiply_adds

Mask = tuple[bool, ...]
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # what equations name the program that they go into
_WORD = 32  # bits


class Counting(NamedTuple):
    """A program that counts.

    inputs, outputs: of the counted program's leaves, those that it takes and returns, in order.
    run(leaves) -> (leaves, number of floating-point operations).
    """

    inputs: Mask
    outputs: Mask
    run: Callable[[Sequence[Any]], tuple[list[Any], int]]


def counting(closed: Any, wanted: Sequence[bool] | None = None) -> Counting:
    """The program that counts the floating-point operations of a traced one (`ClosedJaxpr`).

    wanted: which of its outputs to return besides (default: none).
    The number is 2 for each multiply-add of a product; what is done value by value (norms, pooling,
    optimisers) is not in it. It is exact below 2^64. Loops over lanes that go in step, and batches
    that are filled up, count as what they are: executed.
    Raises NotImplementedError for a product inside of something that is not known.
    """
    jaxpr = closed.jaxpr
    outputs = tuple(wanted or (False,) * len(jaxpr.outvars))
    look = _Look()
    used = (True,) * len(jaxpr.outvars)
    inputs = look.plan(jaxpr, used, outputs).inputs

    @jax.jit
    def program(leaves):
        given = _spread(inputs, leaves)
        total, found = look.run(jaxpr, closed.consts, given, used, outputs, _nothing())
        return _chosen(outputs, found), total

    def count(leaves: Sequence[Any]) -> tuple[list[Any], int]:
        found, (high, low) = program(list(leaves))
        return found, (int(high) << _WORD) + int(low)

    return Counting(inputs, outputs, count)


class _Live(NamedTuple):
    steps: list  # (equation, which of its results are used), the last first
    inputs: Mask


class _Planned(NamedTuple):
    steps: list  # (equation, used, wanted) of what is to be done to count, in order
    inputs: Mask
    fixed: int  # operations of all others


class _Look:
    """Goes through programs; what was found of one is kept.

    `used` says which results of a program or equation the counted program has a use for, `wanted`
    which of these the counting one has: what decides loops and branches, or is asked for.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple, Any] = {}

    def live(self, jaxpr: Any, used: Mask) -> _Live:
        """What is left of a program where only these of its results are used."""
        key = (id(jaxpr), used)
        if key not in self._kept:
            known, steps = _variables(jaxpr.outvars, used), []
            for equation in reversed(jaxpr.eqns):
                results = tuple(var in known for var in equation.outvars)
                if any(results):
                    steps.append((equation, results))
                    known |= _variables(equation.invars, self._inputs(equation, results))
            self._kept[key] = _Live(steps, tuple(var in known for var in jaxpr.invars))
        return self._kept[key]

    def plan(self, jaxpr: Any, used: Mask, wanted: Mask) -> _Planned:
        """What is to be done to count."""
        key = (id(jaxpr), used, wanted)
        if key not in self._kept:
            known, steps, fixed = _variables(jaxpr.outvars, wanted), [], 0
            for equation, results in self.live(jaxpr, used).steps:
                here = tuple(var in known for var in equation.outvars)
                number = self.fixed(equation, results)
                if number is not None and not any(here):
                    fixed += number
                    continue
                steps.append((equation, results, here))
                known |= _variables(equation.invars, self._inputs(equation, results, here))
            inputs = tuple(var in known for var in jaxpr.invars)
            self._kept[key] = _Planned(steps[::-1], inputs, fixed)
        return self._kept[key]

    def fixed(self, equation: Any, used: Mask) -> int | None:
        """Floating-point operations; None where they are known only as it runs."""
        products = multiply_adds(equation)
        if products is not None:
            return 2 * products
        params, name = equation.params, equation.primitive.name
        if name == "while":
            carry = self._carried(equation, used)
            of_condition = self._fixed_of(params["cond_jaxpr"].jaxpr, (True,))
            of_body = self._fixed_of(params["body_jaxpr"].jaxpr, carry)
            if of_condition != 0:
                raise NotImplementedError("a product in the condition of a loop")
            return 0 if of_body == 0 else None
        if name == "scan":
            each = self._fixed_of(params["jaxpr"].jaxpr, self._scanned(equation, used))
            return None if each is None else each * params["length"]
        if name == "cond":
            found = {self._fixed_of(branch.jaxpr, used) for branch in params["branches"]}
            return found.pop() if len(found) == 1 else None
        inner = _inner(equation)
        if inner is not None:
            return self._fixed_of(inner[0], used)
        for program in jax.tree.leaves(list(params.values()), is_leaf=_is_program):
            if _is_program(program):
                jaxpr: Any = getattr(program, "jaxpr", program)
                if self._fixed_of(jaxpr, (True,) * len(jaxpr.outvars)) != 0:
                    raise NotImplementedError(f"a product inside of {name!r}")
        return 0

    def _fixed_of(self, jaxpr: Any, used: Mask) -> int | None:
        total = 0
        for step in self.live(jaxpr, used).steps:
            number = self.fixed(*step)
            if number is None:
                return None
            total += number
        return total

    def _of(self, jaxpr: Any, used: Mask, wanted: Mask | None) -> Mask:
        if wanted is None:
            return self.live(jaxpr, used).inputs
        return self.plan(jaxpr, used, wanted).inputs

    def _inputs(self, equation: Any, used: Mask, wanted: Mask | None = None) -> Mask:
        """Of an equation, those that its used results need; where `wanted` is given, those that the
        counting program needs."""
        params, name = equation.params, equation.primitive.name
        if name == "while":
            first, second = params["cond_nconsts"], params["body_nconsts"]
            carry = self._carried(equation, used, wanted)
            of_condition = self._of(params["cond_jaxpr"].jaxpr, (True,), _if(wanted, (True,)))
            body, kept = params["body_jaxpr"].jaxpr, self._carried(equation, used)
            of_body = self._of(body, kept, _if(wanted, carry))
            return (*of_condition[:first], *of_body[:second], *carry)
        if name == "scan":
            constants, carried = params["num_consts"], params["num_carry"]
            results = self._scanned(equation, used, wanted)
            kept = self._scanned(equation, used)
            found = self._of(params["jaxpr"].jaxpr, kept, _if(wanted, results))
            begin = constants + carried
            return (*found[:constants], *results[:carried], *found[begin:])
        if name == "cond":
            of_each = [self._of(branch.jaxpr, used, wanted) for branch in params["branches"]]
            return (True, *_union(*of_each))
        inner = _inner(equation)
        if inner is not None:
            return self._of(inner[0], used, wanted)
        return (True,) * len(equation.invars)

    def _carried(self, equation: Any, used: Mask, wanted: Mask | None = None) -> Mask:
        """What of a `while` is carried: its results, and what these and its end depend on."""
        params = equation.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        asked = _if(wanted, (True,))
        carry = used if wanted is None else wanted
        kept = None if wanted is None else self._carried(equation, used)
        carry = _union(carry, self._of(params["cond_jaxpr"].jaxpr, (True,), asked)[first:])
        while True:
            body = params["body_jaxpr"].jaxpr
            found = self._of(body, carry, None) if kept is None else self._of(body, kept, carry)
            more = _union(carry, found[second:])
            if more == carry:
                return carry
            carry = more

    def _scanned(self, equation: Any, used: Mask, wanted: Mask | None = None) -> Mask:
        """Of a `scan`: which of the results of its body, what is carried first."""
        params = equation.params
        constants, carried = params["num_consts"], params["num_carry"]
        results = used if wanted is None else wanted
        kept = None if wanted is None else self._scanned(equation, used)
        jaxpr = params["jaxpr"].jaxpr
        while True:
            found = (
                self._of(jaxpr, results, None) if kept is None else self._of(jaxpr, kept, results)
            )
            own = found[constants : constants + carried]
            more = (*_union(results[:carried], own), *results[carried:])
            if more == results:
                return results
            results = more

    # --- the counting program ---------------------------------------------------------------------

    def run(self, jaxpr, constants, given, used: Mask, wanted: Mask, total):
        """Count: -> (total, results; None for those not wanted). Nothing is `given` where nothing
        is needed."""
        plan = self.plan(jaxpr, used, wanted)
        values = dict(zip(jaxpr.constvars, constants, strict=True))
        values |= dict(zip(jaxpr.invars, given, strict=True))

        def read(var):
            return var.val if isinstance(var, Literal) else values.get(var)

        total = _plus(total, plan.fixed)
        for equation, results, here in plan.steps:
            inputs = [read(var) for var in equation.invars]
            total, found = self._step(equation, inputs, results, here, total)
            values |= dict(zip(equation.outvars, found, strict=True))
        return total, [
            read(var) if is_ else None for var, is_ in zip(jaxpr.outvars, wanted, strict=True)
        ]

    def _step(self, equation, inputs, used: Mask, wanted: Mask, total):
        name = equation.primitive.name
        if name == "while":
            return self._while(equation, inputs, used, wanted, total)
        if name == "scan":
            return self._scan(equation, inputs, used, wanted, total)
        if name == "cond":
            return self._cond(equation, inputs, used, wanted, total)
        inner = _inner(equation)
        if inner is not None:
            return self.run(*inner, inputs, used, wanted, total)
        number = self.fixed(equation, used)
        assert number is not None
        made = equation.primitive.bind(*inputs, **equation.params)
        made = made if equation.primitive.multiple_results else [made]
        return _plus(total, number), made

    def _while(self, equation, inputs, used, wanted, total):
        params = equation.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        kept, carry = self._carried(equation, used), self._carried(equation, used, wanted)
        of_condition, of_body = inputs[:first], inputs[first : first + second]
        condition, body = params["cond_jaxpr"], params["body_jaxpr"]

        def go_on(carried):
            given = [*of_condition, *_spread(carry, carried[1])]
            _, (found,) = self.run(
                condition.jaxpr, condition.consts, given, (True,), (True,), _nothing()
            )
            return found

        def step(carried):
            total, values = carried
            given = [*of_body, *_spread(carry, values)]
            total, found = self.run(body.jaxpr, body.consts, given, kept, carry, total)
            return total, _chosen(carry, found)

        start = total, _chosen(carry, inputs[first + second :])
        total, found = jax.lax.while_loop(go_on, step, start)
        return total, _spread(carry, found)

    def _scan(self, equation, inputs, used, wanted, total):
        params = equation.params
        constants, carried = params["num_consts"], params["num_carry"]
        kept, results = self._scanned(equation, used), self._scanned(equation, used, wanted)
        carry, stacked = results[:carried], results[carried:]
        body, rows = params["jaxpr"], inputs[constants + carried :]
        there = tuple(row is not None for row in rows)

        def step(now, row):
            total, values = now
            given = [*inputs[:constants], *_spread(carry, values), *_spread(there, row)]
            total, found = self.run(body.jaxpr, body.consts, given, kept, results, total)
            return (total, _chosen(carry, found[:carried])), _chosen(stacked, found[carried:])

        start = total, _chosen(carry, inputs[constants : constants + carried])
        (total, last), made = jax.lax.scan(
            step,
            start,
            _chosen(there, rows),
            length=params["length"],
            reverse=params["reverse"],
        )
        return total, [*_spread(carry, last), *_spread(stacked, made)]

    def _cond(self, equation, inputs, used, wanted, total):
        index, *operands = inputs
        there = tuple(operand is not None for operand in operands)

        def branch(closed):
            def taken(total, operands):
                given = _spread(there, operands)
                total, found = self.run(closed.jaxpr, closed.consts, given, used, wanted, total)
                return total, [jnp.asarray(value) for value in _chosen(wanted, found)]

            return taken

        branches = [branch(closed) for closed in equation.params["branches"]]
        total, found = jax.lax.switch(index, branches, total, _chosen(there, operands))
        return total, _spread(wanted, found)


def _inner(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """(program, its constants) of an equation that calls one with all of its inputs."""
    if equation.primitive.name == "shard_map":
        return None
    for name in _CALLS:
        program = equation.params.get(name)
        if program is not None and _is_program(program):
            jaxpr = getattr(program, "jaxpr", program)
            if len(jaxpr.invars) == len(equation.invars):
                return jaxpr, getattr(program, "consts", ())
    return None


def _is_program(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def _variables(variables: Sequence[Any], mask: Mask) -> set:
    pairs = zip(variables, mask, strict=True)
    return {var for var, is_ in pairs if is_ and not isinstance(var, Literal)}


def _if(wanted: Mask | None, mask: Mask) -> Mask | None:
    return None if wanted is None else mask


def _union(*masks: Mask) -> Mask:
    return tuple(map(any, zip(*masks, strict=True)))


def _chosen(mask: Mask, values: Sequence[Any]) -> list[Any]:
    return [value for value, is_ in zip(values, mask, strict=True) if is_]


def _spread(mask: Mask, values: Sequence[Any]) -> list[Any]:
    """The inverse of `_chosen`, None in between."""
    given = iter(values)
    return [next(given) if is_ else None for is_ in mask]


def _nothing():
    return jnp.uint32(0), jnp.uint32(0)


def _plus(total, number: int):
    """A number of two words and one of Python."""
    high, low = total
    below = np.uint32(number & (2**_WORD - 1))
    sum_ = low + below
    return high + np.uint32(number >> _WORD) + (sum_ < below).astype(jnp.uint32), sum_
