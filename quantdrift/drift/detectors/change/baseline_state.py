"""The baselines in the state of a learning signal: the current one, earlier ones, and the groups set aside.

Each is one row: event time of the last group, number of groups, and the two sums per margin bin of
`quantdrift.drift.detectors.change.baseline`. `LIVE` is the baseline that learns; `BORN` is its copy from when it went live; `DAYS` are
copies from the ends of the last days, so that after a real change it can be reset to before the onset. Nothing is lost:
groups that are taken out, and those that arrive during an alert, are in `ASIDE` until the next alert, in case a person
decides that the alert was false.
"""

import numpy as np

from quantdrift.drift.detectors.change.baseline import N_STRATA, READY_EVENTS, READY_GROUPS, Baseline
from quantdrift.drift.evidence.clock import DAY_US
from quantdrift.drift.evidence.header import ALERTING, HEADER, LAST_AT
from quantdrift.drift.evidence.margin import N_BINS
from quantdrift.drift.evidence.numba_cache import compiled
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray

STAGE, TAU, DELTA, SINCE_AT, ONSET_AT = range(HEADER, HEADER + 5)
LEARNING, LIVING, FIXED = 0.0, 1.0, 2.0  # values of `STAGE`
NO_ONSET = -1.0  # in `ONSET_AT`: there is no onset to go back from
FALSE_ALARM = -2.0  # in `ONSET_AT`: the open alert was judged false
SELECTED = -3.0  # in `ONSET_AT`: as `NO_ONSET`, but an earlier alert has chosen what was learned
EMPTY = -1.0  # in a row's `AT`: no snapshot yet
CUTS = slice(ONSET_AT + 1, ONSET_AT + N_STRATA)  # N_BINS where there is no further stratum
BOUNDS = slice(CUTS.stop, CUTS.stop + N_STRATA)
AT, GROUPS = 0, 1
SHARE = slice(2, 2 + N_BINS)
TOTAL = slice(SHARE.stop, SHARE.stop + N_BINS)
ROW = TOTAL.stop
SHARE_AT, TOTAL_AT = SHARE.start, TOTAL.start
N_DAYS = 3
LIVE, ASIDE, BORN = range(3)
DAYS = slice(3, 3 + N_DAYS)
ROWS = slice(BOUNDS.stop, BOUNDS.stop + (3 + N_DAYS) * ROW)
STOP = ROWS.stop
# Start indices, since compiled code cannot use slices of the module.
_LIVE, _ASIDE, _CUTS = ROWS.start + LIVE * ROW, ROWS.start + ASIDE * ROW, CUTS.start
_KEPT_AT = [ROWS.start + row * ROW + AT for row in (BORN, *range(DAYS.start, DAYS.stop))]


def rows_of(states: FloatArray) -> FloatArray:
    """Return the rows of one state or of many, (..., rows, ROW); of one state it is a view to write to."""
    return states[..., ROWS].reshape(*states.shape[:-1], -1, ROW)


@compiled
def known(state: FloatArray, strata: IntArray, stratum: int) -> tuple[float, float]:
    """Return share and total of a testing stratum in the pool of the learned null.

    That is the baseline plus the groups that an open alert set aside: a page copy that continues through a warning would
    otherwise bet against a finite, fixed baseline as long as the warning lasts.
    """
    share = total = 0.0
    for bin_ in range(N_BINS):
        if strata[bin_] == stratum:
            share += state[_LIVE + SHARE_AT + bin_]
            total += state[_LIVE + TOTAL_AT + bin_]
            if state[ALERTING] > 0:
                share += state[_ASIDE + SHARE_AT + bin_]
                total += state[_ASIDE + TOTAL_AT + bin_]
    return share, total


@compiled
def learn(state: FloatArray, group: FloatArray) -> None:
    """Add a group, (2 * N_BINS,) shares and totals, to the baseline, or set it aside during an alert; in place.

    What is fixed learns nothing.
    """
    if state[STAGE] == FIXED:
        return
    row = _ASIDE if state[ALERTING] > 0 else _LIVE
    state[row + AT] = state[LAST_AT]
    state[row + GROUPS] += 1.0
    for bin_ in range(N_BINS):
        if group[bin_] > 0:
            state[row + SHARE_AT + bin_] += group[bin_]
            state[row + TOTAL_AT + bin_] += min(group[N_BINS + bin_], group[bin_])


def opened(state: FloatArray, *, tau: float, delta: float, at_us: float) -> None:
    """Start to learn, in place."""
    if not (tau >= 0 and 0 < delta < 1):
        raise ValueError(
            f"a tolerance of {tau} at level {delta}: it is at least 0, and the level inside (0, 1)"
        )
    state[STAGE], state[TAU], state[DELTA] = LEARNING, tau, delta
    state[SINCE_AT], state[ONSET_AT] = at_us, NO_ONSET
    state[CUTS], state[BOUNDS] = N_BINS, 1.0
    rows = rows_of(state)
    rows[:] = 0.0
    rows[DAYS, AT] = rows[BORN, AT] = EMPTY
    rows[LIVE, AT] = at_us


def read(state: FloatArray) -> Baseline:
    """Return the current baseline."""
    row = rows_of(state)[LIVE]
    live = state[STAGE] != LEARNING
    cuts = tuple(int(cut) for cut in state[CUTS] if cut < N_BINS) if live else ()
    return Baseline(
        share=tuple(map(float, row[SHARE])),
        total=tuple(map(float, row[TOTAL])),
        n_groups=int(row[GROUPS]),
        cuts=cuts,
        bounds=tuple(map(float, state[BOUNDS][: len(cuts) + 1])) if live else (),
        tau=float(state[TAU]),
        delta=float(state[DELTA]),
        since_us=int(state[SINCE_AT]),
        until_us=int(row[AT]),
        fixed=bool(state[STAGE] == FIXED),
        selected=bool(state[ONSET_AT] != NO_ONSET),
    )


def write(state: FloatArray, baseline: Baseline) -> None:
    """Start with `baseline`, in place; with strata the signal is live, without them it continues to learn."""
    if len(baseline.share) != N_BINS or len(baseline.total) != N_BINS:
        raise ValueError(f"a baseline has two sums for each of {N_BINS} margin bins")
    opened(state, tau=baseline.tau, delta=baseline.delta, at_us=baseline.since_us)
    row = rows_of(state)[LIVE]
    row[AT], row[GROUPS] = baseline.until_us, baseline.n_groups
    row[SHARE], row[TOTAL] = baseline.share, baseline.total
    if baseline.selected:
        state[ONSET_AT] = SELECTED
    if baseline.bounds:
        settle(state, baseline)
        state[STAGE] = FIXED if baseline.fixed else LIVING


def settle(state: FloatArray, baseline: Baseline) -> None:
    """Go live with the strata and bounds of `baseline`, in place."""
    state[CUTS.start : CUTS.start + len(baseline.cuts)] = baseline.cuts
    state[BOUNDS.start : BOUNDS.start + len(baseline.bounds)] = baseline.bounds
    state[STAGE] = LIVING
    rows = rows_of(state)
    rows[BORN] = rows[LIVE]


def fix(state: FloatArray) -> None:
    """Stop learning, in place: bounds are fixed again, from all that was learned since the signal went live."""
    bounds = read(state).bounded().bounds
    state[BOUNDS.start : BOUNDS.start + len(bounds)] = bounds
    state[STAGE] = FIXED


def lower(state: FloatArray) -> None:
    """Lower the bounds of a live signal to those of what it has learned by now, in place, where these are less.

    The bounds are time-uniform, so the least of them so far is one. Not while an alert lasts, nor after one: what it
    took out of the baseline was chosen by its values.
    """
    if state.item(STAGE) != LIVING or state.item(ALERTING) or state.item(ONSET_AT) != NO_ONSET:
        return
    bounds = read(state).lowered().bounds
    state[BOUNDS.start : BOUNDS.start + len(bounds)] = bounds


def promising(state: FloatArray) -> bool:
    """Return whether there are enough groups, up to rounding: a quick test before `read`, which decides."""
    enough = state.item(_LIVE + GROUPS) >= READY_GROUPS
    return enough and bool(state[_LIVE + TOTAL_AT : _LIVE + TOTAL_AT + N_BINS].sum() >= READY_EVENTS - 0.5)


def may_be_ready(states: FloatArray) -> BoolArray:
    """Return whether each of many learns and has groups enough, (N,): only then anything can be `promising`."""
    learning = (states[:, STAGE] == LEARNING) & (states[:, ALERTING] == 0.0)
    return np.asarray(learning & (states[:, _LIVE + GROUPS] >= READY_GROUPS))


def kept_until_us(states: FloatArray) -> FloatArray:
    """Return the event time of each of many, (N,), before which `snapshot` changes nothing; infinite where nothing is kept."""
    kept = (states[:, STAGE] == LIVING) & (states[:, ALERTING] == 0.0)
    return np.where(kept, states[:, _KEPT_AT].max(axis=1) + DAY_US, np.inf)


def snapshot(state: FloatArray, *, at_us: int) -> None:
    """Once a day copy the baseline of a live signal over the oldest snapshot."""
    # Called for every signal after every batch: the answer is nearly always no.
    if state.item(STAGE) != LIVING or state.item(ALERTING):
        return
    newest = max(map(state.item, _KEPT_AT))
    if at_us - newest < DAY_US:
        return
    rows = rows_of(state)
    days = rows[DAYS]
    if rows[LIVE, GROUPS] == max(days[:, GROUPS].max(), rows[BORN, GROUPS]):
        return
    oldest = int(np.argmin(days[:, AT]))
    days[oldest] = rows[LIVE]
    days[oldest, AT] = max(at_us, state[LAST_AT])


def before(state: FloatArray, onset_us: float) -> FloatArray:
    """Return the newest row, (ROW,), that ended before `onset_us`; where there is none, the one from going live."""
    rows = rows_of(state)
    earlier = [row for row in rows[DAYS] if EMPTY < row[AT] <= onset_us]
    newest: FloatArray = max(earlier, key=lambda row: float(row[AT]), default=rows[BORN])
    return newest.copy()


def go_back(state: FloatArray) -> None:
    """Reset the baseline to before the onset of an alert, in place; the groups taken out are set aside."""
    onset_us = float(state[ONSET_AT])
    if onset_us in {NO_ONSET, SELECTED}:
        return
    if onset_us == FALSE_ALARM:
        take_back(state)
    state[ONSET_AT] = SELECTED
    if state[STAGE] != LIVING or onset_us == FALSE_ALARM:
        return
    rows = rows_of(state)
    kept = before(state, onset_us)
    taken = rows[LIVE] - kept
    rows[ASIDE, GROUPS:] += np.maximum(taken[GROUPS:], 0.0)
    rows[ASIDE, AT] = max(rows[ASIDE, AT], rows[LIVE, AT])
    rows[LIVE] = kept
    for row in rows[DAYS]:
        if row[AT] > kept[AT]:
            row[:] = 0.0
            row[AT] = EMPTY


def take_back(state: FloatArray) -> None:
    """Add the groups set aside to the baseline, in place, also those still to come in the open alert: it was false."""
    if state[ALERTING]:
        state[ONSET_AT] = FALSE_ALARM
    if state[STAGE] == FIXED:
        return
    rows = rows_of(state)
    rows[LIVE, GROUPS:] += rows[ASIDE, GROUPS:]
    rows[LIVE, AT] = max(rows[LIVE, AT], rows[ASIDE, AT])
    rows[ASIDE] = 0.0


def has_aside(state: FloatArray) -> bool:
    """Return whether `take_back` would change anything: an alert is open, or has set groups aside."""
    alerting_or_aside = state[ALERTING] or rows_of(state)[ASIDE, GROUPS]
    return bool(state[STAGE] != FIXED and alerting_or_aside)


@compiled
def strata_of(state: FloatArray) -> IntArray:
    """Return the testing stratum of each margin bin, (N_BINS,)."""
    strata = np.zeros(N_BINS, dtype=np.intp)
    for bin_ in range(N_BINS):
        for cut in range(_CUTS, _CUTS + N_STRATA - 1):
            strata[bin_] += bin_ >= state[cut]
    return strata
