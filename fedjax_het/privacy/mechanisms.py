"""Mechanisms of differential privacy: clipping and Gaussian noise of updates or of gradients."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedjax_het.utils.config import (
    Bounds,
    NonNegativeFloat,
    PositiveFloat,
    UnitInterval,
)
from fedjax_het.utils.errors import require
from fedjax_het.utils.kinds import Kind

_OpenUnitInterval = Annotated[float, Bounds(0, 1, open_low=True, open_high=True)]


@dataclass(frozen=True, kw_only=True)
class PrivacyMechanism(Kind):
    """A mechanism of differential privacy; a value of the setting `privacy`.

    Example:
      >>> from fedjax_het.privacy import ClientLevel, PrivacyMechanism
      >>> isinstance(ClientLevel(noise_multiplier=1.1), PrivacyMechanism)
      True
    """

    noise_multiplier: NonNegativeFloat = 1.0
    """Standard deviation of the Gaussian noise divided by the largest norm; 0: no noise, and an
    infinite epsilon."""
    clip_norm: PositiveFloat = 1.0
    "Largest L2 norm, to which larger vectors are scaled down."
    delta: _OpenUnitInterval = 1e-5
    "Delta of the reported epsilon."
    strength: ClassVar[str] = "noise_multiplier"
    neutral: ClassVar[float | None] = None


@dataclass(frozen=True, kw_only=True)
class ClientLevel(PrivacyMechanism):
    """Client-level privacy: DP-FedAvg (McMahan et al., ICLR 2018, Algorithm 1).

    Each client scales its change d_k of the model down to the norm C, and the server adds noise to
    the sum:

        (sum_k d_k min(1, C / ||d_k||) + N(0, (z C)^2 I)) / S

    z is `noise_multiplier` and S the expected number of clients of a round, which does not depend
    on the clients. Any server optimizer may follow, as in DP-FedAdam.

    With `quantile` the norm C adapts (Andrew et al., NeurIPS 2021, Algorithm 1): the clients also
    report whether their change was within the norm, and C <- C exp(-clip_lr (b - quantile)) with
    the noisy share b of such clients. A part of the noise is on b, so epsilon does not change.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.privacy import ClientLevel
      >>> RunSpec(privacy=ClientLevel(noise_multiplier=0.8, clip_norm=0.5)).privacy
      {'client_level.noise_multiplier': 0.8, 'client_level.clip_norm': 0.5}
    """

    quantile: UnitInterval | None = None
    """Share of the changes that adaptive clipping leaves within the norm, such as 0.5; None: the
    norm is `clip_norm` in all rounds."""
    clip_lr: PositiveFloat = 0.2
    "Learning rate of adaptive clipping."
    count_std: PositiveFloat | None = None
    """Standard deviation of the noise on the number of changes within the norm; None: a twentieth
    of the clients of a round, and at least `noise_multiplier`."""
    name: ClassVar[str] = "client_level"
    description: ClassVar[str] = "clipped updates and noise at the server (DP-FedAvg)"

    def check(self) -> None:
        """Check that adaptive clipping can divide the noise, and that it is used."""
        is_valid = self.count_std is None or self.quantile is not None
        require(is_valid, "count_std", self.count_std, "no value without quantile")
        is_valid = self.count_std is None or 2 * self.count_std > self.noise_multiplier
        expected = f"more than noise_multiplier / 2 = {self.noise_multiplier / 2:g}"
        require(is_valid, "count_std", self.count_std, expected)

    def get_count_std(self, cohort_size: float) -> float:
        """Return the standard deviation of the noise on the number of changes within the norm.

        Args:
          cohort_size: expected number of clients of a round.

        Returns:
          The standard deviation; 0 without noise.
        """
        if not self.noise_multiplier:
            return 0.0
        return self.count_std or max(cohort_size / 20, self.noise_multiplier)

    def compute_update_multiplier(self, cohort_size: float) -> float:
        """Return the noise multiplier of the changes of the model.

        With adaptive clipping the noise is divided: the changes have the multiplier
        (z^-2 - (2 count_std)^-2)^(-1/2), so that both together have z (Andrew et al., Theorem 1).

        Args:
          cohort_size: expected number of clients of a round.

        Returns:
          The multiplier.

        Example:
          >>> from fedjax_het.privacy import ClientLevel
          >>> ClientLevel(noise_multiplier=1).compute_update_multiplier(100)
          1.0
          >>> mechanism = ClientLevel(noise_multiplier=1, quantile=0.5)
          >>> round(mechanism.compute_update_multiplier(100), 4)
          1.005
        """
        z = self.noise_multiplier
        if self.quantile is None or z == 0:
            return z
        return 1 / math.sqrt(z**-2 - (2 * self.get_count_std(cohort_size)) ** -2)


@dataclass(frozen=True, kw_only=True)
class ExampleLevel(PrivacyMechanism):
    """Example-level privacy toward the server: clients train by DP-SGD (Abadi et al., CCS 2016).

    Each step takes the mean of the examples' gradients g_i with noise, in a batch of B examples:

        (sum_i g_i min(1, C / ||g_i||) + N(0, (z C)^2 I)) / B

    The server needs no trust. Cost: one gradient per example, and their memory in each lane.

    Example:
      >>> from fedjax_het.privacy import ExampleLevel
      >>> ExampleLevel(noise_multiplier=0.6).clip_norm
      1.0
    """

    name: ClassVar[str] = "example_level"
    description: ClassVar[str] = "clients train by DP-SGD: clipped gradients of examples, and noise"
