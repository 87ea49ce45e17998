"""Lowering of all sampling rates by the shadow's lag: halved in steps before the stream is full, raised slowly. Pure.

The stream refuses messages that do not fit into `max_bytes` and deletes those older than `max_age_s`; both are losses.
`load` is the largest of three shares of these limits, each known before the limit is reached:

- stored bytes, plus the growth since the last look extrapolated by a minute, over `max_bytes`;
- age of the oldest exchanges over `max_age_s`;
- time that the shadow needs for the backlog, at its pace of the last minutes, over `max_age_s`: an exchange that
  arrives now will wait this long.

The oldest ten, or one in a hundred of the backlog, are left out of age and time: an exchange that is redelivered until
it is quarantined grows old at any rate, and must not halve the rates of the fleet. The age of the eleventh is
known from the time at which the stream had grown to its position.

At a load of one half the rates are halved, at each look and once more for each doubling of the load, until the backlog
shrinks. When the load has stayed below an eighth for five minutes they are doubled, one step at a time. A shadow that
does nothing at all has no pace: it may be back in a minute, and age and bytes decide.

Assumptions under which `tests/property/test_lag.py` shows that nothing is lost: at the full rate the stream would take
five minutes to fill, and the shadow processes within `max_age_s` the exchanges that the full rate adds in 150 seconds.
Beyond these the stream's own limits apply, and every loss is counted.
"""

import math
from bisect import bisect_left
from operator import itemgetter

import msgspec

from quantdrift.core.stream.backlog import Backlog

LOOK_S = 15.0
HIGH, LOW = 0.5, 0.125
MOST_STEPS = 12
_STEPS_AT_ONCE = 4
_HORIZON_S = 60.0
_CALM_S = 300.0
_HALF_LIFE_S = 60.0
FEW, _FEW_SHARE = 10, 0.01  # that may be stuck


class LagLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of the stream.

    Parameters
    ----------
    max_bytes
        Above it, exchanges are refused.
    max_age_s
        After this time, they are deleted.
    """

    max_bytes: float
    max_age_s: float


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """How far the rates are lowered, and the last look at the stream.

    Parameters
    ----------
    steps
        Current number of halvings.
    load
        Largest share of the stream's limits that is used or will soon be.
    calm_s
        For how long the load has been low.
    drained_per_s
        Exchanges per second that the shadow completes when it has work; None while that is not known.
    silent_s
        For how long it had work and completed nothing: this time counts for the next completions.
    grown
        Past looks, as time and number of exchanges ever stored by then: as far back as the backlog reaches.
    last, at_s
        The last look and its time, monotonic seconds.
    """

    steps: int = 0
    load: float = 0.0
    calm_s: float = 0.0
    drained_per_s: float | None = None
    silent_s: float = 0.0
    grown: tuple[tuple[float, int], ...] = ()
    last: Backlog | None = None
    at_s: float = 0.0

    @property
    def factor(self) -> float:
        """The factor of every rate: a power of two, at most 1."""
        return math.ldexp(1.0, -self.steps)


def lag_of(factor: float) -> Lag:
    """Return the lag that belongs to a factor that another leader published."""
    steps = round(-math.log2(factor)) if factor > 0 else MOST_STEPS
    return Lag(steps=min(max(steps, 0), MOST_STEPS))


def advance(lag: Lag, backlog: Backlog, limits: LagLimits, at_s: float) -> Lag:
    """Return the lag after a look at the stream.

    Parameters
    ----------
    lag
        The lag after the previous look.
    at_s
        Monotonic seconds.
    """
    last, elapsed_s = lag.last, at_s - lag.at_s
    first = (
        last is None or elapsed_s <= 0 or backlog.n_ever < last.n_ever
    )  # the first look, or at a new stream
    grown = _grown(() if first else lag.grown, backlog, at_s)
    aged_s = _aged_s(grown, backlog, at_s)
    if last is None or first:
        load = _load(backlog, limits, aged_s=aged_s, growth_per_s=0.0, drained_per_s=None)
        return msgspec.structs.replace(
            lag, load=load, grown=grown, last=backlog, at_s=at_s, calm_s=0.0, silent_s=0.0
        )
    drained_per_s, silent_s = _pace(lag, last, backlog, elapsed_s)
    growth_per_s = (backlog.n_bytes - last.n_bytes) / elapsed_s
    load = _load(backlog, limits, aged_s=aged_s, growth_per_s=growth_per_s, drained_per_s=drained_per_s)
    steps, calm_s = lag.steps, 0.0
    if load >= HIGH:
        if backlog.n_messages >= last.n_messages:
            more = 1 + math.floor(math.log2(load / HIGH))
            steps = min(steps + min(more, _STEPS_AT_ONCE), MOST_STEPS)
    elif load <= LOW:
        calm_s = lag.calm_s + elapsed_s
        if calm_s >= _CALM_S and steps:
            steps, calm_s = steps - 1, 0.0
    return Lag(
        steps=steps,
        load=load,
        calm_s=calm_s,
        drained_per_s=drained_per_s,
        silent_s=silent_s,
        grown=grown,
        last=backlog,
        at_s=at_s,
    )


def _few(backlog: Backlog) -> int:
    """Return how many exchanges of the backlog may be stuck."""
    return max(FEW, math.ceil(_FEW_SHARE * backlog.n_messages))


def _waiting(backlog: Backlog) -> int:
    """Return how many exchanges wait for the shadow, without those that may be stuck."""
    return max(0, backlog.n_messages - _few(backlog))


def _position(backlog: Backlog) -> int:
    """Return the position of the oldest waiting exchange that is not stuck, counted from the stream's first message ever."""
    return backlog.n_ever - _waiting(backlog) + 1


def _grown(
    grown: tuple[tuple[float, int], ...], backlog: Backlog, at_s: float
) -> tuple[tuple[float, int], ...]:
    """Return the looks back to the last one before the stream had grown to that position."""
    kept = grown[max(0, bisect_left(grown, _position(backlog), key=itemgetter(1)) - 1) :]
    if kept and kept[-1][1] == backlog.n_ever:
        return (*kept[:-1], (at_s, backlog.n_ever))
    return (*kept, (at_s, backlog.n_ever))


def _aged_s(grown: tuple[tuple[float, int], ...], backlog: Backlog, at_s: float) -> float:
    """Return the age of the oldest waiting exchange that is not stuck, to the accuracy of a look; 0 where there is none."""
    if not _waiting(backlog):
        return 0.0
    begun_s, n_ever = grown[0]
    # Exchanges that waited already at the first look may be as old as the oldest.
    return min(backlog.oldest_s, at_s - begun_s) if n_ever < _position(backlog) else backlog.oldest_s


def _pace(lag: Lag, last: Backlog, now: Backlog, elapsed_s: float) -> tuple[float | None, float]:
    """Return the shadow's pace, and for how long it has had work and completed nothing."""
    before = lag.drained_per_s
    n_done = (now.n_ever - last.n_ever) - (now.n_messages - last.n_messages)
    working_s = elapsed_s + lag.silent_s
    if n_done <= 0:
        return before, working_s if _waiting(now) else 0.0
    rate = n_done / working_s
    if before is None or not _waiting(now):
        return max(rate, before or 0.0), 0.0  # it waits for work: it could do this much, and perhaps more
    decay = 2.0 ** (-working_s / _HALF_LIFE_S)
    return decay * before + (1.0 - decay) * rate, 0.0


def _load(
    backlog: Backlog, limits: LagLimits, *, aged_s: float, growth_per_s: float, drained_per_s: float | None
) -> float:
    full = (backlog.n_bytes + _HORIZON_S * max(growth_per_s, 0.0)) / limits.max_bytes
    wait_s = _waiting(backlog) / drained_per_s if drained_per_s else 0.0
    return max(full, aged_s / limits.max_age_s, wait_s / limits.max_age_s)
