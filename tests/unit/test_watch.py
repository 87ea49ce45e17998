"""Slices under watch: thresholds, sums over signals, resets, and bits that stay."""

import numpy as np
import pytest

from quantdrift.core.errors import OperatorError
from quantdrift.drift import budget as fields
from quantdrift.drift.detector import BUDGET
from quantdrift.drift.signal import ALERTING, PAGING, N
from quantdrift.drift.state import dump_state, load_state
from quantdrift.drift.watch import Change, Groups, Phase, Series, SignalKey, Thresholds, Watch, advance

pytestmark = pytest.mark.unit

THRESHOLDS = Thresholds(page=10.0, ticket=1.0)
FLIP, KL = SignalKey("flip", "budget"), SignalKey("kl", "budget")


def watch(*signals: SignalKey, m: float = 0.01) -> Watch:
    """Return a watch with fresh signals."""
    found = Watch()
    for key in signals:
        found.add(key, BUDGET.fresh(budget=m, scale=1.0, weighted=False, mass=0.0, at_us=0))
    return found


def groups(values: dict[str, list[float]], *, gamma: float = 1e-8, first: int = 0) -> Groups:
    """Return groups of full weight; nan is no observation."""
    n = len(next(iter(values.values())))
    steps = np.arange(first + 1, first + 1 + n, dtype=np.float64)
    series = {}
    for metric, x in values.items():
        seen = ~np.isnan(np.array(x))
        vx = np.where(seen, x, 0.0)
        series[SignalKey(metric, "budget")] = Series(x=np.stack((vx, seen.astype(float)), axis=-1), seen=seen)
    return Groups(order=steps - first - 1, mass=steps * gamma, at_us=steps, series=series)


def states_of(watches: list[Watch]) -> list[bytes]:
    """Return the bits of every state."""
    return [state.tobytes() for one in watches for _, state in sorted(one.states.items())]


def test_company_does_not_change_the_bits() -> None:
    """A slice advanced alone and among others of other lengths ends in the same bits, alarms included."""
    rng = np.random.default_rng(1)
    lengths = [1, 2, 3, 31, 32, 33, 64, 100, 5, 7, 90, 17]
    given = [
        groups({"flip": list((rng.random(n) < 0.2).astype(float)), "kl": list(rng.random(n) * 0.02)})
        for n in lengths
    ]
    together = [watch(FLIP, KL) for _ in lengths]
    changes = advance(together, given, THRESHOLDS)
    alone = [watch(FLIP, KL) for _ in lengths]
    single: list[Change] = []
    for one, part in zip(alone, given, strict=True):
        single += advance([one], [part], THRESHOLDS)
    assert states_of(together) == states_of(alone)
    assert len(changes) == len(single) > 4


def test_steps_one_by_one_give_the_same_bits() -> None:
    """Another split of the same groups ends in the same bits, with the same changes at the same groups."""
    rng = np.random.default_rng(2)
    x = list((rng.random(400) < 0.06).astype(float))
    whole, stepped = watch(FLIP), watch(FLIP)
    at_once = advance([whole], [groups({"flip": x})], THRESHOLDS)
    by_one = [
        change
        for step, value in enumerate(x)
        for change in advance([stepped], [groups({"flip": [value]}, first=step)], THRESHOLDS)
    ]
    assert [(change.after, change.at_us) for change in at_once] == [(one.after, one.at_us) for one in by_one]
    assert states_of([whole]) == states_of([stepped])


def test_a_stored_state_goes_on_bit_for_bit() -> None:
    """A state that was dumped and loaded at a batch boundary gives the same bits as one that was not."""
    rng = np.random.default_rng(3)
    kept, stored = watch(FLIP), watch(FLIP)
    for batch in range(20):
        part = groups({"flip": list((rng.random(16) < 0.03).astype(float))}, first=16 * batch)
        advance([kept], [part], THRESHOLDS)
        advance([stored], [part], THRESHOLDS)
        stored = Watch(
            stored.phase, {FLIP: load_state("budget", dump_state("budget", stored.states[FLIP]), fields.SIZE)}
        )
    assert states_of([kept]) == states_of([stored])
    assert len(dump_state("budget", kept.states[FLIP])) < 4096


def test_signals_of_a_slice_are_summed() -> None:
    """Two signals, each short of the threshold, page together; each alone does not."""
    flips = [1.0, 1.0, 1.0, 1.0, 1.0]
    alone = watch(FLIP)
    advance([alone], [groups({"flip": flips})], Thresholds(page=1e12, ticket=1e12))
    threshold = Thresholds(page=1.5 * alone.evidence(), ticket=1e12)
    alone, both = watch(FLIP), watch(FLIP, KL)
    assert not advance([alone], [groups({"flip": flips})], threshold)
    (change,) = advance([both], [groups({"flip": flips, "kl": flips})], threshold)
    assert change.after is Phase.FIRING
    assert change.evidence[FLIP] == change.evidence[KL] > 0
    assert both.evidence() == 0.0


def test_a_warning_comes_first_and_a_page_after_it() -> None:
    """The ticket copy has the lower threshold; the page copy goes on through the warning."""
    one = watch(FLIP)
    # A flip in each twelfth group: 8 % against 1 %.
    x = [float(step % 12 == 0) for step in range(600)]
    changes = advance([one], [groups({"flip": x})], THRESHOLDS)
    assert [(change.before, change.after) for change in changes] == [
        (Phase.WATCHING, Phase.WARNING),
        (Phase.WARNING, Phase.FIRING),
    ]
    assert one.states[FLIP][ALERTING] == 1.0
    assert one.evidence() == 0.0


def test_a_slice_resolves_when_every_signal_has_recovered() -> None:
    """While one of two signals is still above its budget the alert lasts; then both watch again from nothing."""
    one = watch(FLIP, KL)
    advance([one], [groups({"flip": [1.0] * 8, "kl": [1.0] * 8})], THRESHOLDS)
    assert one.phase is Phase.FIRING
    half = groups({"flip": [0.0] * 1500, "kl": [0.03] * 1500}, first=8)
    assert not advance([one], [half], THRESHOLDS)
    (change,) = advance([one], [groups({"flip": [0.0] * 1500, "kl": [0.0] * 1500}, first=1508)], THRESHOLDS)
    assert change.after is Phase.WATCHING
    assert one.states[FLIP][PAGING] == 1.0
    assert one.states[FLIP][N] < 1500


def test_unobserved_groups_change_nothing_but_keep_their_time() -> None:
    """A group without a metric leaves its evidence alone; the mass meanwhile is spent on the next observation."""
    gaps, dense = watch(FLIP), watch(FLIP)
    nan = float("nan")
    advance([gaps], [groups({"flip": [0.0, nan, nan, 0.0]})], THRESHOLDS)
    part = groups({"flip": [0.0, 0.0]})
    part = Groups(
        order=part.order, mass=np.array([1e-8, 4e-8]), at_us=np.array([1.0, 4.0]), series=part.series
    )
    advance([dense], [part], THRESHOLDS)
    np.testing.assert_allclose(gaps.states[FLIP], dense.states[FLIP], rtol=1e-14)


def test_mass_alone_never_alarms() -> None:
    """After months of silence one clean group is no alarm, however much mass it carries."""
    one = watch(FLIP)
    assert not advance([one], [groups({"flip": [0.0, 0.0]}, gamma=100.0)], THRESHOLDS)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"QD\x02" + dump_state("budget", np.zeros(3))[3:], "version 2"),
        (dump_state("tail", np.zeros(3)), "of kind"),
        (b"", "no header"),
        (dump_state("budget", np.zeros(3))[:-1] + b"\x01", "checksum"),
        (dump_state("budget", np.zeros(4)), "bytes"),
    ],
)
def test_a_state_that_cannot_be_read_is_refused_by_name(blob: bytes, message: str) -> None:
    """Another version, another kind, damage: the message says which."""
    with pytest.raises(OperatorError, match=message):
        load_state("budget", blob, 3)
