"""Programs of tests in processes of their own."""

import os
import subprocess
import sys

from support.paths import ROOT, TESTS


def start_python(*words, output=subprocess.DEVNULL, **environment):
    """Start Python with the package and the support of tests; return the process."""
    paths = os.pathsep.join([str(ROOT), str(TESTS)])
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )
