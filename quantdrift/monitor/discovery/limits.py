"""The limits of the search for slices: what no operator can decide, with the reason of each."""

import msgspec

from quantdrift.core.slices import MOST_DISCOVERED


class DiscoveryLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the nightly round. Only tests use others than the defaults.

    Parameters
    ----------
    most_rows
        Most items of a version that a search, or the tests of a night, read; of more, a random part. An item takes
        some 1.5 kB: 50,000 fit beside the monitor, and a share of 0.005 still has 250 of them.
    least_share
        Smallest share of a model's traffic that can be a slice. In a smaller one of 50,000 items the mean has a
        standard error above its budget.
    least_ratio
        A slice is reported when its mean divergence is at least this many times that of the rest: below half as much
        again, most differences between groups of inputs are ordinary.
    most_slices
        Most discovered slices of a model that are monitored; further ones wait for a place.
    retire_days
        A discovered slice that was no worse than the rest for this long is no longer monitored: a month has every
        day of the week four times. 0: never.
    """

    most_rows: int = 50_000
    least_share: float = 0.005
    least_ratio: float = 1.5
    most_slices: int = MOST_DISCOVERED
    retire_days: int = 30


LIMITS = DiscoveryLimits()
