"""How runs ended, kept beside their results: from there the same runs with more rounds go on, and
loaded results have their models."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_het.data import Dataset, Partition
from fedjax_het.running.stored import from_text
from fedjax_het.settings.local_training import depends_on_end
from fedjax_het.settings.spec import RunSpec

SUFFIX = ".state.npz"


def state_path(folder: Path, digest: str) -> Path:
    """Of the state of a run, named by the digest of its result."""
    return folder / f"{digest}{SUFFIX}"


class _Kept(NamedTuple):
    rounds: int
    path: Path
    summary: dict[str, Any]


class Ended:
    """The runs of a folder of which it is kept how they ended; none of no folder.

    Cost: reading the small record of each, once.
    """

    def __init__(self, folder: Path | None):
        self._by_settings: dict[str, list[_Kept]] = {}
        for path in [] if folder is None else sorted(folder.glob(f"*{SUFFIX}")):
            record = path.with_name(path.name.removesuffix(SUFFIX) + ".json")
            try:
                read = from_text(record.read_text())
                spec, summary = read["spec"], read["summary"]
                kept = _Kept(int(spec["rounds"]), path, summary)
            except Exception:  # no result beside it, or a damaged one: nothing to go on from
                continue
            self._by_settings.setdefault(_but_rounds(spec), []).append(kept)

    def before(
        self, spec: RunSpec, dataset: Dataset | None = None, partition: Partition | None = None
    ) -> Path | None:
        """Of this run, or the one of the same resolved settings and data with the most rounds that
        are not more: the file of its state; None without one. A run whose rates depend on its end
        is the beginning of no other.

        dataset, partition: the user's own.
        """
        rounds = spec.rounds or 0
        fitting = [
            kept
            for kept in self._by_settings.get(_but_rounds(spec.to_dict()), [])
            if (kept.rounds == rounds if depends_on_end(spec) else kept.rounds <= rounds)
            and _is_of(kept.summary, "dataset", dataset)
            and _is_of(kept.summary, "partition", partition)
        ]
        return max(fitting, key=lambda kept: kept.rounds).path if fitting else None


def _but_rounds(settings: dict[str, Any]) -> str:
    return json.dumps({k: v for k, v in settings.items() if k != "rounds"}, sort_keys=True)


def _is_of(summary: dict[str, Any], what: str, own: Dataset | Partition | None) -> bool:
    """Whether a run had the user's own data set or partition, or that which its settings name."""
    if own is None:
        return not summary.get(f"own_{what}")
    return summary.get(f"{what}_digest") == own.digest()
