"""`fedjax-het export RESULT`: models and synthetic images of a run, as files of their own."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from fedjax_het.common.errors import ConfigError, require, shown, written
from fedjax_het.common.records import Whole
from fedjax_het.common.text import one_line


@dataclass(frozen=True)
class ExportCommand:
    """Write a run's trained model, or the images that its method made, to files of their own.

    The run's state must be beside its result, as `fedjax-het run --output-dir` and `sweep
    --keep-state` leave it.
    """

    result: tyro.conf.Positional[Path]
    """The JSON file of a result."""
    model: Path | None = None
    """Where the model is written, in flax's msgpack: `load_model`, `--init-from`."""
    client: Whole | None = None
    """Whose model, of clients that have models of their own (default: the global one)."""
    synthetic: Path | None = None
    """Where synthetic images are written, as a plain .npz (DynaFed, FedDM, FedAF)."""


def export_command(command: ExportCommand) -> int:
    """Write them, then name the files. Returns the exit status."""
    from fedjax_het.running.result import Result

    asked = command.model is not None or command.synthetic is not None
    require(asked, "model", None, f"a path, or {written('synthetic')} PATH: nothing is asked for")
    alone = command.client is None or command.model is not None
    require(alone, "client", command.client, f"{written('model')} PATH beside it")
    try:
        result = Result.load(command.result)
    except OSError as error:
        what = f"the JSON file of a result ({error.strerror or error})"
        raise ConfigError(f"{written('result')} = {shown(str(command.result))}: {what}") from error
    paths = []
    for name in ("model", "synthetic"):
        path = getattr(command, name)
        if path is None:
            continue
        try:
            if name == "model":
                paths.append(result.save_model(path, command.client))
            else:
                paths.append(result.save_synthetic(path))
        except OSError as error:
            what = f"a file that can be written ({error.strerror or error})"
            raise ConfigError(f"{written(name)} = {shown(str(path))}: expected {what}") from error
    print(one_line(f"Written: {', '.join(map(str, paths))}."))
    return 0
