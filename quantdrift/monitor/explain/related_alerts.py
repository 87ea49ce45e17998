"""Alerts beside each other: which stand at a change of verdict, and which of them explains which. Pure.

An alert is folded under one that is no less severe: a page is never hidden behind a ticket.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from quantdrift.core.records import Verdict
from quantdrift.drift.explain.overlap import Items, explaining
from quantdrift.monitor.explain.sample import WindowSample, level_of, measure_of
from quantdrift.monitor.fold.slice_state import Key
from quantdrift.storage.monitor.evidence import Alerting
from quantdrift.storage.monitor.explanation import Explanation, explanation_of
from quantdrift.storage.monitor.rows import AlertNote, Episode, TransitionRow

_RANK = {Verdict.WARNING: 1, Verdict.FIRING: 2}
Beside = Mapping[int, Alerting]  # by slice, those of one version that alert


class AlertingSlices:
    """Which slices alert after each batch.

    Parameters
    ----------
    known
        Open alerts before the fold.
    transitions
        What it made, in order.
    """

    def __init__(self, known: Sequence[Alerting], transitions: Sequence[TransitionRow]) -> None:
        self._known = {(one.model_version_id, one.slice_id): one for one in known}
        self._transitions = [row for row in transitions if row.episode is not Episode.NONE]

    def at(self, row: TransitionRow) -> dict[int, Alerting]:
        """Return the slices of a version that alert after the batch of `row`, that of `row` among them."""
        alerts = dict(self._known)
        for change in self._transitions:
            if change.fold_seq > row.fold_seq:
                break
            key = (change.model_version_id, change.slice_id)
            if change.episode is Episode.CLOSE:
                alerts.pop(key, None)
            else:
                alerts[key] = _alerting(change)
        return {key[1]: one for key, one in alerts.items() if key[0] == row.model_version_id}

    def larger(self, row: TransitionRow, scene: WindowSample, sizes: Mapping[int, float]) -> list[int]:
        """Return larger slices that alerted before the batch of `row` and share its items, most of them first.

        Parameters
        ----------
        row
            A slice that begins to alert.
        scene
            Its items since the onset.
        sizes
            Weight of each slice's traffic.
        """
        now = {one.slice_id for one in self._transitions if one.fold_seq == row.fold_seq}
        mine = (sizes.get(row.slice_id, 0.0), row.slice_id)
        shared = {
            other: float(scene.weight[scene.inside(other)].sum())
            for other in self.at(row)
            if other not in now and (sizes.get(other, 0.0), other) > mine
        }
        return sorted((one for one, weight in shared.items() if weight), key=lambda one: (-shared[one], one))

    def explained(self, row: TransitionRow, larger: Sequence[int], name: str) -> list[AlertNote]:
        """Return notes on earlier alerts, of slices `larger`, that the one of `row`, called `name`, explains."""
        more = {"explained_by": name, "explained_by_id": row.slice_id, "incident": name}
        return [
            AlertNote(model_version_id=row.model_version_id, slice_id=one, more=more)
            for one in larger
            if not self._overtaken(row, one)
        ]

    def told(self, key: Key) -> Explanation:
        """Return what was told of an alert that was open before the fold; nothing where there was none."""
        known = self._known.get(key)
        return explanation_of(known.details) if known else Explanation()

    def explains(self, row: TransitionRow, by: int, explanation: Explanation) -> list[AlertNote]:
        """Return the note on an earlier alert, of slice `by`, with what it explains since the one of `row`."""
        if self._overtaken(row, by):
            return []
        more = {"explains": list(explanation.explains), "explains_ids": list(explanation.explains_ids)}
        return [AlertNote(model_version_id=row.model_version_id, slice_id=by, more=more)]

    def _overtaken(self, row: TransitionRow, other: int) -> bool:
        """Return whether a later change in the same fold says more of one of the two."""
        return any(
            one.fold_seq > row.fold_seq and one.slice_id in {row.slice_id, other}
            for one in self._transitions
            if one.model_version_id == row.model_version_id
        )

    def endings(self) -> list[AlertNote]:
        """Return notes on alerts that stood under one that has ended: nothing explains them any more."""
        ended = {
            (one.model_version_id, one.slice_id) for one in self._transitions if one.episode is Episode.CLOSE
        }
        return [
            AlertNote(
                model_version_id=key[0],
                slice_id=key[1],
                more={"explained_by": None, "explained_by_id": None, "incident": one.details.get("slice")},
            )
            for key, one in sorted(self._known.items())
            if (key[0], one.details.get("explained_by_id")) in ended
        ]


def smallest(
    scene: WindowSample,
    beside: Beside,
    sizes: Mapping[int, float],
    *,
    mine: int,
    cap: float,
    tolerance: float,
) -> int | None:
    """Return the smallest alerting slice that explains the alert of slice `mine`, or None.

    Parameters
    ----------
    scene
        Items of `mine` since the onset.
    beside
        What alerts, `mine` among it.
    sizes
        Weight of each slice's traffic; one that is not there is the smallest of all.
    mine
        The slice.
    cap
        Above it a divergence counts as much.
    tolerance
        By how much a learned baseline may be exceeded, as a share of it.
    """
    alert = beside.get(mine)
    if alert is None:
        return None
    values = scene.values(measure_of(alert.details, cap))
    known = np.isfinite(values)
    others = {
        other: scene.inside(other)[known]
        for other, one in beside.items()
        if other != mine and _RANK[one.severity] >= _RANK[alert.severity]
    }
    items = Items(x=values[known], weight=scene.weight[known], cluster=scene.cluster[known])
    weights = {one: sizes.get(one, 0.0) for one in (mine, *others)}
    return explaining(items, level_of(alert.details, tolerance), others, weights, mine)


def explains(
    scene: WindowSample,
    beside: Beside,
    sizes: Mapping[int, float],
    *,
    mine: int,
    larger: int,
    cap: float,
    tolerance: float,
) -> bool:
    """Return whether slice `mine` is the smallest that explains the alert of slice `larger`; see `smallest`.

    Parameters
    ----------
    scene
        Items of `larger` since the onset of `mine`.
    beside, sizes, cap, tolerance
        As in `smallest`.
    mine, larger
        The slices.
    """
    return smallest(scene, beside, sizes, mine=larger, cap=cap, tolerance=tolerance) == mine


def _alerting(change: TransitionRow) -> Alerting:
    return Alerting(
        model_version_id=change.model_version_id,
        slice_id=change.slice_id,
        severity=change.to_verdict,
        details=change.details,
    )
