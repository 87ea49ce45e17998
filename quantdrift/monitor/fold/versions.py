"""Which candidate versions have been replaced by others."""

from collections.abc import Iterable

from quantdrift.drift.evidence.clock import MICROSECONDS
from quantdrift.monitor.fold.slice_state import SliceState
from quantdrift.storage.monitor.rows import Catalog


class VersionActivity:
    """When each candidate version was last compared.

    A version is superseded when it has had no comparison for `after_s`, counted until the newest one of another
    version of its model (or of the same with another reference). Silence alone says nothing: nobody may be asking.

    Parameters
    ----------
    after_s
        How long; above the longest pause in the traffic of a canary.
    entries
        What is watched.
    """

    def __init__(self, after_s: float, entries: Iterable[SliceState]) -> None:
        self._after_us = after_s * MICROSECONDS
        self._last_us: dict[int, int] = {}
        self.recount(entries)

    def recount(self, entries: Iterable[SliceState]) -> None:
        """Begin anew with what is watched now."""
        self._last_us = {}
        for entry in entries:
            if entry.watch.states:
                self.seen(entry.key[0], entry.last_us)

    def seen(self, version_id: int, at_us: int) -> None:
        """Note a comparison of a version."""
        self._last_us[version_id] = max(self._last_us.get(version_id, 0), at_us)

    def superseded(self, version_id: int, catalog: Catalog) -> bool:
        """Return whether a version has been replaced."""
        last_us = self._last_us.get(version_id)
        if last_us is None:
            return False
        model = catalog.versions[version_id].model
        return any(
            other_us > last_us + self._after_us and catalog.versions[other].model == model
            for other, other_us in self._last_us.items()
        )
