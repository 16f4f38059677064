"""`fedjax-het export RESULT`: models and synthetic images of a run, as files of their own."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from fedjax_het.common.errors import ConfigError, display_name, format_value, require
from fedjax_het.common.records import NonNegativeInt
from fedjax_het.common.text import to_one_line


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
    client: NonNegativeInt | None = None
    """Whose model, of clients that have models of their own (default: the global one)."""
    synthetic: Path | None = None
    """Where synthetic images are written, as a plain .npz (DynaFed, FedDM, FedAF)."""


def export_command(command: ExportCommand) -> int:
    """Write them, then name the files. Returns the exit status."""
    from fedjax_het.running.result import Result

    has_output = command.model is not None or command.synthetic is not None
    require(
        has_output,
        "model",
        None,
        f"a path, or {display_name('synthetic')} PATH: nothing is asked for",
    )
    has_model_for_client = command.client is None or command.model is not None
    require(
        has_model_for_client, "client", command.client, f"{display_name('model')} PATH beside it"
    )
    try:
        result = Result.load(command.result)
    except OSError as error:
        expected = f"the JSON file of a result ({error.strerror or error})"
        raise ConfigError(
            f"{display_name('result')} = {format_value(str(command.result))}: {expected}"
        ) from error
    paths = []
    for name in ("model", "synthetic"):
        path = getattr(command, name)
        if path is None:
            continue
        try:
            if name == "model":
                paths.append(result.save_model(path, command.client))
            else:
                paths.append(result.save_synthetic_dataset(path))
        except OSError as error:
            expected = f"a file that can be written ({error.strerror or error})"
            raise ConfigError(
                f"{display_name(name)} = {format_value(str(path))}: expected {expected}"
            ) from error
    print(to_one_line(f"Written: {', '.join(map(str, paths))}."))
    return 0
