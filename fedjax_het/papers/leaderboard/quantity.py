"""Leaderboard under quantity skew: sizes of the clients from Dirichlet 0.3.

python experiments/leaderboard/quantity.py                digits, two minutes on 2 cores
python experiments/leaderboard/quantity.py --preset cpu   a tenth of Fashion-MNIST
"""

from fedjax_het.papers.leaderboard.board import (
    GLOBAL_METHODS,
    make_leaderboard,
    make_leaderboard_program,
)

QUANTITY = make_leaderboard(
    "quantity",
    "Leaderboard: quantity skew, Dirichlet 0.3.",
    GLOBAL_METHODS,
    {"partition": "iid", "skew": "quantity:alpha=0.3"},
)
main = make_leaderboard_program(QUANTITY)
