"""Guard against compiled programs that return wrong numbers.

On CPUs jax 0.10.2 (the last for Python 3.11) fuses a product of matrices and a reduction into one
library call, and computes it wrongly. The result of a matrix-vector product can hold thousands of
wrong values, without an error. Disabling the fusions of this library halves a ConvNet's speed,
since fused reductions alone are fast and right. The guard therefore reads compiled programs. A
program without such a fusion is right, and nearly all programs have none. The first step of a
program with such a fusion is compared with the same program compiled without fusions. If the two
differ, the program without fusions replaces it.
"""

import contextlib
import hashlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from fedjax_het.utils import env
from fedjax_het.utils.arrays import is_prng_key
from fedjax_het.utils.env import get_program_cache_dir, make_private_dir

log = logging.getLogger("fedjax_het")

# Known to be wrong: jax-ml/jax#39103. Known to be right: 0.7.2, 0.8.0, 0.8.2, 0.9.0, 0.9.2, 0.10.0,
# 0.10.1, 0.11.2 and 0.12.0.
AFFECTED_JAXLIB_VERSIONS = ("0.10.2",)
UNFUSED_COMPILER_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}

# Largest relative error (L2, per output array) that another order of rounding may cause. An
# adaptive optimizer magnifies rounding where a gradient is nearly zero (0.004 was observed for a
# ConvNet with Adam), hence not 1e-6. The known errors exceed 0.1.
RELATIVE_TOLERANCE = 1e-2
# Rounding of the program is at most this many times the change of the results that rounding of the
# arguments causes. A gradient that is zero, such as of the bias of an attention's keys, is nothing
# but rounding in every program.
_ROUNDING_FACTOR = 10


def is_affected_platform() -> bool:
    """Return whether programs of this backend and jaxlib version need verification."""
    return jax.default_backend() == "cpu" and jaxlib.__version__ in AFFECTED_JAXLIB_VERSIONS


def has_matmul_reduce_fusion(hlo_text: str) -> bool:
    """Return whether an optimized program has a library call that multiplies and reduces.

    Args:
      hlo_text: text of the optimized program.

    Returns:
      Whether a fusion of the library contains both a product of matrices and a reduction.
    """
    fused_names = set(re.findall(r"calls=%([\w.-]+)[^\n]*__ynn_fusion", hlo_text))
    for body in re.split(r"\n}\n", hlo_text):
        name = re.search(r"^%([\w.-]+) \(", body, re.MULTILINE)
        if name and name[1] in fused_names and " dot(" in body and " reduce(" in body:
            return True
    return False


def compute_relative_error(
    actual: Any, expected: Any, baseline: Any = None, rounded: Any = None
) -> float:
    """Compute the largest relative L2 error over the float arrays of two trees.

    Args:
      actual: tree of arrays.
      expected: tree of the same structure.
      baseline: tree of the same structure, of which the others are changes. The changes are then
        compared, so that a wrong update does not hide behind large weights. The error that rounding
        of the weights explains is subtracted. None: values are compared.
      rounded: tree of the results for arguments that differ from the arguments of `expected` by
        rounding. The error that this rounding explains is subtracted. None: no such results.

    Returns:
      The error; infinite if NaNs differ.
    """
    baseline = baseline if baseline is not None else jax.tree.map(lambda a: 0.0, expected)
    rounded = expected if rounded is None else rounded
    leaves = zip(*map(jax.tree.leaves, (actual, expected, baseline, rounded)), strict=True)
    return max((_compute_leaf_error(*arrays) for arrays in leaves), default=0.0)


def _compute_leaf_error(actual: Any, expected: Any, baseline: Any, rounded: Any) -> float:
    if is_prng_key(expected) or not np.issubdtype(np.asarray(expected).dtype, np.floating):
        return 0.0
    arrays = (actual, expected, baseline, rounded)
    actual, expected, baseline, rounded = map(np.asarray, arrays)
    if expected.ndim >= 2 and baseline.shape == expected.shape:
        # Rows without a change, such as states of idle clients, do not count.
        is_same = (actual == expected) & (expected == baseline)
        is_changed = ~is_same.reshape(len(expected), -1).all(1)
        arrays = (actual, expected, baseline, rounded)
        actual, expected, baseline, rounded = (array[is_changed] for array in arrays)
    arrays = (actual, expected, baseline, rounded)
    actual, expected, baseline, rounded = (np.asarray(array, np.float64) for array in arrays)
    if np.isinf(expected).any():
        return 0.0  # overflow in either form: nothing to compare
    if (np.isnan(actual) != np.isnan(expected)).any():
        return np.inf
    error = np.sqrt(np.nansum((actual - expected) ** 2))
    rounding = 1e-6 * np.sqrt(np.nansum(expected**2))
    noise = _ROUNDING_FACTOR * np.sqrt(np.nansum((rounded - expected) ** 2))
    change_norm = np.sqrt(np.nansum((expected - baseline) ** 2))
    return float(max(error - rounding - noise, 0.0) / (change_norm + rounding + 1e-30))


class VerifiedJit:
    """`jax.jit(function)` with a verification against its unfused form.

    The verification does nothing except with the versions of jaxlib that compile wrong programs.

    Attributes:
      program: the jitted function in use.
      is_unfused: whether `program` is the unfused form.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.core.miscompile_guard import VerifiedJit
      >>> double = VerifiedJit(lambda x: 2 * x)
      >>> double.verify((jnp.ones(3),))
      >>> double(jnp.ones(3)).tolist()
      [2.0, 2.0, 2.0]
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
        """Create the jitted function.

        Args:
          function: the function.
          baseline: selects from the arguments the tree that the outputs change, see
            `compute_relative_error`; default: compare the outputs themselves.
          name: name in the warning.
          is_debug: whether calls run without jit, and without verification.
          **jit_options: arguments of `jax.jit`.
        """
        self._is_debug = is_debug
        self._baseline, self._name = baseline, name
        self._verified: set[tuple] = set()
        self.program = jax.jit(function, **jit_options)
        self._unfused_program = jax.jit(
            function, compiler_options=UNFUSED_COMPILER_OPTIONS, **jit_options
        )
        self.is_unfused = False

    def __call__(self, *args):
        """Call the function."""
        with jax.disable_jit() if self._is_debug else contextlib.nullcontext():
            return self.program(*args)

    def verify(self, example_args: tuple, variant: str = "") -> None:
        """Compare the two forms once per variant, and use the unfused form if they differ.

        A variant is verified again if a switch of JAX compiles another program of it.

        The user's cache folder stores which programs are right.

        Cost: the compilation, which a call would do otherwise, and for a program with such a fusion
        a second compilation.

        Args:
          example_args: arguments with the real shapes, for which the program makes its first step
            only. They are not donated.
          variant: name of the branches that these arguments execute.
        """
        config: Any = jax.config  # jax adds its settings at run time
        key = variant, config.jax_enable_x64, config.jax_default_matmul_precision
        is_known = self._is_debug or key in self._verified or self.is_unfused
        if not is_known and is_affected_platform():
            self._verify(example_args, variant)
            self._verified.add(key)  # at last: a signal may interrupt the verification

    def _verify(self, example_args: tuple, variant: str) -> None:
        lowered = self.program.lower(*example_args)
        hlo_text = lowered.compile().as_text()
        if hlo_text is not None and not has_matmul_reduce_fusion(hlo_text):
            return
        marker = _get_marker_path(lowered.as_text() + variant)
        if marker is not None and marker.exists():
            return
        # Block here: two programs with collectives that run at the same time on XLA's CPU devices
        # may hold threads that the other needs, for ever.
        expected = jax.block_until_ready(self._unfused_program(*_copy_buffers(example_args)))
        actual = self(*_copy_buffers(example_args))
        baseline = self._baseline(example_args)
        error = compute_relative_error(actual, expected, baseline)
        if error > RELATIVE_TOLERANCE:
            # Only now, as it costs another call.
            rounded = jax.block_until_ready(self._unfused_program(*_round_up(example_args)))
            error = compute_relative_error(actual, expected, baseline, rounded)
        if error > RELATIVE_TOLERANCE:
            log.warning(
                "%s: this jaxlib's fused program is wrong by %.2g on its first step; it runs "
                "without the fusion (slower). Python 3.12 with a newer jax avoids this.",
                self._name,
                error,
            )
            self.program, self.is_unfused = self._unfused_program, True
        elif marker is not None:
            with contextlib.suppress(OSError):  # the next process verifies the program again
                make_private_dir(marker.parent)
                marker.touch()


def _get_marker_path(program_text: str) -> Path | None:
    """Return the file whose existence shows that this machine has found the program right.

    The result is None with several processes: they must run the same programs, and only some might
    have the file.
    """
    if jax.process_count() > 1:
        return None
    environment_text = f"{jaxlib.__version__} {env.get_text(env.XLA_FLAGS)}"
    digest = hashlib.sha256(f"{environment_text}\n{program_text}".encode()).hexdigest()
    return get_program_cache_dir() / "verified" / digest


def _round_up(tree: Any) -> Any:
    """Return a copy whose floats are the next larger numbers, apart from whole numbers of masks."""

    def round_up(leaf: Any) -> Any:
        if is_prng_key(leaf) or getattr(leaf, "dtype", None) not in (jnp.float32, jnp.float64):
            return leaf
        return jnp.where(leaf == jnp.round(leaf), leaf, jnp.nextafter(leaf, jnp.inf))

    return _copy_buffers(jax.tree.map(round_up, tree))


def _copy_buffers(tree):
    """Return a copy whose buffers a donating program may take.

    Empty arrays are not copied: a copy loses its sharding, and the program would compile again.
    """
    return jax.tree.map(lambda a: a.copy() if isinstance(a, jax.Array) and a.size else a, tree)
