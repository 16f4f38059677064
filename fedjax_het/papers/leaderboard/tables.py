"""The leaderboards, one for each kind of heterogeneity.

python experiments/leaderboard/label.py                digits, two minutes on 2 cores
python experiments/leaderboard/label.py --preset cpu   a tenth of Fashion-MNIST

The other programs are `feature.py`, `quantity.py`, `noise.py` and `personal.py`.
"""

from typing import Any

from fedjax_het.algorithms import METHODS
from fedjax_het.papers.leaderboard.board import (
    GLOBAL_METHODS,
    PERSONAL_METHODS,
    make_leaderboard,
    make_leaderboard_program,
)

_DIRICHLET: dict[str, Any] = {
    "partition": "dirichlet_capped",
    "partition_options": {"min_size": 10},
}


def _list_methods_without(*data: str) -> list[str]:
    """List the methods in which clients do not share these data, which some skews exclude."""
    return [name for name in GLOBAL_METHODS if not {*data} & {*METHODS[name].required_data}]


LABEL = make_leaderboard(
    "label", "Leaderboard: label skew, Dirichlet 0.1.", GLOBAL_METHODS, _DIRICHLET, alphas=(0.1,)
)
FEATURE = make_leaderboard(
    "feature",
    "Leaderboard: feature skew, rotation by 90 degrees.",
    _list_methods_without("averages", "shared_server_data"),
    {"partition": "iid", "skew": "rotation:degrees=90"},
)
QUANTITY = make_leaderboard(
    "quantity",
    "Leaderboard: quantity skew, Dirichlet 0.3.",
    GLOBAL_METHODS,
    {"partition": "iid", "skew": "quantity:alpha=0.3"},
)
NOISE = make_leaderboard(
    "noise",
    "Leaderboard: label noise, rate 0.4.",
    _list_methods_without("shared_server_data"),
    {"partition": "iid", "skew": "label_noise:rate=0.4"},
)
PERSONAL = make_leaderboard(
    "personal",
    "Leaderboard: personalized methods, Dirichlet 0.1.",
    PERSONAL_METHODS,
    _DIRICHLET,
    alphas=(0.1,),
)
label = make_leaderboard_program(LABEL)
feature = make_leaderboard_program(FEATURE, on_client_tests=True)  # rotated as the clients' images
quantity = make_leaderboard_program(QUANTITY)
noise = make_leaderboard_program(NOISE)
personal = make_leaderboard_program(PERSONAL, on_client_tests=True)
