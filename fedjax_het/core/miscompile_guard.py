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

from fedjax_het.utils import env
from fedjax_het.utils.arrays import is_prng_key
from fedjax_het.utils.env import get_program_cache_dir, make_private_dir

log = logging.getLogger("fedjax_het")

# Known to be wrong: jax-ml/jax#39103. Seen to be right: 0.7.2, 0.8.0, 0.8.2, 0.9.0, 0.9.2, 0.10.0,
# 0.10.1, 0.11.2 and 0.12.0.
AFFECTED_JAXLIB_VERSIONS = ("0.10.2",)
UNFUSED_COMPILER_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}

# Largest relative error (L2, per output array) that rounding in another order may cause. An
# adaptive optimiser magnifies rounding where a gradient is nearly zero (0.004 was seen for a
# ConvNet under Adam), hence not 1e-6; what is known to be wrong is wrong by more than 0.1.
RELATIVE_TOLERANCE = 1e-2


def is_affected_platform() -> bool:
    """Whether this backend and jaxlib version need checking."""
    return jax.default_backend() == "cpu" and jaxlib.__version__ in AFFECTED_JAXLIB_VERSIONS


def has_matmul_reduce_fusion(hlo_text: str) -> bool:
    """Whether an optimised program, as text, has a library call that may be wrong: one that both
    multiplies matrices and reduces."""
    fused_names = set(re.findall(r"calls=%([\w.-]+)[^\n]*__ynn_fusion", hlo_text))
    bodies = re.split(r"\n}\n", hlo_text)
    named_bodies = ((re.search(r"^%([\w.-]+) \(", body, re.MULTILINE), body) for body in bodies)
    return any(
        name is not None and name[1] in fused_names and " dot(" in body and " reduce(" in body
        for name, body in named_bodies
    )


def compute_relative_error(actual: Any, expected: Any, baseline: Any = None) -> float:
    """Largest relative L2 error over the arrays of two pytrees.

    With a `baseline` of the same structure the changes from it are compared, so that a wrong
    update does not hide behind large weights; what rounding of the weights may explain passes.
    """
    max_error = 0.0
    baseline = baseline if baseline is not None else jax.tree.map(lambda a: 0.0, expected)
    leaves = zip(*map(jax.tree.leaves, (actual, expected, baseline)), strict=True)
    for actual_leaf, expected_leaf, baseline_leaf in leaves:
        if is_prng_key(expected_leaf) or not np.issubdtype(
            np.asarray(expected_leaf).dtype, np.floating
        ):
            continue
        actual_leaf, expected_leaf, baseline_leaf = (
            np.asarray(a, np.float64)
            for a in _select_changed_rows(actual_leaf, expected_leaf, baseline_leaf)
        )
        if not (np.isfinite(expected_leaf) | np.isnan(expected_leaf)).all():
            continue  # overflowed in either form: nothing to compare
        error = np.sqrt(np.nansum((actual_leaf - expected_leaf) ** 2))
        rounding = 1e-6 * np.sqrt(np.nansum(expected_leaf**2))
        change_norm = np.sqrt(np.nansum((expected_leaf - baseline_leaf) ** 2))
        if (np.isnan(actual_leaf) != np.isnan(expected_leaf)).any():
            return np.inf
        max_error = max(max_error, max(error - rounding, 0.0) / (change_norm + rounding + 1e-30))
    return float(max_error)


def _select_changed_rows(
    actual: Any, expected: Any, baseline: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows in which something happened: not the states of the many clients that did nothing."""
    actual, expected, baseline = np.asarray(actual), np.asarray(expected), np.asarray(baseline)
    if expected.ndim < 2 or baseline.shape != expected.shape:
        return actual, expected, baseline
    is_unchanged = ((actual == expected) & (expected == baseline)).reshape(len(expected), -1).all(1)
    return actual[~is_unchanged], expected[~is_unchanged], baseline[~is_unchanged]


class VerifiedJit:
    """`jax.jit(function)` that can be verified against its unfused form.

    Args:
      baseline: picks from the arguments what the outputs are a change of (see
        `compute_relative_error`); default: compare the outputs themselves.
      is_debug: whether calls run without jit, and without verification.
      jit_options: passed to `jax.jit`.
    """

    def __init__(
        self,
        function: Callable,
        *,
        baseline: Callable[[tuple], Any] = lambda args: None,
        name: str = "program",
        is_debug: bool = False,
        **jit_options,
    ):
        self._is_debug = is_debug
        self._baseline, self._name = baseline, name
        self._verified: set[str] = set()
        self.program = jax.jit(function, **jit_options)
        self._unfused_program = jax.jit(
            function, compiler_options=UNFUSED_COMPILER_OPTIONS, **jit_options
        )
        self.is_unfused = False  # whether the unfused program took its place

    def __call__(self, *args):
        with jax.disable_jit() if self._is_debug else contextlib.nullcontext():
            return self.program(*args)

    def verify(self, example_args: tuple, variant: str = "") -> None:
        """Compare once per `part` what may be wrong; if the two differ, use the unfused one.

        What was found right is remembered in the user's cache folder.

        `example` has the real shapes and makes the program do its first step only. Its arrays
        are not donated. Cost: the compilation, which calls would do otherwise; where something has
        to be compared, a second one.
        """
        is_known = self._is_debug or variant in self._verified or self.is_unfused
        if is_known or not is_affected_platform():
            return
        self._verified.add(variant)
        lowered = self.program.lower(*example_args)
        hlo_text = lowered.compile().as_text()
        if hlo_text is not None and not has_matmul_reduce_fusion(hlo_text):
            return
        marker = _verification_marker(lowered.as_text() + variant)
        if marker is not None and marker.exists():
            return
        # Waited for: of two programs with collectives that run at a time on XLA's CPU devices, each
        # may hold threads that the other needs, for ever.
        expected = jax.block_until_ready(self._unfused_program(*_copy_buffers(example_args)))
        error = compute_relative_error(
            self(*_copy_buffers(example_args)), expected, self._baseline(example_args)
        )
        if error > RELATIVE_TOLERANCE:
            log.warning(
                "%s: this jaxlib's fused program is wrong by %.2g on its first step; it runs "
                "without the fusion (slower). Python 3.12 with a newer jax avoids this.",
                self._name,
                error,
            )
            self.program, self.is_unfused = self._unfused_program, True
        elif marker is not None:
            with contextlib.suppress(OSError):  # then it is verified again next time
                make_private_dir(marker.parent)
                marker.touch()


def _verification_marker(program_text: str) -> Path | None:
    """The file that is there if this program was found right before, on this machine.

    None with several processes: some might know and others not, and they must run the same.
    """
    if jax.process_count() > 1:
        return None
    environment_text = f"{jaxlib.__version__} {env.get_text(env.XLA_FLAGS)}"
    digest = hashlib.sha256(f"{environment_text}\n{program_text}".encode()).hexdigest()
    return get_program_cache_dir() / "verified" / digest


def _copy_buffers(tree):
    """A copy whose buffers a donating program may take.

    Empty arrays are left: a copy of one forgets how it is spread, and the program compiles again.
    """
    return jax.tree.map(lambda a: a.copy() if isinstance(a, jax.Array) and a.size else a, tree)
