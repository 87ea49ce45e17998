"""The plan of a policy before it is deployed: records that are shown and sent."""

from typing import Final

import msgspec

MOST_SAMPLES: Final = 100_000
"""Samples that are simulated after a shift."""


class Delay(msgspec.Struct, frozen=True, kw_only=True):
    """Samples from the shift to the page: quantiles over streams; None where it takes more than were simulated."""

    p10: int | None
    p50: int | None
    p90: int | None


class SliceForecast(msgspec.Struct, frozen=True, kw_only=True):
    """One slice.

    Parameters
    ----------
    slice, predicate, share
        Its name, canonical text, and share of the requests.
    requests_per_s, samples_per_s
        Requests, and the replays among them.
    samples
        Samples from the shift to the page.
    hours
        The same in hours of traffic at this rate: 10 %, 50 % and 90 % quantile, None as in `samples`.
    optimum_samples
        Mean delay of the best possible detector, which knows both rates.
    observable
        Whether nine of ten such shifts page within the horizon.
    needed_per_s
        Samples per second with which they would; None where more than `MOST_SAMPLES` samples would be needed.
    needed_rate
        The same as a share of the slice's traffic; above 1 there is not enough of it.
    """

    slice: str
    predicate: str
    share: float
    requests_per_s: float
    samples_per_s: float
    samples: Delay
    hours: tuple[float | None, float | None, float | None]
    optimum_samples: int
    observable: bool
    needed_per_s: float | None
    needed_rate: float | None


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The whole forecast.

    Parameters
    ----------
    allocated
        Whether the rates are those of the allocation, instead of the policy's own.
    budget, shifted
        Accepted share of changed answers, and the share to detect; or of `what`, of a divergence as a share of `models.budget.cap`.
    horizon_days, quiet_days
        Within how many days a slice must be found, and how many were quiet before.
    n_detectors, pages_per_30_days
        They share this many expected false pages.
    replays_per_s, replays_per_s_most
        Replays that the policy asks for; the second if every request fell into the body strata with the largest rates.
    granted
        The part of them that the budget and the sidecars' caps allow, in (0, 1]; all figures include it.
    gpu_share
        GPUs that the granted replays keep busy; None where the time per replay is not known.
    slices
        `all` first.
    notes
        Assumptions and warnings.
    """

    model: str
    requests_per_s: float
    allocated: bool
    budget: float
    shifted: float
    horizon_days: float
    quiet_days: float
    n_detectors: int
    pages_per_30_days: float
    replays_per_s: float
    replays_per_s_most: float
    granted: float
    gpu_share: float | None
    slices: tuple[SliceForecast, ...]
    notes: tuple[str, ...]
    what: str = "changed answers"
