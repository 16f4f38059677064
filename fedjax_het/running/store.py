"""Results on disk: two files per run in one folder, read as data frames.

A run's files are named by the digest of what made it (`Result.digest`). So a folder can be added to
by any number of programs on any number of machines, merged by copying, and tables and figures are
functions of the folder alone.
"""

import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjax_het.common.doors import door
from fedjax_het.common.errors import require, require_columns
from fedjax_het.common.text import one_line
from fedjax_het.running.result import Result
from fedjax_het.settings.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd

_RUN_FILE = re.compile(r"[0-9a-f]{16}\.json")

log = logging.getLogger("fedjax_het")


@door
def load_result(directory: str | os.PathLike, digest: str) -> Result | None:
    """The run of that name; None if its files are not there, or, with a line in the log, if they
    are damaged."""
    try:
        return Result.load(Path(directory) / f"{digest}.json")
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is in the file
        log.warning("%s", one_line(str(error)))
        return None


@door
def load_results(directory: str | os.PathLike) -> "pd.DataFrame":
    """One row per run: `digest`, `settings`, each setting (`hp.prox_mu`), the summary.

    `digest` names the files; `settings` is `RunSpec.digest()`, which results of one specification
    share whatever version or device made them (`newest` keeps one of them). Of runs on a user's own
    data or partition in the place of those named, `settings`, `dataset` and `partition` have the
    first digits of its digest behind them, so that no table takes them for the ones named.
    Where a summary repeats a setting (`algorithm`, `seed`), the setting stands. A method, network,
    data set or partition that this process does not know keeps its stored name. A run whose files
    cannot be read is left out with a warning. Raises ConfigError where there is no such folder.
    """
    _require_folder(directory)
    return _frame(_results(directory))


def frame(results: Iterable[Result]) -> "pd.DataFrame":
    """The same of results at hand."""
    return _frame((result.digest(), result) for result in results)


def settings_digest(spec: RunSpec) -> str:
    """`RunSpec.digest()`; of settings that this process cannot resolve, because what they name is
    registered in another one, or is no more, the same of the settings as they are."""
    try:
        return spec.digest()
    except Exception:  # names, files and rules that are elsewhere, or of another time
        return spec.stored_digest()


def _frame(results: "Iterable[tuple[str, Result]]") -> "pd.DataFrame":
    """One row per run and the name of its files."""
    import pandas as pd

    rows = [
        {
            "digest": name,
            "settings": settings_digest(result.spec),
            # What else a summary holds cannot stand for these.
            **{
                key: value
                for key, value in (_flat(result.summary) | _flat(result.spec.to_dict())).items()
                if key not in ("digest", "settings")
            },
            **_own(result),
        }
        for name, result in results
    ]
    return pd.DataFrame(rows)


def _own(result: Result) -> dict[str, str]:
    """What stands in the place of names that say less than is so: see `splits.own_parts`."""
    own = {part: result.summary.get(f"own_{part}") for part in ("dataset", "partition")}
    short = {part: str(digest)[:8] for part, digest in own.items() if digest}
    if not short:
        return {}
    said = {part: f"{getattr(result.spec, part)} (own {digits})" for part, digits in short.items()}
    return {**said, "settings": "-".join((settings_digest(result.spec), *short.values()))}


def newest(results: "pd.DataFrame") -> "pd.DataFrame":
    """`load_results` with one row per `settings` and data set: the one that finished last."""
    if not len(results):
        return results
    require_columns("results", results, ("dataset", "settings"))
    of_user = results["dataset"] == "user"  # whose name does not say what it holds
    data = results["dataset_digest"].where(of_user, "") if of_user.any() else ""
    marked = results.assign(finished=results.get("finished"), _data=data)
    ordered = marked.sort_values("finished", kind="stable", na_position="first")
    return ordered.drop_duplicates(["settings", "_data"], keep="last").drop(columns="_data")


@door
def load_curves(
    directory: str | os.PathLike, *, of: "pd.DataFrame | None" = None
) -> "pd.DataFrame":
    """One row per run and round: `digest`, `round` (from 1), and a column per metric `[rounds]`.

    of: results of this folder, whose curves alone are read.
    Metrics of another shape (per client, per class) are left to `Result.load`.
    """
    import pandas as pd

    _require_folder(directory)
    frames = []
    if of is not None and len(of):
        require_columns("of", of, ("digest",))
    only = None if of is None else set(of["digest"]) if len(of) else set()
    for name, result in _results(directory, only):
        curves = {metric: values for metric, values in result.metrics.items() if values.ndim == 1}
        rounds = len(next(iter(curves.values()), ()))
        frames.append(pd.DataFrame({"digest": name, "round": range(1, rounds + 1), **curves}))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _require_folder(directory: str | os.PathLike) -> None:
    there = Path(directory).is_dir()
    require(there, "directory", str(directory), "a folder of results; there is none")


def _results(
    directory: str | os.PathLike, only: set[str] | None = None
) -> Iterator[tuple[str, Result]]:
    """The runs that can be read, each with the name of its files."""
    for path in sorted(Path(directory).glob("*.json")):
        if not _RUN_FILE.fullmatch(path.name) or (only is not None and path.stem not in only):
            continue
        try:
            result = Result.load(path)
        except Exception as error:  # whatever is in the file
            text = f"{str(path)!r} is left out: it cannot be read ({error})"
            warnings.warn(one_line(text), stacklevel=4)
        else:
            yield path.stem, result


def _flat(values: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
