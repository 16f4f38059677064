"""Leaderboard under feature skew: the images of half of the clients are rotated by 90 degrees.

python experiments/leaderboard/feature.py                digits, two minutes on 2 cores
python experiments/leaderboard/feature.py --preset cpu   a tenth of Fashion-MNIST

Methods in which clients share averages of images refuse this skew and have no row.
"""

from fedjax_het.algorithms import METHODS
from fedjax_het.papers.leaderboard.board import (
    GLOBAL_METHODS,
    make_leaderboard,
    make_leaderboard_program,
)

FEATURE = make_leaderboard(
    "feature",
    "Leaderboard: feature skew, rotation by 90 degrees.",
    [name for name in GLOBAL_METHODS if "averages" not in METHODS[name].required_data],
    {"partition": "iid", "skew": "rotation:degrees=90"},
)
main = make_leaderboard_program(FEATURE)
