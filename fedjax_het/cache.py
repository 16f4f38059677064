"""The user's cache folder: decoded data sets, timings. Nothing in it is needed; all is remade."""

import os
from pathlib import Path


def cache_root() -> Path:
    """$FEDJAX_HET_CACHE, else $XDG_CACHE_HOME/fedjax_het, else ~/.cache/fedjax_het."""
    if os.environ.get("FEDJAX_HET_CACHE"):
        return Path(os.environ["FEDJAX_HET_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedjax_het"


def private_folder(path: Path | None = None) -> Path:
    """`path` (default: the root), made for the user alone where it did not exist.

    Raises OSError where that cannot be.
    """
    path = path or cache_root()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
