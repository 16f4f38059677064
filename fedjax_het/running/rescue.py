"""Results that cannot be written where they were to be: kept elsewhere, and said where."""

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedjax_het.common.errors import ConfigError
from fedjax_het.common.text import one_line
from fedjax_het.running.result import Result

log = logging.getLogger("fedjax_het")


class NotWrittenError(ConfigError):
    """What was made could not be written to its folder; the message says where it is instead.

    made: what the call would have returned, a `Result` or a `SweepResult`. places: the folders in
    which the results are.
    """

    made: Any = None
    places: tuple[Path, ...] = ()


def save_run(result: Result, folder: Path) -> None:
    """Write a run's result, and how the data were split. Raises OSError."""
    result.save(folder)
    if result.partition is not None:
        result.partition.save(folder / "partition.npz")
    if result.tests is not None:
        result.tests.save(folder / "client_tests.npz")
    if result.held_out is not None:
        result.held_out.partition.save(folder / "held_out.npz")


class Keeper:
    """Writes results to a folder; those that it does not take to another one.

    save: how one is written to a folder. rescue: False where somebody else has them, too, who will
    see to what this folder does not take.
    """

    def __init__(
        self,
        folder: Path | None,
        save: Callable[[Result, Path], object] = Result.save,
        *,
        rescue: bool = True,
    ):
        self.folder, self._save, self._rescues = folder, save, rescue
        self.reason = ""  # why the first was refused
        self.refused = 0
        self.lost = 0  # of them, those that no other place took either
        self.places: list[Path] = []

    def keep(self, result: Result) -> bool:
        """Write a result; -> whether it is in the folder, or none is wanted. Never raises."""
        if self.folder is None:
            return True
        try:
            self._save(result, self.folder)
        except Exception as error:  # a run's hours are worth more than any reason to stop
            self.reason = self.reason or one_line(getattr(error, "strerror", None) or str(error))
            self.refused += 1
            if self._rescues:
                self._rescue(result)
            return False
        return True

    def _rescue(self, result: Result) -> None:
        for place in [*self.places, *_elsewhere()]:
            made = place
            try:
                made = place if place in self.places else _fresh(place)
                self._save(result, made)
            except Exception:
                if made != place:  # it has no room either
                    shutil.rmtree(made, ignore_errors=True)
                continue
            if made not in self.places:
                self.places.append(made)
                log.warning("%s", one_line(f"{self._what()}; going on in {str(made)!r}"))
            return
        self.lost += 1

    def _what(self) -> str:
        return f"output_dir = {str(self.folder)!r}: a result cannot be written ({self.reason})"

    def require_all(self, made: Any) -> None:
        """Raise NotWrittenError, with `made`, if a result is not in the folder."""
        if not self.refused:
            return
        count = "the result" if self.refused == 1 else f"{self.refused} results"
        text = f"output_dir = {str(self.folder)!r}: {count} could not be written ({self.reason})"
        if self.places:
            text += f"; kept in {', '.join(repr(str(place)) for place in self.places)} instead"
        if self.lost:
            text += f"; {self.lost} of them in no file, but in `made` of this error"
        error = NotWrittenError(one_line(text))
        error.made, error.places = made, tuple(self.places)
        raise error


def _elsewhere() -> list[Path]:
    """Where there may be room."""
    places = [Path.cwd()] if _exists(Path.cwd) else []
    for find in (Path.home, lambda: Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError, RuntimeError):  # no home, nothing that can be written to
            places.insert(0, find())
    return places


def _exists(find: Callable[[], Path]) -> bool:
    try:
        return find().is_dir()
    except OSError:  # a folder that was removed
        return False


def _fresh(place: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix="fedjax_het-rescued-", dir=place))
