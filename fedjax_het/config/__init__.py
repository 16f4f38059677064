"""The settings of a run: the record, its defaults from methods and protocols, and grids of runs."""

from fedjax_het.config.resolve import resolve
from fedjax_het.config.run_spec import RunSpec

RunSpec._resolve = resolve  # type: ignore[method-assign, assignment]
