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

from fedjax_het.common.doors import validate_arguments
from fedjax_het.common.errors import require, require_columns
from fedjax_het.common.text import to_one_line
from fedjax_het.running.result import Result
from fedjax_het.settings.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd

_RUN_FILE = re.compile(r"[0-9a-f]{16}\.json")

log = logging.getLogger("fedjax_het")


@validate_arguments
def load_result(directory: str | os.PathLike, digest: str) -> Result | None:
    """The run of that name; None if its files are not there, or, with a line in the log, if they
    are damaged."""
    try:
        return Result.load(Path(directory) / f"{digest}.json")
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is in the file
        log.warning("%s", to_one_line(str(error)))
        return None


@validate_arguments
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
    return _build_dataframe(_iterate_results(directory))


def build_dataframe(results: Iterable[Result]) -> "pd.DataFrame":
    """The same of results at hand."""
    return _build_dataframe((result.digest(), result) for result in results)


def compute_settings_digest(spec: RunSpec) -> str:
    """`RunSpec.digest()`; of settings that this process cannot resolve, because what they name is
    registered in another one, or is no more, the same of the settings as they are."""
    try:
        return spec.digest()
    except Exception:  # names, files and rules that are elsewhere, or of another time
        return spec.resolved_digest()


def _build_dataframe(results: "Iterable[tuple[str, Result]]") -> "pd.DataFrame":
    """One row per run and the name of its files."""
    import pandas as pd

    rows = [
        {
            "digest": name,
            "settings": compute_settings_digest(result.spec),
            # What else a summary holds cannot stand for these.
            **{
                key: value
                for key, value in (
                    _flatten(result.summary) | _flatten(result.spec.to_dict())
                ).items()
                if key not in ("digest", "settings")
            },
            **_mark_user_objects(result),
        }
        for name, result in results
    ]
    return pd.DataFrame(rows)


def _mark_user_objects(result: Result) -> dict[str, str]:
    """What stands in the place of names that say less than is so: see `splits.own_parts`."""
    user_digests = {part: result.summary.get(f"own_{part}") for part in ("dataset", "partition")}
    short_digests = {part: str(digest)[:8] for part, digest in user_digests.items() if digest}
    if not short_digests:
        return {}
    display_names = {
        part: f"{getattr(result.spec, part)} (own {digits})"
        for part, digits in short_digests.items()
    }
    return {
        **display_names,
        "settings": "-".join((compute_settings_digest(result.spec), *short_digests.values())),
    }


def select_newest(results: "pd.DataFrame") -> "pd.DataFrame":
    """`load_results` with one row per `settings` and data set: the one that finished last."""
    if not len(results):
        return results
    require_columns("results", results, ("dataset", "settings"))
    is_user_dataset = results["dataset"] == "user"  # whose name does not say what it holds
    dataset_digests = (
        results["dataset_digest"].where(is_user_dataset, "") if is_user_dataset.any() else ""
    )
    results_with_data = results.assign(finished=results.get("finished"), _data=dataset_digests)
    sorted_results = results_with_data.sort_values("finished", kind="stable", na_position="first")
    return sorted_results.drop_duplicates(["settings", "_data"], keep="last").drop(columns="_data")


@validate_arguments
def load_curves(
    directory: str | os.PathLike, *, results: "pd.DataFrame | None" = None
) -> "pd.DataFrame":
    """One row per run and round: `digest`, `round` (from 1), and a column per metric `[rounds]`.

    of: results of this folder, whose curves alone are read.
    Metrics of another shape (per client, per class) are left to `Result.load`.
    """
    import pandas as pd

    _require_folder(directory)
    frames = []
    if results is not None and len(results):
        require_columns("of", results, ("digest",))
    digests = None if results is None else set(results["digest"]) if len(results) else set()
    for name, result in _iterate_results(directory, digests):
        curves = {metric: values for metric, values in result.metrics.items() if values.ndim == 1}
        rounds = len(next(iter(curves.values()), ()))
        frames.append(pd.DataFrame({"digest": name, "round": range(1, rounds + 1), **curves}))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _require_folder(directory: str | os.PathLike) -> None:
    exists = Path(directory).is_dir()
    require(exists, "directory", str(directory), "a folder of results; there is none")


def _iterate_results(
    directory: str | os.PathLike, digests: set[str] | None = None
) -> Iterator[tuple[str, Result]]:
    """The runs that can be read, each with the name of its files."""
    for path in sorted(Path(directory).glob("*.json")):
        if not _RUN_FILE.fullmatch(path.name) or (digests is not None and path.stem not in digests):
            continue
        try:
            result = Result.load(path)
        except Exception as error:  # whatever is in the file
            text = f"{str(path)!r} is left out: it cannot be read ({error})"
            warnings.warn(to_one_line(text), stacklevel=4)
        else:
            yield path.stem, result


def _flatten(values: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
