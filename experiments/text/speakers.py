"""Accuracy of a character model whose clients are the speakers of Shakespeare's plays."""

import sys

from fedjax_het.papers.text.speakers import main

if __name__ == "__main__":
    sys.exit(main())
