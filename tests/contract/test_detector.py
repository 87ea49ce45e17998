"""What every detector must do, whatever its kind: one line in `tests.detectors` for a new one."""

import struct
import zlib

import msgspec
import numpy as np
import pytest

from quantdrift.core.errors import OperatorError
from quantdrift.drift.detectors.protocol import DETECTORS, GROWTH, LEARNERS
from quantdrift.drift.evidence.clock import DAY_US
from quantdrift.drift.evidence.header import (
    ALERTING,
    LAST_AT,
    MASS,
    N_TOTAL,
    PAGE_MASS,
    PAGING,
    TICKET_MASS,
    TICKETING,
    M,
    N,
)
from quantdrift.drift.evidence.observations import STEPS
from quantdrift.drift.evidence.state import VERSION, dump_state, load_state
from quantdrift.drift.watch import Groups, Series, SignalKey, SliceWatch, Thresholds, advance
from tests.support.monitor.detectors import EXAMPLES, PATHS, after, given, mixed, phases, sound

pytestmark = pytest.mark.contract

MOST_BYTES = 4096
ENDLESS = Thresholds(page=1e300, ticket=1e300)


KINDS = pytest.mark.parametrize("kind", sorted(DETECTORS))
LEARNING = pytest.mark.parametrize("kind", sorted(LEARNERS))


def test_every_kind_has_an_example() -> None:
    """A detector that is registered is tested here."""
    assert set(EXAMPLES) == set(DETECTORS)
    assert all(detector.kind == kind for kind, detector in DETECTORS.items())


@KINDS
def test_a_path_has_one_value_per_step_and_signal_and_leaves_its_states_alone(kind: str) -> None:
    """`run` is pure: what it is given is as it was, and so is the path after it was stopped."""
    detector, states = DETECTORS[kind], phases(kind)
    block = given(kind, mixed(1, len(states)))
    before = states.tobytes(), block.x.tobytes()
    path = detector.run(states, block)
    for name in PATHS:
        values = getattr(path, name)
        assert values.shape == (STEPS, len(states))
        assert not np.isnan(values).any()
        assert (values >= 0).all()
    stop = np.arange(len(states))
    assert path.stopped(stop).tobytes() == path.stopped(stop).tobytes()
    assert path.stopped(stop).shape == (len(states), detector.size)
    assert (states.tobytes(), block.x.tobytes()) == before


@KINDS
def test_the_path_is_what_its_states_say(kind: str) -> None:
    """Evidence and mass of the page copy after any step are those of the state that was stopped there."""
    detector, states = DETECTORS[kind], phases(kind)
    path = detector.run(states, given(kind, mixed(2, len(states))))
    for step in (0, 7, STEPS - 1):
        stopped = path.stopped(np.full(len(states), step))
        np.testing.assert_allclose([detector.evidence(one) for one in stopped], path.page[step], rtol=1e-12)
        np.testing.assert_array_equal([detector.page_mass(one) for one in stopped], path.page_mass[step])
        np.testing.assert_array_equal(stopped[:, TICKET_MASS], path.ticket_mass[step])


@KINDS
def test_the_header_is_kept(kind: str) -> None:
    """Groups, times and masses in the first fields mean the same for every kind."""
    detector, states = DETECTORS[kind], phases(kind)
    found = after(detector, states, given(kind, mixed(3, len(states)), gamma=1e-3))
    assert (found[:, N_TOTAL] == STEPS).all()
    assert (found[:, LAST_AT] == STEPS * EXAMPLES[kind].apart_us).all()
    np.testing.assert_allclose(found[:, MASS], STEPS * 1e-3)
    live = np.array([detector.live(state) for state in states])
    np.testing.assert_allclose(found[live, PAGE_MASS], found[live, PAGING] * STEPS * 1e-3)
    np.testing.assert_allclose(found[live, TICKET_MASS], found[live, TICKETING] * STEPS * 1e-3)
    assert ((found[:, M] > 0) | ~live | (found[:, ALERTING] == 1) | (kind == "tail")).all()


@KINDS
def test_any_state_fits_the_store_and_comes_back_bit_for_bit(kind: str) -> None:
    """Through its binary form in the middle of a stream, at most 4,096 bytes; the next block gives the same bits."""
    detector, kept = DETECTORS[kind], phases(kind)
    assert detector.size * 8 <= MOST_BYTES
    stored = kept.copy()
    for turn in range(4):
        block = given(kind, mixed(10 + turn, len(kept)), first=turn * STEPS)
        kept, stored = after(detector, kept, block), after(detector, stored, block)
        blobs = [dump_state(kind, state) for state in stored]
        stored = np.stack([load_state(kind, blob, detector.size) for blob in blobs])
    assert kept.tobytes() == stored.tobytes()


@KINDS
def test_a_state_of_another_version_or_kind_is_refused_by_name(kind: str) -> None:
    """As are one of another size and a damaged one: a state is never guessed at."""
    blob = dump_state(kind, EXAMPLES[kind].live())
    size = DETECTORS[kind].size
    for wrong, message in (
        (blob[:2] + bytes((VERSION - 2,)) + blob[3:], f"version {VERSION - 2}"),
        (blob[:2] + bytes((VERSION - 1,)) + blob[3:], "checksum|bytes"),
        (blob[:2] + bytes((VERSION + 1,)) + blob[3:], f"version {VERSION + 1}"),
        (dump_state("other", EXAMPLES[kind].live()), "of kind"),
        (blob[:-8], "bytes"),
        (blob[:-1] + bytes((blob[-1] ^ 1,)), "checksum"),
    ):
        with pytest.raises(OperatorError, match=message):
            load_state(kind, wrong, size)


def test_a_state_of_the_release_before_goes_on_with_what_it_knows() -> None:
    """A `change` state was shorter: bets on recurring hours begin at 0, and all else is as it was stored."""
    live = EXAMPLES["change"].live()
    body = live[:483].astype("<f8").tobytes()
    head = b"QD" + bytes((2, 6)) + b"change" + struct.pack("<I", 483)
    blob = head + zlib.crc32(body, zlib.crc32(head)).to_bytes(4, "little") + body
    state = load_state("change", blob, DETECTORS["change"].size)
    assert state[:483].tobytes() == live[:483].tobytes()
    assert not state[483:].any()
    with pytest.raises(OperatorError, match="bytes"):
        load_state("change", blob[:2] + bytes((VERSION,)) + blob[3:], DETECTORS["change"].size)


def test_a_tail_of_the_release_before_leaves_its_copy_of_the_evidence_out() -> None:
    """It had its evidence twice, for pages and for tickets; bets against the past begin at 0."""
    live = EXAMPLES["tail"].live()
    live[418:459] = np.arange(1.0, 42.0)  # the evidence, and what watches for recovery
    before = np.concatenate((live[:454], np.full(36, -1.0), live[454:459]))
    body, head = before.astype("<f8").tobytes(), b"QD" + bytes((2, 4)) + b"tail" + struct.pack("<I", 495)
    state = load_state(
        "tail", head + zlib.crc32(body, zlib.crc32(head)).to_bytes(4, "little") + body, DETECTORS["tail"].size
    )
    assert state[:459].tobytes() == live[:459].tobytes()
    assert not state[459:].any()


@KINDS
def test_recorded_batches_give_the_same_bits_in_any_company(kind: str) -> None:
    """Alone or side by side, with batches of 1 to 100 groups: the same boundaries, the same bits."""
    rng, key = np.random.default_rng(4), SignalKey("flip", kind)
    sizes = rng.integers(1, 100, 6)

    def watch() -> SliceWatch:
        return SliceWatch(states={key: EXAMPLES[kind].live()})

    def groups(seed: int, size: int, first: int) -> Groups:
        x = np.random.default_rng(seed).exponential(0.02, (size, 1))
        steps = np.arange(first + 1, first + 1 + size, dtype=np.float64)
        series = Series(x=EXAMPLES[kind].shown(x)[:, 0], seen=np.ones(size, dtype=bool))
        return Groups(order=steps, mass=steps * 1e-9, at_us=steps, series={key: series})

    together, alone = [watch() for _ in range(3)], [watch() for _ in range(3)]
    first = 0
    for turn, size in enumerate(sizes):
        # The others come in longer and shorter batches of their own.
        parts = [groups(7 * turn + row, int(size) + row * turn, first) for row in range(3)]
        advance(together, parts, ENDLESS)
        for one, part in zip(alone, parts, strict=True):
            advance([one], [part], ENDLESS)
        first += int(size) + 2 * turn
    for one, other in zip(together, alone, strict=True):
        assert one.states[key].tobytes() == other.states[key].tobytes()


@KINDS
@pytest.mark.parametrize("cut", [1, 13, STEPS - 1])
def test_another_split_gives_the_same_bits(kind: str, cut: int) -> None:
    """One block or two, in every stage; a detector that forgot a group at the border would not agree."""
    detector, states = DETECTORS[kind], phases(kind)
    x = mixed(5, len(states))
    whole = after(detector, states, given(kind, x))
    part = after(detector, states, given(kind, x[:cut]))
    both = after(detector, part, given(kind, x[cut:], first=cut))
    assert both.tobytes() == whole.tobytes()
    forgot = after(detector, part, given(kind, x[cut + 1 :], first=cut + 1)) if cut < STEPS - 1 else part
    assert not np.allclose(forgot, whole, rtol=1e-9, atol=1e-15)


@KINDS
@pytest.mark.parametrize("x", [0.0, 0.01, 1.0, np.inf])
def test_everything_stays_finite_and_nonnegative_at_the_edges(kind: str, x: float) -> None:
    """Values all 0, all at the budget, all 1 and all infinite, in every stage, resolve included, with its alarms.

    pi = 1 and v = 1 all the time.
    """
    states = phases(kind)
    assert sound(DETECTORS[kind], states, EXAMPLES[kind].shown(np.full((STEPS, len(states)), x)))


@KINDS
def test_what_is_not_seen_is_not_looked_at(kind: str) -> None:
    """Values of unseen groups may be anything at all; only the last seen one moves the state."""
    detector, states = DETECTORS[kind], phases(kind)
    x = mixed(6, len(states))
    block, junk = given(kind, x), given(kind, x)
    block.seen[5:9] = junk.seen[5:9] = False
    junk.x[5:9] = np.nan
    assert after(detector, states, block).tobytes() == after(detector, states, junk).tobytes()


@KINDS
def test_an_alarm_resets_the_copy_that_alarmed_and_recovery_arms_both(kind: str) -> None:
    """A ticket leaves the page copy running, a page stops both; `arm` starts both from nothing at its mass."""
    detector = DETECTORS[kind]
    state = after(detector, EXAMPLES[kind].live()[None], given(kind, mixed(7, 1), gamma=1.0))[0]
    evidence = detector.evidence(state)
    assert evidence > 0
    assert detector.moved(state).onset_us >= 0
    detector.alarmed(state, page=False)
    assert (state[PAGING], state[TICKETING], state[ALERTING]) == (1, 0, 1)
    assert detector.evidence(state) == evidence
    detector.alarmed(state, page=True)
    assert (state[PAGING], state[TICKETING], state[ALERTING]) == (0, 0, 1)
    assert detector.evidence(state) == detector.page_mass(state) == state[TICKET_MASS] == 0
    silent = detector.run(state[None], given(kind, np.full((STEPS, 1), 1.0), first=STEPS, gamma=1.0))
    assert (silent.page == 0).all()
    assert (silent.ticket == 0).all()
    detector.arm(state, mass=500.0, at_us=500_000_000)
    assert (state[PAGING], state[TICKETING], state[ALERTING]) == (1, 1, 0)
    assert state[MASS] == 500.0
    assert state[N] == detector.evidence(state) == 0


@LEARNING
def test_a_learner_is_silent_until_its_baseline_is_complete(kind: str) -> None:
    """It has no evidence, is given no mass and does not stand in the way of recovery; `tend` lets it go live."""
    detector, learning = LEARNERS[kind], EXAMPLES[kind].learning
    assert learning is not None
    state, first = learning(), 0
    rng = np.random.default_rng(8)
    while not detector.live(state):
        lacking = detector.missing(state)
        assert lacking > 0
        assert detector.evidence(state) == detector.page_mass(state) == 0
        x = np.where(rng.random((STEPS, 1)) < 0.05, 1.0, 0.001)
        path = detector.run(state[None], given(kind, x, first=first))
        assert (path.page == 0).all()
        assert np.isinf(path.recovery).all()
        state = path.stopped(np.array([STEPS - 1]))[0]
        first += STEPS
        assert first <= 20_000
        detector.tend(state, mass=first * 1e-9, at_us=first * 1_000_000)
    assert detector.missing(state) == 0
    assert detector.learned(state) >= first
    assert (state[PAGING], state[MASS]) == (1, first * 1e-9)


@LEARNING
def test_a_baseline_comes_back_from_its_record_and_is_handed_on(kind: str) -> None:
    """By record and by inheritance: the same baseline, none of the evidence, live at once; unknown fields nowhere."""
    detector = LEARNERS[kind]
    state = after(detector, EXAMPLES[kind].live()[None], given(kind, mixed(9, 1)))[0]
    content = detector.content(state)
    back = msgspec.json.decode(msgspec.json.encode(content), type=detector.record)
    assert back == content
    for heir in (
        detector.from_content(back, scale=1.0, mass=3.0, at_us=DAY_US),
        detector.inherit(state, mass=3.0, at_us=DAY_US),
    ):
        assert detector.live(heir)
        assert detector.content(heir) == content
        assert detector.learned(heir) == detector.learned(state)
        assert (heir[MASS], heir[N_TOTAL]) == (3.0, 0)
        assert detector.evidence(heir) == detector.page_mass(heir) == 0
    detector.freeze(state)
    frozen = detector.learned(state)
    assert detector.learned(after(detector, state[None], given(kind, mixed(9, 1), first=STEPS))[0]) == frozen


@pytest.mark.parametrize("kind", sorted(DETECTORS))
def test_evidence_of_a_version_that_ended_moves_and_none_is_made(kind: str) -> None:
    """The sum is as before, in both copies; nothing moves while one of the two alerts."""
    detector = DETECTORS[kind]
    state, before = (
        after(detector, EXAMPLES[kind].live()[None], given(kind, mixed(seed, 1)))[0] for seed in (1, 2)
    )
    evidence, mass = (figure(state) + figure(before) for figure in (detector.evidence, detector.page_mass))
    alerting = before.copy()
    detector.alarmed(alerting, page=False)
    assert not detector.carry(state, alerting)
    assert not detector.carry(alerting, before)
    had = detector.evidence(before)
    assert detector.carry(state, before)
    assert detector.evidence(before) == pytest.approx(0.01 * had)
    assert detector.page_mass(before) == 0.0
    assert detector.evidence(state) + detector.evidence(before) == pytest.approx(evidence)
    assert detector.page_mass(state) == pytest.approx(mass)
    assert not before[[TICKET_MASS]].any()


@pytest.mark.parametrize("kind", sorted({*LEARNERS} - {GROWTH.kind}))
def test_nothing_is_learned_while_an_alert_lasts_and_keep_takes_it_back(kind: str) -> None:
    """What was set aside comes back when the alert is judged false, before or after its end; a latency's is frozen."""
    detector = LEARNERS[kind]
    for judged_late in (False, True):
        state = after(detector, EXAMPLES[kind].live()[None], given(kind, mixed(9, 1)))[0]
        n = detector.learned(state)
        assert not detector.aside(state)
        detector.alarmed(state, page=True)
        assert detector.learned(state) <= n
        assert detector.aside(state)
        state = after(detector, state[None], given(kind, mixed(11, 1), first=STEPS))[0]
        assert detector.learned(state) <= n
        if not judged_late:
            detector.keep(state)
        detector.arm(state, mass=1.0, at_us=int(state[LAST_AT]))
        if judged_late:
            assert detector.learned(state) <= n
            assert detector.aside(state)
            detector.keep(state)
        assert detector.learned(state) == n + STEPS
        assert not detector.aside(state)
