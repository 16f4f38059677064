"""Results on disk: two files per run in one folder, read as data frames.

A run's files are named by the digest of what made it (`Result.digest`). So a folder can be added to
by any number of programs on any number of machines, merged by copying, and tables and figures are
functions of the folder alone.
"""

import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjax_het.running.result import Result

if TYPE_CHECKING:
    import pandas as pd

_RUN_FILE = re.compile(r"[0-9a-f]{16}\.json")
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)


def load_result(directory: str | os.PathLike, digest: str) -> Result | None:
    """The run of that name; None if its files are not there or cannot be read in full."""
    try:
        return Result.load(Path(directory) / f"{digest}.json")
    except _UNREADABLE:
        return None


def load_results(directory: str | os.PathLike) -> "pd.DataFrame":
    """One row per run: `digest`, `settings`, each setting (`hp.prox_mu`), the summary.

    `digest` names the files; `settings` is `RunSpec.digest()`, which results of one specification
    share whatever version or device made them (`newest` keeps one of them).
    Where a summary repeats a setting (`algorithm`, `seed`), the setting stands. A run whose files
    cannot be read is left out with a warning.
    """
    return frame(_results(directory))


def frame(results: Iterable[Result]) -> "pd.DataFrame":
    """The same of results at hand."""
    import pandas as pd

    rows = [
        {
            "digest": result.digest(),
            "settings": result.spec.digest(),
            **_flat(result.summary),
            **_flat(result.spec.to_dict()),
        }
        for result in results
    ]
    return pd.DataFrame(rows)


def newest(results: "pd.DataFrame") -> "pd.DataFrame":
    """`load_results` with one row per `settings` and data set: the one that finished last."""
    if not len(results):
        return results
    of_user = results["dataset"] == "user"  # whose name does not say what it holds
    data = results["dataset_digest"].where(of_user, "") if of_user.any() else ""
    marked = results.assign(finished=results.get("finished"), _data=data)
    ordered = marked.sort_values("finished", kind="stable", na_position="first")
    return ordered.drop_duplicates(["settings", "_data"], keep="last").drop(columns="_data")


def load_curves(directory: str | os.PathLike) -> "pd.DataFrame":
    """One row per run and round: `digest`, `round` (from 1), and a column per metric `[rounds]`.

    Metrics of another shape (per client, per class) are left to `Result.load`.
    """
    import pandas as pd

    frames = []
    for result in _results(directory):
        curves = {name: values for name, values in result.metrics.items() if values.ndim == 1}
        rounds = len(next(iter(curves.values()), ()))
        frames.append(
            pd.DataFrame({"digest": result.digest(), "round": range(1, rounds + 1), **curves})
        )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _results(directory: str | os.PathLike) -> Iterator[Result]:
    for path in sorted(Path(directory).glob("*.json")):
        if not _RUN_FILE.fullmatch(path.name):
            continue
        try:
            yield Result.load(path)
        except _UNREADABLE as error:
            warnings.warn(f"{path} is left out: it cannot be read ({error})", stacklevel=3)


def _flat(values: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
