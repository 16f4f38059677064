"""Names of scores and units of losses in texts that are written for classification."""

import re
from collections.abc import Iterable

from fedjax_het.tasks import TASKS

_ACCURACY = re.compile(r"\b(a|A)ccurac(?:y|ies)\b")
_LOSS_UNIT = " (nats)"


def get_score_name(tasks: Iterable[object]) -> str:
    """Return the name of the score of runs.

    Args:
      tasks: names of the runs' tasks. Values that name no task count as classification, as results
        of version 0.6 name none.

    Returns:
      The name, such as "accuracy" or "R2"; "score" if the tasks have different scores.

    Example:
      >>> from fedjax_het.tasks.wording import get_score_name
      >>> get_score_name(["regression"]), get_score_name(["regression", "classification"])
      ('R2', 'score')
    """
    names = {TASKS[t].make.score_name if t in TASKS else "accuracy" for t in tasks}  # type: ignore
    return next(iter(names), "accuracy") if len(names) <= 1 else "score"


def name_score(text: str, tasks: Iterable[object]) -> str:
    """Replace the word accuracy by the name of the tasks' score, and drop a wrong unit of a loss.

    Args:
      text: a label, a title or a note.
      tasks: names of the runs' tasks, see `get_score_name`.

    Returns:
      The text.

    Example:
      >>> from fedjax_het.tasks.wording import name_score
      >>> name_score("Best test accuracy (%)", ["regression"])
      'Best test R2 (%)'
      >>> name_score("Test loss (nats)", ["regression"])
      'Test loss'
    """
    tasks = list(tasks)
    if any(t in TASKS and not TASKS[t].make.loss_is_in_nats for t in tasks):  # type: ignore
        text = text.replace(_LOSS_UNIT, "")
    score = get_score_name(tasks)
    if score == "accuracy":
        return text

    def replace(match: re.Match) -> str:
        return score[0].upper() + score[1:] if match[1] == "A" else score

    return _ACCURACY.sub(replace, text)
