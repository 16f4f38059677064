"""How runs ended, kept beside their results: from there the same runs with more rounds go on, and
loaded results have their models."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_het.config.resolve import is_horizon_dependent
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.data import Dataset, Partition
from fedjax_het.runtime.result_schema import decode_record

STATE_SUFFIX = ".state.npz"


def build_state_path(folder: Path, digest: str) -> Path:
    """Of the state of a run, named by the digest of its result."""
    return folder / f"{digest}{STATE_SUFFIX}"


class _SavedState(NamedTuple):
    rounds: int
    path: Path
    summary: dict[str, Any]


class SavedStateIndex:
    """The runs of a folder of which it is kept how they ended; none of no folder.

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
