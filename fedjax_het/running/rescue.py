"""Results that cannot be written where they were to be: kept elsewhere, and said where."""

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedjax_het.common.errors import ConfigError
from fedjax_het.common.text import to_one_line
from fedjax_het.running.result import Result

log = logging.getLogger("fedjax_het")


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
