"""Folders of results, read as data frames.

The files of a run are named by the digest of its result, see `Result.digest`. Any number of
programs on any number of machines can add to a folder, and folders can be merged by copying. Tables
and figures depend on the folder alone.
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

from fedjax_het.config.kind_settings import get_neutral_strength
from fedjax_het.config.resolve import USER_PROVIDED, is_horizon_dependent
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec, hash_settings
from fedjax_het.config.settings import HYPERPARAMETER_SETTINGS, rename_former_settings
from fedjax_het.data import Dataset, Partition
from fedjax_het.runtime.identity import ListChanges, compute_class_names_digest, list_no_changes
from fedjax_het.runtime.result_display import flatten, name_data
from fedjax_het.runtime.results import (
    PARTIAL_SUFFIX,
    STATE_SUFFIX,
    SUMMARY_NUMBERS,
    Result,
    decode_record,
)
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import ConfigError, require, require_columns
from fedjax_het.utils.io import list_stored_names
from fedjax_het.utils.text import to_one_line

if TYPE_CHECKING:
    import pandas as pd

_RUN_FILE = re.compile(rf"[0-9a-f]{{16}}({re.escape(PARTIAL_SUFFIX)})?\.json")

log = logging.getLogger("fedjax_het")


@validate_arguments
def load_result(directory: str | os.PathLike, digest: str) -> Result | None:
    """Read the result of a whole run from a folder.

    Args:
      directory: folder of results.
      digest: digest of the result.

    Returns:
      The result; None for missing files, for a run that a callback or the caller ended early, and
      for damaged files, which are logged.
    """
    try:
        result = Result.load(Path(directory) / f"{digest}.json")
        return None if result.is_partial else result
    except FileNotFoundError:
        return None
    except Exception as error:  # of arbitrary files
        log.warning("%s", to_one_line(str(error)))
        return None


@validate_arguments
def load_results(directory: str | os.PathLike) -> "pd.DataFrame":
    """Read settings and summaries of all runs in a folder.

    A run whose files cannot be read is skipped with a warning. A method, network, data set or
    partition that this process does not know keeps its stored name.

    Args:
      directory: folder of results.

    Returns:
      A row per run with the columns `digest`, `settings`, each setting (nested ones as
      `hp.prox_mu`) and each value of the summary. `learning_rate`, `momentum`, `weight_decay` and
      `server_learning_rate` are also in `hp.local_lr`, `hp.local_momentum`,
      `hp.local_weight_decay` and `hp.server_lr`, their names in files. `digest` names the files.
      `settings` is `RunSpec.digest()`, which results of one spec share on all versions and devices,
      see `select_newest`. `is_partial` marks runs that a callback or the caller ended early. A
      setting takes precedence over a value of the summary with the same name. A user's data set or
      partition may replace the data set or partition of the settings. Then the first digits of its
      digest are added to `dataset` or `partition`, and to `settings`.

    Raises:
      ConfigError: if there is no such folder.

    Example:
      >>> import tempfile
      >>> from fedjax_het import RunSpec, load_results, simulate
      >>> folder = tempfile.mkdtemp()
      >>> spec = RunSpec("fedavg", "digits", model="mlp", num_clients=4, rounds=2)
      >>> _ = simulate(spec, output_dir=folder)
      >>> load_results(folder)[["algorithm", "rounds", "diverged"]].values.tolist()
      [['fedavg', 2, False]]
    """
    _require_folder(directory)
    return _build_dataframe(_iterate_results(directory))


def build_dataframe(results: Iterable[Result]) -> "pd.DataFrame":
    """Return settings and summaries of results as `load_results` does."""
    return _build_dataframe((result.file_stem, result) for result in results)


def compute_settings_digest(spec: RunSpec) -> str:
    """Return `RunSpec.digest()`, or a hash of the unresolved settings.

    The hash serves settings with names, files and rules that only exist in other processes or
    versions.
    """
    try:
        return spec.digest()
    except Exception:  # of users' rules
        return hash_settings(spec)


def _build_dataframe(results: Iterable[tuple[str, Result]]) -> "pd.DataFrame":
    """Return a row per result; runs without a kind that others have, have its neutral strength."""
    import pandas as pd

    rows = [_build_row(digest, result) for digest, result in results]
    names = ("digest", "settings", *RunSpec.__dataclass_fields__, *SUMMARY_NUMBERS)
    frame = pd.DataFrame(rows, columns=None if rows else list(names))
    for column in frame.columns:  # a run without noise is a run with noise of strength 0
        if (neutral := get_neutral_strength(column)) is not None:
            frame[column] = frame[column].fillna(neutral)
    return frame


def _build_row(digest: str, result: Result) -> dict[str, Any]:
    names: dict[str, Any] = {
        "digest": digest,
        "settings": compute_settings_digest(result.spec),
        "is_partial": result.is_partial,
    }
    row = {**names, **flatten(result.summary), **flatten(result.spec.to_dict()), **names}
    if row.get("stopped_early", "") is None:  # other runs have columns of its entries
        del row["stopped_early"]
    row |= name_data(result.spec, result.summary)
    hp = result.spec.hyperparameters
    row |= {setting: hp[name] for setting, name in HYPERPARAMETER_SETTINGS.items() if name in hp}
    if row.get("model") == USER_PROVIDED and result.summary.get("network_digest"):
        row["model"] += f" (own {result.summary['network_digest'][:8]})"
    for name in ("own_dataset", "own_partition", "network_digest", "optimizer_digest"):
        if user_digest := result.summary.get(name):  # of the user, in place of the named object
            row["settings"] += f"-{str(user_digest)[:8]}"
    return row


def select_newest(results: "pd.DataFrame") -> "pd.DataFrame":
    """Select the result of each spec and data set that finished last, of a whole run if any.

    Args:
      results: data frame of `load_results`.

    Returns:
      One row per value of `settings`, and per data set where the dataset is "user".
    """
    if not len(results):
        return results
    require_columns("results", results, ("dataset", "settings"))
    is_user_dataset = results["dataset"] == "user"
    data = results["dataset_digest"].where(is_user_dataset, "") if is_user_dataset.any() else ""
    is_whole = ~is_partial_run(results)
    newest_last = results.assign(
        finished=results.get("finished"), _data=data, _is_whole=is_whole
    ).sort_values(["_is_whole", "finished"], na_position="first")
    newest = newest_last.drop_duplicates(["settings", "_data"], keep="last")
    return newest.drop(columns=["_data", "_is_whole"])


def is_partial_run(results: "pd.DataFrame") -> "pd.Series":
    """Return whether each run of `load_results` was ended early by a callback or the caller."""
    import pandas as pd

    is_partial = results.get("is_partial", pd.Series(False, index=results.index))
    return is_partial.fillna(False).astype(bool)


@validate_arguments
def load_curves(
    directory: str | os.PathLike, *, results: "pd.DataFrame | None" = None
) -> "pd.DataFrame":
    """Read the metrics of the runs in a folder that have one value per round.

    Args:
      directory: folder of results.
      results: rows of `load_results` whose runs are read (default: all runs).

    Returns:
      A row per run and round with the columns `digest`, `round` (from 1) and each metric.

    Raises:
      ConfigError: if there is no such folder, and if `results` has no column `digest`.

    Example:
      >>> import tempfile
      >>> from fedjax_het import RunSpec, load_curves, simulate
      >>> folder = tempfile.mkdtemp()
      >>> spec = RunSpec("fedavg", "digits", model="mlp", num_clients=4, rounds=2)
      >>> _ = simulate(spec, output_dir=folder)
      >>> load_curves(folder)["round"].tolist()
      [1, 2]
    """
    import pandas as pd

    _require_folder(directory)
    digests: set[str] | None = None if results is None else set()
    if results is not None and len(results):
        require_columns("results", results, ("digest",))
        digests = set(results["digest"])
    frames = []
    for digest, result in _iterate_results(directory, digests):
        frame = result.to_pandas().reset_index()
        frame.insert(0, "digest", digest)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _require_folder(directory: str | os.PathLike) -> None:
    exists = Path(directory).is_dir()
    require(exists, "directory", str(directory), "a folder of results; there is none")


def list_run_files(directory: str | os.PathLike) -> list[Path]:
    """List the JSON files of the runs in a folder and in its archive `runs.zip`.

    Args:
      directory: a folder that exists.

    Returns:
      Paths for `Result.load`, sorted by name. A path in the archive is not a file itself.
    """
    names = list_stored_names(directory)
    return [Path(directory) / name for name in names if _RUN_FILE.fullmatch(name)]


def list_renamed_files(directory: str | os.PathLike) -> list[str]:
    """List the pairs of a JSON and an npz file in a folder whose name is no digest.

    Args:
      directory: a folder that exists.

    Returns:
      Names of the JSON files.
    """
    names = list_stored_names(directory)
    return [
        name
        for name in names
        if name.endswith(".json")
        and f"{name.removesuffix('json')}npz" in names
        and not _RUN_FILE.fullmatch(name)
    ]


def _iterate_results(
    directory: str | os.PathLike, digests: set[str] | None = None
) -> Iterator[tuple[str, Result]]:
    for path in list_run_files(directory):
        if digests is not None and path.stem not in digests:
            continue
        try:
            result = Result.load(path)
        except Exception as error:  # of arbitrary files
            warnings.warn(to_one_line(f"left out: {error}"), stacklevel=4)
        else:
            yield path.stem, result


class ResultNotWrittenError(ConfigError):
    """Results could not be written to their folder; the message names their folder.

    Attributes:
      results: the return value of the call, a `Result` or a `SweepResult`.
      folder: the folder of the results that could not be written; None if there is no such folder.

    Example:
      >>> from fedjax_het.runtime.result_store import ResultNotWrittenError
      >>> ResultNotWrittenError("no space left", results=None, folder=None).results is None
      True
    """

    def __init__(self, message: str, results: Any, folder: Path | None):
        super().__init__(message)
        self.results, self.folder = results, folder


def save_run_files(result: Result, folder: Path) -> None:
    """Write a result, and the examples of each client in `<digest>.partition.npz` and other files.

    Args:
      result: the result.
      folder: folder of the files.

    Raises:
      OSError: if a file cannot be written.
    """
    result.save(folder)
    held_out = None if result.held_out is None else result.held_out.partition
    partitions = {"partition": result.partition, "client_tests": result.tests}
    partitions |= {"held_out": held_out, "validation": result.validation}
    for name, partition in partitions.items():
        if partition is not None:
            partition.save(folder / f"{result.file_stem}.{name}.npz")


class ResultWriter:
    """Writer of results, which uses another folder if one cannot be written.

    Attributes:
      folder: folder of results; None to write nothing.
      fallback_folder: folder of the results that could not be written to `folder`.
    """

    def __init__(
        self,
        folder: Path | None,
        save: Callable[[Result, Path], object] = Result.save,
        *,
        use_fallback: bool = True,
    ):
        """Prepare a writer.

        Args:
          folder: folder of results; None to write nothing.
          save: function that writes a result to a folder.
          use_fallback: False if the caller writes results elsewhere that the folder refuses.
        """
        self.folder, self._save, self._uses_fallback = folder, save, use_fallback
        self.fallback_folder: Path | None = None
        self._reason, self._num_failed, self._num_unsaved = "", 0, 0

    def write(self, result: Result) -> bool:
        """Write a result without raising, and return whether it is in the folder, if any."""
        if self.folder is None:
            return True
        try:
            self._save(result, self.folder)
            return True
        except Exception as error:  # no error is worth the loss of a run's hours
            reason = to_one_line(getattr(error, "strerror", None) or str(error))
            self._reason = self._reason or reason
            self._num_failed += 1
        if self._uses_fallback and not self._write_fallback(result):
            self._num_unsaved += 1
        return False

    def _write_fallback(self, result: Result) -> bool:
        for parent in [None] if self.fallback_folder else _list_fallback_parents():
            folder = self.fallback_folder
            with contextlib.suppress(Exception):
                folder = folder or Path(tempfile.mkdtemp(prefix="fedjax_het-rescued-", dir=parent))
                self._save(result, folder)
                if self.fallback_folder is None:
                    self.fallback_folder = folder
                    text = f"results cannot be written ({self._reason}); they are written to {str(folder)!r}"
                    log.warning("%s", to_one_line(f"output_dir = {str(self.folder)!r}: {text}"))
                return True
            if folder is not None and folder != self.fallback_folder:
                shutil.rmtree(folder, ignore_errors=True)
        return False

    def require_all_written(self, results: Any) -> None:
        """Raise ResultNotWrittenError with the results if one of them is not in the folder."""
        if not self._num_failed:
            return
        count = "the result" if self._num_failed == 1 else f"{self._num_failed} results"
        text = f"output_dir = {str(self.folder)!r}: {count} could not be written ({self._reason})"
        if self.fallback_folder is not None:
            text += f"; written to {str(self.fallback_folder)!r} instead"
        if self._num_unsaved:
            text += f"; {self._num_unsaved} are in no file, but in `results` of this error"
        raise ResultNotWrittenError(text, results, self.fallback_folder)


def _list_fallback_parents() -> list[Path]:
    parents = []
    for get_parent in (Path.home, tempfile.gettempdir, Path.cwd):
        with contextlib.suppress(OSError, RuntimeError):  # there is none
            parents.append(Path(get_parent()))
    return parents


class _SavedState(NamedTuple):
    key: str
    rounds: int
    path: Path
    summary: dict[str, Any]


class SavedStateIndex:
    """The final states in a folder, from which runs with more rounds resume.

    Cost: reads the JSON of every result that has a final state, once.
    """

    def __init__(self, folder: Path | None):
        self._folder, self._reported = folder, set[str]()
        self._states: list[_SavedState] = []
        for path in [] if folder is None else sorted(folder.glob(f"*{STATE_SUFFIX}")):
            result_path = path.with_name(path.name.removesuffix(STATE_SUFFIX) + ".json")
            with contextlib.suppress(Exception):  # there is no result, or it is damaged
                record = decode_record(result_path.read_text(encoding="utf-8"))
                key, rounds = _build_settings_key(record["spec"]), int(record["spec"]["rounds"])
                self._states.append(_SavedState(key, rounds, path, record["summary"]))

    def find(
        self,
        spec: ResolvedRunSpec,
        dataset: Dataset | None = None,
        partition: Partition | None = None,
        list_changes: ListChanges = list_no_changes,
    ) -> Path | None:
        """Return the final state from which a run can resume.

        It is the state of a run with the same settings and data, and with the most rounds up to
        `spec.rounds`. A run whose learning rates depend on its number of rounds resumes only from a
        state with this number of rounds.

        Args:
          spec: resolved settings.
          dataset: data set of the user.
          partition: partition of the user.
          list_changes: names registered objects that have changed since a state was written; such a
            state is not used.

        Returns:
          The path of the state, or None.
        """
        key, rounds = _build_settings_key(spec.to_dict()), spec.rounds or 0
        matches = [
            state
            for state in self._states
            if state.key == key
            and (state.rounds == rounds if is_horizon_dependent(spec) else state.rounds <= rounds)
            and _has_user_object(state.summary, "dataset", dataset)
            and (
                dataset is None
                or state.summary.get("class_names_digest")
                == compute_class_names_digest(spec, dataset)
            )
            and _has_user_object(state.summary, "partition", partition)
        ]
        changes = {state.path: ", ".join(list_changes(spec, state.summary)) for state in matches}
        for names in {*changes.values()} - {"", *self._reported}:
            text = f"{names}: changed since final states in {self._folder} were written; not used"
            log.warning("%s", to_one_line(text))
            self._reported.add(names)
        matches = [state for state in matches if not changes[state.path]]

        def count_rounds(state: _SavedState) -> int:
            return state.summary.get("rounds", state.rounds)

        return max(matches, key=count_rounds).path if matches else None


def _build_settings_key(settings: dict[str, Any]) -> str:
    settings = rename_former_settings(settings)
    return json.dumps({k: v for k, v in settings.items() if k != "rounds"}, sort_keys=True)


def _has_user_object(
    summary: dict[str, Any], kind: str, user_object: Dataset | Partition | None
) -> bool:
    """Return whether a run had the user's data set or partition, or if None, the named one."""
    if user_object is None:
        return not summary.get(f"own_{kind}")
    return summary.get(f"{kind}_digest") == user_object.digest()
