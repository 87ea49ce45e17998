"""The signal `missed-intervals`: the share of forecast intervals that no longer overlap the reference's."""

from quantdrift.plugins.signals import SignalPlugin

MISSED_INTERVALS = SignalPlugin(
    detail="missed", things="forecast intervals", verb="do not overlap those of the reference"
)
