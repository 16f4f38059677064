"""Leaderboard under label skew: Dirichlet 0.1.

python experiments/leaderboard/label.py                digits, two minutes on 2 cores
python experiments/leaderboard/label.py --preset cpu   a tenth of Fashion-MNIST
"""

from fedjax_het.papers.leaderboard.board import (
    GLOBAL_METHODS,
    make_leaderboard,
    make_leaderboard_program,
)

LABEL = make_leaderboard(
    "label",
    "Leaderboard: label skew, Dirichlet 0.1.",
    GLOBAL_METHODS,
    {"partition": "dirichlet_capped", "partition_options": {"min_size": 10}},
    alphas=(0.1,),
)
main = make_leaderboard_program(LABEL)
