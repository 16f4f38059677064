"""The guard against compiled programs that return wrong numbers.

jax 0.10.2 (the last for Python 3.11) computes a product of matrices and a reduction wrongly on CPUs
where it fuses the two into one call of its library: the result of a matrix-vector product can hold
thousands of wrong values, silently. Switching this library's fusions off for good halves a
ConvNet's speed, for its reductions alone are fast and right. So what was compiled is read: a
program without such a fusion, which nearly all are, is right as it is. One that has one is run on a
first step and compared with the same program compiled without them; where the two disagree, the
unfused one is used.
"""

import contextlib
import hashlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

from fedjax_het.common import variables
from fedjax_het.common.arrays import is_key
from fedjax_het.common.cache import private_folder, programs_folder

log = logging.getLogger("fedjax_het")

# Known to be wrong: jax-ml/jax#39103. Seen to be right: 0.7.2, 0.8.0, 0.8.2, 0.9.0, 0.9.2, 0.10.0,
# 0.10.1, 0.11.2 and 0.12.0.
SUSPECT_JAXLIB = ("0.10.2",)
UNFUSED = {"xla_cpu_experimental_ynn_fusion_type": ""}

# Largest relative error (L2, per output array) that rounding in another order may cause. An
# adaptive optimiser magnifies rounding where a gradient is nearly zero (0.004 was seen for a
# ConvNet under Adam), hence not 1e-6; what is known to be wrong is wrong by more than 0.1.
TOLERANCE = 1e-2


def suspect() -> bool:
    """Whether this backend and jaxlib version need checking."""
    return jax.default_backend() == "cpu" and jaxlib.__version__ in SUSPECT_JAXLIB


def fuses_product_and_reduction(compiled: str) -> bool:
    """Whether an optimised program, as text, has a library call that may be wrong: one that both
    multiplies matrices and reduces."""
    fused = set(re.findall(r"calls=%([\w.-]+)[^\n]*__ynn_fusion", compiled))
    bodies = re.split(r"\n}\n", compiled)
    named = ((re.search(r"^%([\w.-]+) \(", body, re.MULTILINE), body) for body in bodies)
    return any(
        name is not None and name[1] in fused and " dot(" in body and " reduce(" in body
        for name, body in named
    )


def relative_error(found: Any, expected: Any, baseline: Any = None) -> float:
    """Largest relative L2 error over the arrays of two pytrees.

    With a `baseline` of the same structure the changes from it are compared, so that a wrong
    update does not hide behind large weights; what rounding of the weights may explain passes.
    """
    worst = 0.0
    baseline = baseline if baseline is not None else jax.tree.map(lambda a: 0.0, expected)
    leaves = zip(*map(jax.tree.leaves, (found, expected, baseline)), strict=True)
    for got, want, base in leaves:
        if is_key(want) or not np.issubdtype(np.asarray(want).dtype, np.floating):
            continue
        got, want, base = (np.asarray(a, np.float64) for a in _active(got, want, base))
        if not (np.isfinite(want) | np.isnan(want)).all():
            continue  # overflowed in either form: nothing to compare
        error = np.sqrt(np.nansum((got - want) ** 2))
        rounding = 1e-6 * np.sqrt(np.nansum(want**2))
        size = np.sqrt(np.nansum((want - base) ** 2))
        if (np.isnan(got) != np.isnan(want)).any():
            return np.inf
        worst = max(worst, max(error - rounding, 0.0) / (size + rounding + 1e-30))
    return float(worst)


def _active(got: Any, want: Any, base: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows in which something happened: not the states of the many clients that did nothing."""
    got, want, base = np.asarray(got), np.asarray(want), np.asarray(base)
    if want.ndim < 2 or base.shape != want.shape:
        return got, want, base
    idle = ((got == want) & (want == base)).reshape(len(want), -1).all(1)
    return got[~idle], want[~idle], base[~idle]


class CheckedProgram:
    """`jax.jit(function)` that can be verified against its unfused form.

    Args:
      baseline: picks from the arguments what the outputs are a change of (see
        `relative_error`); default: compare the outputs themselves.
      jit_options: passed to `jax.jit`.
    """

    def __init__(
        self,
        function: Callable,
        *,
        baseline: Callable[[tuple], Any] = lambda args: None,
        name: str = "program",
        **jit_options,
    ):
        self._baseline, self._name = baseline, name
        self._verified: set[str] = set()
        self.program = jax.jit(function, **jit_options)
        self._unfused = jax.jit(function, compiler_options=UNFUSED, **jit_options)
        self.unfused = False  # whether the unfused program took its place

    def __call__(self, *args):
        return self.program(*args)

    def verify(self, example: tuple, part: str = "") -> None:
        """Compare once per `part` what may be wrong; if the two differ, use the unfused one.

        What was found right is remembered in the user's cache folder.

        `example` has the real shapes and makes the program do its first step only. Its arrays
        are not donated. Cost: the compilation, which calls would do otherwise; where something has
        to be compared, a second one.
        """
        if part in self._verified or self.unfused or not suspect():
            return
        self._verified.add(part)
        lowered = self.program.lower(*example)
        text = lowered.compile().as_text()
        if text is not None and not fuses_product_and_reduction(text):
            return
        memory = _memory(lowered.as_text() + part)
        if memory is not None and memory.exists():
            return
        # Waited for: of two programs with collectives that run at a time on XLA's CPU devices, each
        # may hold threads that the other needs, for ever.
        expected = jax.block_until_ready(self._unfused(*_copied(example)))
        error = relative_error(self(*_copied(example)), expected, self._baseline(example))
        if error > TOLERANCE:
            log.warning(
                "%s: this jaxlib's fused program is wrong by %.2g on its first step; it runs "
                "without the fusion (slower). Python 3.12 with a newer jax avoids this.",
                self._name,
                error,
            )
            self.program, self.unfused = self._unfused, True
        elif memory is not None:
            with contextlib.suppress(OSError):  # then it is verified again next time
                private_folder(memory.parent)
                memory.touch()


def _memory(program: str) -> Path | None:
    """The file that is there if this program was found right before, on this machine.

    None with several processes: some might know and others not, and they must run the same.
    """
    if jax.process_count() > 1:
        return None
    settings = f"{jaxlib.__version__} {variables.text_of(variables.XLA_FLAGS)}"
    name = hashlib.sha256(f"{settings}\n{program}".encode()).hexdigest()
    return programs_folder() / "verified" / name


def _copied(tree):
    """A copy whose buffers a donating program may take.

    Empty arrays are left: a copy of one forgets how it is spread, and the program compiles again.
    """
    return jax.tree.map(lambda a: a.copy() if isinstance(a, jax.Array) and a.size else a, tree)
