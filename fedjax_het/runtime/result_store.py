"""Results on disk: two files per run in one folder, read as data frames.

A run's files are named by the digest of what made it (`Result.digest`). So a folder can be added to
by any number of programs on any number of machines, merged by copying, and tables and figures are
functions of the folder alone.

A result that cannot be written to its folder is written to another one. How a run ended may be
stored beside its result, see `SavedStateIndex`.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_het.config.local_training import is_horizon_dependent
from fedjax_het.config.run_spec import RunSpec, hash_settings
from fedjax_het.data import Dataset, Partition
from fedjax_het.runtime.result_schema import decode_record
from fedjax_het.runtime.results import STATE_SUFFIX, Result
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import ConfigError, require, require_columns
from fedjax_het.utils.io import list_stored_names
from fedjax_het.utils.text import to_one_line

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
        return hash_settings(spec)


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


def list_run_files(directory: str | os.PathLike) -> list[Path]:
    """List the JSON files of the runs in a folder, including those in its archive `runs.zip`.

    Args:
      directory: a folder that exists.

    Returns:
      Paths for `Result.load`, sorted by name. A path in the archive is not a file itself.
    """
    names = list_stored_names(directory)
    return [Path(directory) / name for name in names if _RUN_FILE.fullmatch(name)]


def _iterate_results(
    directory: str | os.PathLike, digests: set[str] | None = None
) -> Iterator[tuple[str, Result]]:
    """The runs that can be read, each with the name of its files."""
    for path in list_run_files(directory):
        if digests is not None and path.stem not in digests:
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


class ResultNotWrittenError(ConfigError):
    """What was made could not be written to its folder; the message says where it is instead.

    made: what the call would have returned, a `Result` or a `SweepResult`. places: the folders in
    which the results are.
    """

    results: Any = None
    folders: tuple[Path, ...] = ()


def save_run_files(result: Result, folder: Path) -> None:
    """Write a run's result, and how the data were split. Raises OSError."""
    result.save(folder)
    if result.partition is not None:
        result.partition.save(folder / "partition.npz")
    if result.tests is not None:
        result.tests.save(folder / "client_tests.npz")
    if result.held_out is not None:
        result.held_out.partition.save(folder / "held_out.npz")


class ResultWriter:
    """Writes results to a folder; those that it does not take to another one.

    save: how one is written to a folder. rescue: False where somebody else has them, too, who will
    see to what this folder does not take.
    """

    def __init__(
        self,
        folder: Path | None,
        save: Callable[[Result, Path], object] = Result.save,
        *,
        use_fallback: bool = True,
    ):
        self.folder, self._save, self._uses_fallback = folder, save, use_fallback
        self.reason = ""  # why the first was refused
        self.num_failed = 0
        self.num_unsaved = 0  # of them, those that no other place took either
        self.fallback_folders: list[Path] = []

    def write(self, result: Result) -> bool:
        """Write a result; -> whether it is in the folder, or none is wanted. Never raises."""
        if self.folder is None:
            return True
        try:
            self._save(result, self.folder)
        except Exception as error:  # a run's hours are worth more than any reason to stop
            self.reason = self.reason or to_one_line(getattr(error, "strerror", None) or str(error))
            self.num_failed += 1
            if self._uses_fallback:
                self._write_fallback(result)
            return False
        return True

    def _write_fallback(self, result: Result) -> None:
        for parent in [*self.fallback_folders, *_list_fallback_parents()]:
            folder = parent
            try:
                folder = (
                    parent if parent in self.fallback_folders else _create_fallback_folder(parent)
                )
                self._save(result, folder)
            except Exception:
                if folder != parent:  # it has no room either
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            if folder not in self.fallback_folders:
                self.fallback_folders.append(folder)
                log.warning(
                    "%s", to_one_line(f"{self._format_failure()}; going on in {str(folder)!r}")
                )
            return
        self.num_unsaved += 1

    def _format_failure(self) -> str:
        return f"output_dir = {str(self.folder)!r}: a result cannot be written ({self.reason})"

    def require_all_written(self, results: Any) -> None:
        """Raise ResultNotWrittenError, with `made`, if a result is not in the folder."""
        if not self.num_failed:
            return
        count = "the result" if self.num_failed == 1 else f"{self.num_failed} results"
        text = f"output_dir = {str(self.folder)!r}: {count} could not be written ({self.reason})"
        if self.fallback_folders:
            text += f"; kept in {', '.join(repr(str(folder)) for folder in self.fallback_folders)} instead"
        if self.num_unsaved:
            text += f"; {self.num_unsaved} of them in no file, but in `made` of this error"
        error = ResultNotWrittenError(to_one_line(text))
        error.results, error.folders = results, tuple(self.fallback_folders)
        raise error


def _list_fallback_parents() -> list[Path]:
    """Where there may be room."""
    parents = [Path.cwd()] if _is_existing_directory(Path.cwd) else []
    for get_parent in (Path.home, lambda: Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError, RuntimeError):  # no home, nothing that can be written to
            parents.insert(0, get_parent())
    return parents


def _is_existing_directory(get_path: Callable[[], Path]) -> bool:
    try:
        return get_path().is_dir()
    except OSError:  # a folder that was removed
        return False


def _create_fallback_folder(parent: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix="fedjax_het-rescued-", dir=parent))


class _SavedState(NamedTuple):
    rounds: int
    path: Path
    summary: dict[str, Any]


class SavedStateIndex:
    """The final states in a folder, from which runs with more rounds go on; none of no folder.

    Cost: reading the small record of each, once.
    """

    def __init__(self, folder: Path | None):
        self._by_settings: dict[str, list[_SavedState]] = {}
        for path in [] if folder is None else sorted(folder.glob(f"*{STATE_SUFFIX}")):
            result_path = path.with_name(path.name.removesuffix(STATE_SUFFIX) + ".json")
            try:
                record = decode_record(result_path.read_text())
                spec, summary = record["spec"], record["summary"]
                saved_state = _SavedState(int(spec["rounds"]), path, summary)
            except Exception:  # no result beside it, or a damaged one: nothing to go on from
                continue
            self._by_settings.setdefault(_settings_key(spec), []).append(saved_state)

    def find(
        self, spec: RunSpec, dataset: Dataset | None = None, partition: Partition | None = None
    ) -> Path | None:
        """Of this run, or the one of the same resolved settings and data with the most rounds that
        are not more: the file of its state; None without one. A run whose rates depend on its end
        is the beginning of no other.

        dataset, partition: the user's own.
        """
        rounds = spec.rounds or 0
        matches = [
            saved_state
            for saved_state in self._by_settings.get(_settings_key(spec.to_dict()), [])
            if (
                saved_state.rounds == rounds
                if is_horizon_dependent(spec)
                else saved_state.rounds <= rounds
            )
            and _matches_user_object(saved_state.summary, "dataset", dataset)
            and _matches_user_object(saved_state.summary, "partition", partition)
        ]
        return max(matches, key=lambda saved_state: saved_state.rounds).path if matches else None


def _settings_key(settings: dict[str, Any]) -> str:
    return json.dumps({k: v for k, v in settings.items() if k != "rounds"}, sort_keys=True)


def _matches_user_object(
    summary: dict[str, Any], kind: str, user_object: Dataset | Partition | None
) -> bool:
    """Whether a run had the user's own data set or partition, or that which its settings name."""
    if user_object is None:
        return not summary.get(f"own_{kind}")
    return summary.get(f"{kind}_digest") == user_object.digest()
