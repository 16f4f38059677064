"""Values of the setting `privacy`, and the division of the noise by adaptive clipping."""

import math

import pytest

from fedjax_het import ConfigError
from fedjax_het.privacy import PRIVACY_SETTING, ClientLevel, ExampleLevel


def test_texts_and_objects_agree():
    text = "client_level:noise_multiplier=0.7,clip_norm=0.3,quantile=0.5"
    mechanism = ClientLevel(noise_multiplier=0.7, clip_norm=0.3, quantile=0.5)
    assert PRIVACY_SETTING.to_settings(text) == PRIVACY_SETTING.to_settings(mechanism)
    assert PRIVACY_SETTING.parse(PRIVACY_SETTING.to_settings(text)) == (mechanism,)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (ClientLevel, {"noise_multiplier": -1}, "noise_multiplier"),
        (ClientLevel, {"clip_norm": 0}, "clip_norm"),
        (ClientLevel, {"delta": 1}, "delta"),
        (ClientLevel, {"quantile": 1.5}, "quantile"),
        (
            ClientLevel,
            {"noise_multiplier": 2, "count_std": 1},
            r"count_std = 1\.0: .*without quantile",
        ),
        (ClientLevel, {"noise_multiplier": 2, "quantile": 0.5, "count_std": 1}, "count_std"),
        (ExampleLevel, {"clip_norm": -1}, "clip_norm"),
    ],
)
def test_values_without_meaning_are_refused(kind, values, message):
    with pytest.raises(ConfigError, match=message):
        kind(**values)


@pytest.mark.parametrize("count_std", [None, 3.0])
def test_the_noises_of_adaptive_clipping_compose_to_the_multiplier(count_std):
    """Two Gaussian mechanisms have the squared inverse multipliers z_1^-2 + z_2^-2."""
    mechanism = ClientLevel(noise_multiplier=1.5, quantile=0.5, count_std=count_std)
    update = mechanism.compute_update_multiplier(40)
    count = 2 * mechanism.get_count_std(40)  # each client adds 1/2 or -1/2
    assert mechanism.get_count_std(40) == (count_std or 2.0)
    assert math.isclose(update**-2 + count**-2, 1.5**-2, rel_tol=1e-12)


def test_small_cohorts_have_enough_noise_on_the_count():
    mechanism = ClientLevel(noise_multiplier=1.5, quantile=0.5)
    assert mechanism.get_count_std(2) == 1.5
    assert math.isfinite(mechanism.compute_update_multiplier(2))
