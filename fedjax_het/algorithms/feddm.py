"""FedDM (Xiong et al., CVPR 2023, arXiv:2207.09653)."""

from dataclasses import dataclass
from typing import Annotated, Literal

import jax
import numpy as np

from fedjax_het.algorithms.condensing import CondensingNumbers, CondensingOptions, condensing
from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.algorithms.entry import Entry, Rule
from fedjax_het.common.errors import require
from fedjax_het.common.records import Bounds, NonNegative, Positive
from fedjax_het.condensation.distribution import in_ball
from fedjax_het.condensation.privacy import gaussian_epsilon, require_privacy
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.plan import Plan


@dataclass(frozen=True)
class FedDMOptions(CondensingOptions):
    clipping: Literal["none", "per_class", "global"] = "per_class"
    logit_term: bool = True
    private: bool = False
    "The Gaussian mechanism on the gradient of each class's images; see `feddm`."

    def check(self) -> None:
        super().check()
        if self.private:
            why = "per_class: privacy is counted for the gradient of one class"
            require(self.clipping == "per_class", "clipping", self.clipping, why)
            require(self.init == "noise", "init", self.init, "noise: real images are private")
            require_privacy()


@dataclass(frozen=True)
class FedDMNumbers(CondensingNumbers):
    rho: NonNegative = 5.0
    "Radius of the ball around the received model."
    dp_noise: Positive | None = None
    "Multiplier of clip_norm, where private."
    dp_delta: Annotated[float, Bounds(0, 1, open_low=True, open_high=True)] | None = None
    "The delta that epsilon is told for, where private."


def gradient_noise(hp: dict, key: jax.Array, gradient: jax.Array) -> jax.Array:
    """Gaussian noise of standard deviation dp_noise * clip_norm for every value of a gradient."""
    return hp["dp_noise"] * hp["clip_norm"] * jax.random.normal(key, gradient.shape)


def feddm(
    training: LocalTraining, plan: Plan, *, options: FedDMOptions = FedDMOptions()
) -> Algorithm:
    """Clients condense their classes in a ball around the received model; the server trains on
    the union of their images.

    Each step of a client draws a model at distance `rho` (5) from the received one, see `in_ball`,
    and matches mean embeddings and mean logits of each class (both public re-implementations have
    the logits; FedAF's description of FedDM leaves them out). The defaults are FedAF's setting of
    FedDM (CVPR 2024, section 5.1): 50 images a class, image_lr 1, gradients clipped at 2; protocol
    "feddm" is the original's: 10 images, random real ones to start from, momentum 0.5, no clipping,
    classes of 10 examples and more kept, batches topped up, server at 0.01 with weight decay 5e-4.

    Stated nowhere: whether the norm is clipped over a client's classes together or for each; here
    for each, which keeps classes independent ("global" is the other).

    `private`: the Gaussian mechanism on the gradient of each class's images: clipped to clip_norm,
    noise of dp_noise * clip_norm added. The summary has the epsilon of `dp_delta`, of example-level
    privacy over all rounds, see `condensation.privacy`. It covers the images, and so the model;
    not the loss in the run's metrics, which no client sends. The paper's values are not known.

    Sent: down the model; up ipc images for every class that is kept.
    Cost: per class and step, `batch_size` images forward, ipc forward and back to the pixels; then
    server_epochs over all images.
    """

    def perturb(hp, key, params):
        return in_ball(key, params, hp["rho"])

    algorithm = condensing(
        training.task,
        plan,
        options,
        perturb=perturb,
        noise=gradient_noise if options.private else None,
    )

    if not options.private:
        return algorithm

    def summary(hp, state):
        examples = np.asarray(state.clients.examples)
        return {
            **algorithm.summary(hp, state),
            "epsilon": gaussian_epsilon(
                dp_noise=float(hp["dp_noise"]),
                delta=float(hp["dp_delta"]),
                queries=int(state.round) * options.steps,
                # The fewest: sampling hides an example of a small class least.
                examples=int(examples[examples > 0].min(initial=2**31 - 1)),
                batch_size=training.batch_size,
            ),
            "delta": float(hp["dp_delta"]),
        }

    return algorithm._replace(summary=summary)


def feddm_numbers(options: FedDMOptions, num_clients: int) -> FedDMNumbers:
    return FedDMNumbers(dp_noise=1.0, dp_delta=1e-5) if options.private else FedDMNumbers()


ENTRY = Entry(
    "feddm",
    feddm,
    "clients condense by distribution matching, the server trains on that (Xiong et al., 2023)",
    paper="Xiong et al., CVPR 2023, arXiv:2207.09653",
    options=FedDMOptions,
    numbers=feddm_numbers,
    protocol="fedaf",
    rules=(
        Rule(("fedaf", "feddm"), settings={"batch_size": 256}),
        Rule(("fedaf", "feddm"), ("domainnet",), options={"ipc": 20}),
        Rule(
            ("feddm",),
            options={
                "ipc": 10,
                "threshold": 10,
                "init": "real",
                "top_up": True,
                "clipping": "none",
            },
            hp={"image_momentum": 0.5, "server_lr": 0.01, "server_weight_decay": 5e-4},
        ),
    ),
    colour="#000000",
    trains_locally=False,
)
