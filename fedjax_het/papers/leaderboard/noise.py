"""Leaderboard under label noise: 40 % of the training labels are replaced.

python experiments/leaderboard/noise.py                digits, two minutes on 2 cores
python experiments/leaderboard/noise.py --preset cpu   a tenth of Fashion-MNIST
"""

from fedjax_het.papers.leaderboard.board import (
    GLOBAL_METHODS,
    make_leaderboard,
    make_leaderboard_program,
)

NOISE = make_leaderboard(
    "noise",
    "Leaderboard: label noise, rate 0.4.",
    GLOBAL_METHODS,
    {"partition": "iid", "skew": "label_noise:rate=0.4"},
)
main = make_leaderboard_program(NOISE)
