"""Related alerts: which slices alert at a change of verdict, and which alert explains which. Pure.

Only an alert that is at least as severe explains another: a page is never hidden behind a ticket.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from quantdrift.drift.explain.overlap import Size, SliceItems, explaining
from quantdrift.facts.explanation import Explanation
from quantdrift.facts.status import LEVEL
from quantdrift.monitor.explain.sample import WindowSample, level_of, measure_of
from quantdrift.monitor.fold.slice_state import Key
from quantdrift.storage.alerts.evidence import Alerting
from quantdrift.storage.fold_rows import AlertNote, Episode, ExplainedBy, Explains, TransitionRow

AlertsBySlice = Mapping[int, Alerting]  # the open alerts of one version


class AlertingSlices:
    """The slices that alert after each batch of a fold.

    Parameters
    ----------
    known
        Open alerts before the fold.
    transitions
        Changes of verdict by the fold, in order.
    """

    def __init__(self, known: Sequence[Alerting], transitions: Sequence[TransitionRow]) -> None:
        self._known = {(alert.model_version_id, alert.slice_id): alert for alert in known}
        self._transitions = [row for row in transitions if row.episode not in {Episode.NONE, Episode.REOPEN}]

    def at(self, row: TransitionRow) -> dict[int, Alerting]:
        """Return the open alerts of a version after the batch of `row`, by slice, that of `row` included."""
        alerts = dict(self._known)
        for change in self._transitions:
            if change.fold_seq > row.fold_seq:
                break
            key = (change.model_version_id, change.slice_id)
            if change.episode is Episode.CLOSE:
                alerts.pop(key, None)
            else:
                alerts[key] = Alerting(
                    model_version_id=key[0],
                    slice_id=key[1],
                    severity=change.to_verdict,
                    event=change.alert,
                )
        return {key[1]: alert for key, alert in alerts.items() if key[0] == row.model_version_id}

    def larger(
        self,
        row: TransitionRow,
        window: WindowSample,
        sizes: Mapping[int, float],
        declared: Collection[int] = (),
    ) -> list[int]:
        """Return larger slices that alerted before the batch of `row` and share its items, largest share first.

        Parameters
        ----------
        row
            A slice that begins to alert.
        window
            Its items since the onset.
        sizes, declared
            Weight of each slice's traffic, and which slices are declared.
        """
        same_batch = {change.slice_id for change in self._transitions if change.fold_seq == row.fold_seq}
        own_size = (_size(row.slice_id, sizes, declared), row.slice_id)
        shared = {
            other: float(window.weight[window.inside(other)].sum())
            for other in self.at(row)
            if other not in same_batch and (_size(other, sizes, declared), other) > own_size
        }
        return sorted(
            (slice_id for slice_id, weight in shared.items() if weight),
            key=lambda slice_id: (-shared[slice_id], slice_id),
        )

    def without_better(
        self, row: TransitionRow, explained: Mapping[int, str], n_exchanges: int
    ) -> dict[int, str]:
        """Return the larger slices that the alert of `row` explains, without those that another open alert explains better.

        That is one with more exchanges since its onset, and at least as severe, which the alert of `row` does not explain itself.

        Parameters
        ----------
        explained
            All that it explains.
        n_exchanges
            Of the slice of `row`, since its onset.
        """
        alerts = self.at(row)

        def is_better(by: int | None) -> bool:
            other = None if by is None or by in explained or by == row.slice_id else alerts.get(by)
            return (
                other is not None
                and LEVEL[other.severity] >= LEVEL[row.to_verdict]
                and (other.event.explanation.n_window_after or 0) > n_exchanges
            )

        return {
            larger: names
            for larger, names in explained.items()
            if larger not in alerts or not is_better(alerts[larger].event.explanation.explained_by_id)
        }

    def notes_on_explained(self, row: TransitionRow, larger: Mapping[int, str]) -> list[AlertNote]:
        """Return notes on earlier alerts that the alert of `row` explains, alone or with others.

        Parameters
        ----------
        larger
            Their slices, and the names of the slices that explain each.
        """
        return [
            AlertNote(
                model_version_id=row.model_version_id,
                slice_id=slice_id,
                change=ExplainedBy(explained_by=by, explained_by_id=row.slice_id),
            )
            for slice_id, by in larger.items()
            if not self._superseded(row, slice_id)
        ]

    def stored_explanation(self, key: Key) -> Explanation:
        """Return the explanation of an alert that was open before the fold; an empty one where there was none."""
        alert = self._known.get(key)
        return alert.event.explanation if alert else Explanation()

    def notes_on_explaining(self, row: TransitionRow, by: int, explanation: Explanation) -> list[AlertNote]:
        """Return the note on an earlier alert, of slice `by`, with all that it explains since the alert of `row`."""
        if self._superseded(row, by):
            return []
        explains = Explains(explains=explanation.explains, explains_ids=explanation.explains_ids)
        return [AlertNote(model_version_id=row.model_version_id, slice_id=by, change=explains)]

    def _superseded(self, row: TransitionRow, other: int) -> bool:
        """Return whether a later change in the same fold replaces what is known of one of the two slices."""
        return any(
            change.fold_seq > row.fold_seq and change.slice_id in {row.slice_id, other}
            for change in self._transitions
            if change.model_version_id == row.model_version_id
        )

    def notes_on_ended(self) -> list[AlertNote]:
        """Return notes on alerts that were explained by one that has ended: nothing explains them any more."""
        ended = {
            (change.model_version_id, change.slice_id)
            for change in self._transitions
            if change.episode is Episode.CLOSE
        }
        return [
            AlertNote(
                model_version_id=key[0],
                slice_id=key[1],
                change=ExplainedBy(explained_by=None, explained_by_id=None),
            )
            for key, alert in sorted(self._known.items())
            if (key[0], alert.event.explanation.explained_by_id) in ended
        ]


def smallest(
    window: WindowSample,
    alerts: AlertsBySlice,
    sizes: Mapping[int, float],
    *,
    slice_id: int,
    cap: float,
    tolerance: float,
    declared: Collection[int] = (),
) -> tuple[int, ...]:
    """Return the smallest alerting slice that explains the alert of a slice, else several that do together, or none.

    Parameters
    ----------
    window
        Items of the slice since the onset.
    alerts
        The open alerts, that of `slice_id` included.
    sizes
        Weight of each slice's traffic; a missing slice counts as the smallest of all.
    slice_id
        The slice whose alert is to be explained.
    cap
        A divergence above it counts as this much.
    tolerance
        By how much a learned baseline may be exceeded, as a share of it.
    declared
        Slices that the configuration declares: of two with the same exchanges such a one is the finding.
    """
    alert = alerts.get(slice_id)
    if alert is None:
        return ()
    values = window.values(measure_of(alert.event.evidence, cap))
    finite = np.isfinite(values)
    others = {
        other_id: window.inside(other_id)[finite]
        for other_id, other in alerts.items()
        if other_id != slice_id and LEVEL[other.severity] >= LEVEL[alert.severity]
    }
    items = SliceItems(x=values[finite], weight=window.weight[finite], cluster=window.cluster[finite])
    of_all = {known_id: _size(known_id, sizes, declared) for known_id in (slice_id, *others)}
    return explaining(items, level_of(alert.event.evidence, tolerance), others, of_all, slice_id)


def _size(slice_id: int, sizes: Mapping[int, float], declared: Collection[int]) -> Size:
    return sizes.get(slice_id, 0.0), slice_id not in declared


def explains(
    window: WindowSample,
    alerts: AlertsBySlice,
    sizes: Mapping[int, float],
    *,
    slice_id: int,
    larger: int,
    cap: float,
    tolerance: float,
    declared: Collection[int] = (),
) -> tuple[int, ...]:
    """Return what explains the alert of slice `larger`, if slice `slice_id` is part of it; see `smallest`.

    Parameters
    ----------
    window
        Items of `larger` since the onset of `slice_id`.
    alerts, sizes, cap, tolerance, declared
        As in `smallest`.
    """
    explained_by = smallest(
        window, alerts, sizes, slice_id=larger, cap=cap, tolerance=tolerance, declared=declared
    )
    return explained_by if slice_id in explained_by else ()
