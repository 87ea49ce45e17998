"""Has the share of a slice among the samples fallen, although its traffic has not? Samples that are not lost at random.

Where samples are lost, a small slice can lose nearly all of its own although its header stratum loses 2 %: what is compared of
it then says nothing. How many requests a slice has is not known at capture; its share among the samples is, by hours of capture.

A window (the newest 1, 2 or 6 hours) is compared with every block of earlier hours that has at least as much traffic. With x samples
of the slice in the window and y in the block, and t and s samples of all traffic, x given x + y is binomial where the counts are
Poisson, so that

    H0: share in the window >= kept * share in the block

is tested exactly by P(Bin(x + y, r / (1 + r)) <= x), r = kept * t / s. The share has fallen if H0 is rejected for *every* block: the
null is a union over blocks, and rejecting each of its parts at a level needs no correction for their number (Berger, Technometrics
24, 1982). Weighted samples count as (sum of w)^2 / sum of w^2, sessions as one each.

Assumption: in health the share is at least `KEPT` = half of the share in at least one earlier block. So the mix may swing with the
hour of the day, since the trough of the day before is a block; while less than a day is known, at least a third of some earlier share
must be left. The hours of a window in which the share has fallen are no block for later ones, unless it is known that nothing was lost in them.

Bound: a version without such losses is flagged at any look of 30 days with probability of at most `ERROR` = 1 %, by the union bound over
slices, windows and looks (once a minute).

What breaks the assumption, and then makes a slice `unknown` while samples of its stratum are missing, for at most `HISTORY_H` hours: traffic
of the slice that ends or is moved away; a holiday or weekend with less than half of any earlier share; a refit that moves the border of a
cluster; a trough in the first day below a third of all before. What it cannot see: losses from the first hour on, losses
that grow so slowly that each hour is like one before it, losses of less than half of a slice, and slices with fewer than some 130 expected
samples in six hours (250 in the first day).
"""

from typing import Final

import msgspec
import numpy as np
from scipy.special import betainc

from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray

WINDOWS_H: Final = (1, 2, 6)
HISTORY_H: Final = 72
DAY_H: Final = 24
KEPT: Final = 0.5
KEPT_YOUNG: Final = 1.0 / 3.0
"""While less than a day is known."""
ERROR: Final = 0.01
_LOOKS: Final = 30 * 24 * 60 * len(WINDOWS_H)


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of some slices by hour of capture, the newest hour last.

    Parameters
    ----------
    weight, weight_sq
        (slices, hours) sums of w and w^2, w = 1 / pi; where nothing was sampled, 0.
    total
        (hours,) sum of w over all traffic.
    """

    weight: FloatArray
    weight_sq: FloatArray
    total: FloatArray


class Fallen(msgspec.Struct, frozen=True, kw_only=True):
    """Which shares have fallen in the newest hours.

    Parameters
    ----------
    fallen
        (slices,)
    window_h
        (slices,) hours of the window in which it has fallen; 0 where it has not.
    now, before
        (slices,) the share in that window, and the lowest one of earlier blocks; 0 where it has not.
    """

    fallen: BoolArray
    window_h: IntArray
    now: FloatArray
    before: FloatArray


def fallen(shares: Shares, usable: BoolArray, *, n_slices: int) -> Fallen:
    """Return whose share has fallen in the newest hours.

    Parameters
    ----------
    usable
        (slices, hours) which hours may be compared with; the newest ones of a window never are.
    n_slices
        Slices of the model: they share the allowed error.
    """
    n, n_hours = shares.weight.shape
    slices = _none(n)
    for window in WINDOWS_H:
        begin = n_hours - window
        if begin < 1 or not shares.total[begin:].sum() > 0:
            continue
        of = in_window(shares, usable, begin, ERROR / (_LOOKS * max(n_slices, 1)))
        new = of.fallen & ~slices.fallen
        slices.fallen[new], slices.window_h[new] = True, window
        slices.now[new], slices.before[new] = of.now[new], of.before[new]
    return slices


def usable_hours(shares: Shares, lossless: BoolArray, *, n_slices: int) -> BoolArray:
    """Return which hours may be compared with, (slices, hours).

    Not those before a slice had its first sample, and not those of windows in which its share had fallen, unless it is known that nothing
    was lost in them.

    Parameters
    ----------
    lossless
        (hours,) the hours in which it is known that nothing was lost.
    """
    seen = np.cumsum(shares.weight > 0, axis=1)
    usable: BoolArray = seen > 0
    for hour in range(1, len(lossless)):
        if lossless[hour] or not shares.total[hour] > 0:
            continue
        until = Shares(
            weight=shares.weight[:, : hour + 1],
            weight_sq=shares.weight_sq[:, : hour + 1],
            total=shares.total[: hour + 1],
        )
        leave_out(usable[:, : hour + 1], fallen(until, usable[:, : hour + 1], n_slices=n_slices), lossless)
    return usable


def in_window(shares: Shares, usable: BoolArray, begin: int, level: float) -> Fallen:
    """Return whose share has fallen from the hour `begin` on, each at a level of its own."""
    weight, weight_sq = shares.weight[:, begin:].sum(axis=1), shares.weight_sq[:, begin:].sum(axis=1)
    total = float(shares.total[begin:].sum())
    starts, ends = _blocks(shares.total[:begin], total)
    slices = _none(len(weight))
    if not len(starts):
        return slices
    of = usable[:, :begin]
    y, y_sq, s = (
        _sums(np.where(of, hourly[:, :begin], 0.0), starts, ends)
        for hourly in (shares.weight, shares.weight_sq, np.broadcast_to(shares.total, shares.weight.shape))
    )
    compared = s >= 0.5 * total  # else most of the block's hours are not usable
    share = np.where(compared, y / np.where(compared, s, 1.0), np.inf)
    before, now = share.min(axis=1), weight / total
    hours = np.arange(begin)
    oldest = np.where(of & (shares.total[:begin] > 0), hours, begin).min(axis=1)
    kept = np.where(begin - oldest >= DAY_H, KEPT, KEPT_YOUNG)
    rows = np.flatnonzero(np.isfinite(before) & (now < kept * before))
    if not len(rows):
        return slices
    y, y_sq, s, compared = y[rows], y_sq[rows], s[rows], compared[rows]
    unit = np.where(y > 0, y_sq / np.where(y > 0, y, 1.0), 1.0)  # mean weight of a sample
    x, x_sq = weight[rows, None], weight_sq[rows, None]
    unit_now = np.where(x > 0, x_sq / np.where(x > 0, x, 1.0), unit)
    ratio = kept[rows, None] * (total / unit_now) / np.where(compared, s, 1.0) * unit
    n_now, n_before = x / unit_now, y / unit
    # P(Bin(n_now + n_before, p) <= n_now), p = ratio / (1 + ratio), continued to counts that are not whole.
    p_value = np.where(
        n_before > 0, betainc(np.maximum(n_before, 1e-9), n_now + 1.0, 1.0 / (1.0 + ratio)), 1.0
    )
    sure = np.where(compared, p_value, 0.0).max(axis=1) <= level
    slices.fallen[rows[sure]], slices.window_h[rows[sure]] = True, shares.weight.shape[1] - begin
    slices.now[rows[sure]], slices.before[rows[sure]] = now[rows[sure]], before[rows[sure]]
    return slices


def leave_out(usable: BoolArray, found: Fallen, lossless: BoolArray) -> None:
    """Mark the hours of windows in which shares have fallen as not usable, in place, the newest hour last."""
    n_hours = usable.shape[1]
    in_it = np.arange(n_hours) >= n_hours - found.window_h[:, None]
    usable &= ~in_it | lossless[:n_hours]


def _none(n: int) -> Fallen:
    return Fallen(
        fallen=np.zeros(n, dtype=np.bool_),
        window_h=np.zeros(n, dtype=np.intp),
        now=np.zeros(n),
        before=np.zeros(n),
    )


def _blocks(total: FloatArray, least: float) -> tuple[IntArray, IntArray]:
    """Return begins and ends of blocks of hours: up to the end of each hour, as few as have at least the traffic `least`."""
    until = np.concatenate(((0.0,), np.cumsum(total)))
    ends = np.flatnonzero(until[1:] >= least) + 1
    starts = np.searchsorted(until, until[ends] - least, side="right") - 1
    return starts.astype(np.intp), ends.astype(np.intp)


def _sums(values: FloatArray, starts: IntArray, ends: IntArray) -> FloatArray:
    """Return the sums of `values`, (slices, hours), over blocks, (slices, blocks)."""
    until = np.concatenate((np.zeros((len(values), 1)), np.cumsum(values, axis=1)), axis=1)
    return np.maximum(until[:, ends] - until[:, starts], 0.0)
