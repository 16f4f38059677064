"""Pack the runs of folders of results into one archive `runs.zip` for each folder."""

import sys

from fedjax_het.papers.archived_results import archive_runs_main

if __name__ == "__main__":
    sys.exit(archive_runs_main())
