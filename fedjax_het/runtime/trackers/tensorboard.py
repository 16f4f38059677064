"""TensorBoard's event files, `tensorboard/<name>/`, by tensorboardX, without TensorFlow.

`tensorboard --logdir results/tensorboard` shows them.
"""

import time
from collections.abc import Mapping

from fedjax_het.runtime.trackers.base import TrackedRun, Tracker


class TensorboardTracker:
    """One file of events. A run that is resumed begins it anew, and is told all its rounds."""

    def __init__(self, run_info: TrackedRun):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.summary import hparams, text

        self.done = 0
        folder = run_info.folder / "tensorboard" / run_info.digest
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        # Its own thread would keep what a full disk refuses, and wait for ever.
        self._writer = EventsWriter(str(folder / "events"))
        for summary in hparams(run_info.settings, dict.fromkeys(("final_accuracy",), 0.0)):
            self._write_summary(summary, 0)
        lines = (f"    {name}: {value}" for name, value in run_info.settings.items())
        self._write_summary(text("settings", "\n".join(lines)), 0)

    def _write_summary(self, summary, round: int) -> None:
        from tensorboardX.proto.event_pb2 import Event

        event = Event(summary=summary, step=round, wall_time=time.time())
        self._writer.write_event(event)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        from tensorboardX.summary import scalar

        for name, value in values.items():
            self._write_summary(scalar(name, value), round)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, summary: Mapping[str, str | int | float | bool]) -> None:
        from tensorboardX.summary import scalar

        rounds = int(summary.get("rounds", self.done))
        for name, value in summary.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                group = "" if name == "final_accuracy" else "summary/"
                self._write_summary(scalar(f"{group}{name}", float(value)), rounds)
        self._writer.close()


TRACKER = Tracker(
    "tensorboard",
    "TensorBoard's event files",
    TensorboardTracker,
    packages=("tensorboardX",),
)
