"""Leaderboard of personalized methods: Dirichlet 0.1, tests on the clients' own data.

python experiments/leaderboard/personal.py                digits, two minutes on 2 cores
python experiments/leaderboard/personal.py --preset cpu   a tenth of Fashion-MNIST
"""

from fedjax_het.papers.leaderboard.board import (
    PERSONAL_METHODS,
    make_leaderboard,
    make_leaderboard_program,
)

PERSONAL = make_leaderboard(
    "personal",
    "Leaderboard: personalized methods, Dirichlet 0.1.",
    PERSONAL_METHODS,
    {"partition": "dirichlet_capped", "partition_options": {"min_size": 10}},
    alphas=(0.1,),
)
main = make_leaderboard_program(PERSONAL, is_personal=True)
