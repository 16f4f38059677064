"""Prepare an official data set for reading without TensorFlow.

python -m fedjax_het.data.prepare cifar100 [--data-dir DIR]
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from fedjax_het.data.dataset_registry import DATASETS
from fedjax_het.data.sources.tfds import resolve_data_root
from fedjax_het.utils.errors import ConfigError, run_with_exit_status


def prepare_dataset(name: str, data_dir: str | os.PathLike | None = None) -> Path:
    """Download a data set through tensorflow-datasets and write it as array_record files.

    Only this step needs TensorFlow (`pip install 'fedjax_het[prepare]'`) and a network. A data set,
    or a part of it, that is already prepared is not written again.

    Args:
      name: one of `DATASETS` that comes from tensorflow-datasets.
      data_dir: folder to write to. Default: see `resolve_data_root`.

    Returns:
      The folder, to which TFDS_DATA_DIR should be set.

    Raises:
      ConfigError: if the name is unknown, if the data set does not come from tensorflow-datasets,
        or if TensorFlow is not installed.
    """
    published = DATASETS.require(name).published
    if published is None:
        expected = f"a data set that needs preparation: {_list_datasets()}"
        raise ConfigError(f"dataset = {name!r}: expected {expected}")
    if importlib.util.find_spec("tensorflow") is None:
        raise ConfigError(
            f"preparing {name!r} needs TensorFlow, which is not installed: "
            "run `pip install 'fedjax_het[prepare]'` (reading prepared data does not need it)"
        )
    import tensorflow_datasets as tfds

    root = resolve_data_root(data_dir)
    for config in published.configs:
        name = f"{published.builder}/{config}".rstrip("/")
        tfds.builder(name, data_dir=root, file_format="array_record").download_and_prepare()
    return root


def _list_datasets() -> str:
    """Return the names of the data sets that need preparation, separated by commas."""
    return ", ".join(name for name, spec in DATASETS.items() if spec.published is not None)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line program.

    Args:
      arguments: command line arguments. Default: the arguments of the process.

    Returns:
      The exit status: 0, or 2 for an invalid argument.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fedjax_het.data.prepare",
        description="Download a data set and prepare it for reading without TensorFlow.",
    )
    parser.add_argument("name", metavar="NAME", help=_list_datasets())
    parser.add_argument("--data-dir", help="default: $TFDS_DATA_DIR, else ~/tensorflow_datasets")
    options = parser.parse_args(arguments)

    def prepare() -> int:
        root = prepare_dataset(options.name, options.data_dir)
        print(f"{options.name} is prepared in {root}; set TFDS_DATA_DIR={root}")
        return 0

    return run_with_exit_status(prepare, name="prepare", interrupt_message="interrupted")


if __name__ == "__main__":
    sys.exit(main())
