"""Sessions: what one user sends is one observation."""

import msgspec
import pytest

from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate
from quantdrift.drift.evidence import header
from quantdrift.drift.watch import SignalKey
from quantdrift.monitor.fold import sessions as module
from quantdrift.monitor.fold.fold import Fold
from quantdrift.monitor.fold.sessions import LEAST_BEGIN_US, Part, Sessions, begin_us
from quantdrift.storage.fold_rows import (
    BatchRows,
    ComparisonRow,
    FoldResult,
    ItemCount,
    Position,
    SessionRow,
    Snapshot,
    TallyRow,
)
from tests.support.monitor.fold_stream import (
    ALL_ID,
    BEGIN_US,
    CATALOG,
    CLEAR_ID,
    CONFIG,
    FAINT_ID,
    SECOND_US,
    batches,
)

pytestmark = pytest.mark.unit

LENGTH_US = int(CONFIG.monitor.session_s * SECOND_US)
TEMPLATE = batches(1)[0].comparisons[0]
KEY = (TEMPLATE.model_version_id, FAINT_ID)
BY_BUDGET, BY_CHANGE = SignalKey("flip", "budget"), SignalKey("flip", "change")


def item(number: int, user: str, *, at_us: int, flip: float = 0.0, u1: float = 0.0) -> ComparisonRow:
    """Return one item of a user's session."""
    return msgspec.structs.replace(
        TEMPLATE,
        exchange_id=f"{number:032x}",
        item=0,
        captured_us=at_us,
        slice_ids=(FAINT_ID,),
        group_key=user,
        pi1=1.0,
        pi2=1.0,
        u1=u1,
        u2=0.0,
        flip=flip,
        divergence=None,
    )


def stream(rows: list[ComparisonRow]) -> list[BatchRows]:
    """Return a batch per row."""
    return [
        BatchRows(fold_seq=number, stored_us=row.captured_us, comparisons=(row,))
        for number, row in enumerate(rows, start=1)
    ]


def tally(fold_seq: int, at_us: int) -> BatchRows:
    """Return a tally that says nothing but the time."""
    row = TallyRow(
        source="pod",
        boot="b" * 32,
        stratum="faint",
        sequence=fold_seq,
        at_us=at_us,
        offered=0,
        taken=0,
        lost=0,
    )
    return BatchRows(fold_seq=fold_seq, stored_us=at_us, compares=False, tallies=(row,))


def n_groups(fold: Fold) -> int:
    """Return how many observations the slice has."""
    return max((row.n_groups for row in fold.verdicts() if row.slice_id == FAINT_ID), default=0)


def folded(rows: list[ComparisonRow], catalog: object = CATALOG) -> Fold:
    """Return the fold of these rows."""
    fold = Fold(CONFIG, Snapshot(position=Position()))
    fold.learn(catalog)  # type: ignore[arg-type]
    for rows_ in stream(rows):
        fold.batch(rows_)
    return fold


def test_a_session_counts_once_when_its_time_is_over() -> None:
    """Twenty requests of two users within the time are two observations, and none before it is over."""
    rows = [item(n, f"user {n % 2}", at_us=BEGIN_US + n * SECOND_US) for n in range(20)]
    assert n_groups(folded(rows)) == 0
    late = item(99, "another", at_us=BEGIN_US + 20 * SECOND_US + LENGTH_US)
    fold = folded([*rows, late])
    assert n_groups(fold) == 2
    assert sum(row.n_items for row in fold.take().rollups) == 21


def of_each_kind(version_us: int = BEGIN_US) -> tuple[str, str]:
    """Return a user of whom a new version shows the begin of a session, and one of whom it shows the whole."""
    users = [f"user {n}" for n in range(20)]
    shown = [user for user in users if begin_us(version_us, version_us, LENGTH_US, user) is not None]
    return shown[0], next(user for user in users if user not in shown)


def test_budgets_are_shown_the_begin_of_every_second_session_of_a_new_version() -> None:
    """After a minute, once: a flip after it counts in the roll-ups alone. Baselines see whole sessions only, of the others."""
    by_begin, whole = of_each_kind()
    rows = [
        item(n, user, at_us=BEGIN_US + at_us, flip=flip)
        for n, (user, at_us, flip) in enumerate(
            [
                (by_begin, 0, 1.0),
                (whole, 1, 0.0),
                (by_begin, LEAST_BEGIN_US // 2, 0.0),
                ("later", LEAST_BEGIN_US, 0.0),
                (by_begin, LEAST_BEGIN_US + SECOND_US, 1.0),
                (whole, LEAST_BEGIN_US + SECOND_US, 1.0),
            ]
        )
    ]
    fold = folded(rows)
    states = fold.state.slices[KEY].watch.states
    assert n_groups(fold) == 1
    assert states[BY_BUDGET][header.X] / states[BY_BUDGET][header.W] == pytest.approx(0.5)
    assert BY_CHANGE not in states
    fold = folded([*rows, item(99, "last", at_us=BEGIN_US + LENGTH_US + 2)])
    states = fold.state.slices[KEY].watch.states
    assert n_groups(fold) == 2, "the second one, as a whole"
    assert states[BY_BUDGET][header.X] / states[BY_BUDGET][header.W] == pytest.approx(0.5)
    assert states[BY_CHANGE][header.N_TOTAL] == 1
    assert sum(row.n_items for row in fold.take().rollups) == 7


def test_a_version_that_is_not_new_shows_whole_sessions() -> None:
    """A begin is as long as the version is old, so that it grows into the session."""
    user, _ = of_each_kind()
    for age_us, begin in (
        (0, LEAST_BEGIN_US),
        (LEAST_BEGIN_US - 1, LEAST_BEGIN_US),
        (3 * LEAST_BEGIN_US, 3 * LEAST_BEGIN_US),
        (LENGTH_US - 1, LENGTH_US - 1),
        (LENGTH_US, None),
    ):
        assert begin_us(BEGIN_US + age_us, BEGIN_US, LENGTH_US, user) == begin
    held = Sessions(LENGTH_US, version_us=lambda _: BEGIN_US - LENGTH_US)
    held.add([item(1, user, at_us=BEGIN_US)], BEGIN_US)
    assert held.due(BEGIN_US + LENGTH_US - 1) == []
    assert [part for _, _, part in held.due(BEGIN_US + LENGTH_US)] == [Part.WHOLE]


def test_a_session_whose_begin_nobody_looked_at_in_time_is_shown_as_a_whole() -> None:
    """Of two that end between two batches; what is over is shown in the order of time."""
    by_begin, whole = of_each_kind()
    held = Sessions(LENGTH_US, version_us=lambda _: BEGIN_US)
    held.add([item(1, by_begin, at_us=BEGIN_US)], BEGIN_US)
    held.add([item(2, whole, at_us=BEGIN_US)], BEGIN_US)
    assert [part for _, _, part in held.due(BEGIN_US + 2 * LENGTH_US)] == [Part.WHOLE, Part.WHOLE]
    held.add([item(3, whole, at_us=BEGIN_US)], BEGIN_US)
    held.add([item(4, by_begin, at_us=BEGIN_US)], BEGIN_US + LENGTH_US - LEAST_BEGIN_US)
    over = held.due(BEGIN_US + 2 * LENGTH_US - 2 * LEAST_BEGIN_US)
    assert [(part, rows[0].group_key) for _, rows, part in over] == [
        (Part.WHOLE, whole),
        (Part.BEGIN, by_begin),
    ]
    assert [part for _, _, part in held.due(BEGIN_US + 2 * LENGTH_US - LEAST_BEGIN_US)] == [Part.AFTER]


def test_tallies_cut_no_session_while_a_backlog_is_worked_off() -> None:
    """Twenty requests of two users are folded a day late, with a tally between any two: two observations, at their own time."""
    day_us = 86_400 * SECOND_US
    fold = Fold(CONFIG, Snapshot(position=Position()))
    fold.learn(CATALOG)
    for n in range(20):
        row, stored_us = (
            item(n, f"user {n % 2}", at_us=BEGIN_US + n * SECOND_US),
            BEGIN_US + day_us + n * SECOND_US,
        )
        fold.batch(BatchRows(fold_seq=2 * n + 1, stored_us=stored_us, comparisons=(row,)))
        fold.batch(tally(2 * n + 2, stored_us))
    assert n_groups(fold) == 0
    assert fold.position.exchange_us == BEGIN_US + 19 * SECOND_US
    late = item(99, "another", at_us=BEGIN_US + 20 * SECOND_US + LENGTH_US)
    fold.batch(BatchRows(fold_seq=41, stored_us=BEGIN_US + day_us + 60 * SECOND_US, comparisons=(late,)))
    assert n_groups(fold) == 2


def test_sessions_close_in_a_silence_each_at_its_own_time() -> None:
    """Nothing is compared for the length of a session: the open ones are over, and the exchanges' time is when the last one was."""
    rows = [item(n, f"user {n}", at_us=BEGIN_US + n * SECOND_US) for n in range(20)]
    fold = folded(rows)
    last_us = BEGIN_US + 19 * SECOND_US
    fold.batch(tally(21, last_us + LENGTH_US))
    assert n_groups(fold) == 0
    fold.batch(tally(22, last_us + 10 * LENGTH_US))
    fold.batch(tally(23, last_us + 10 * LENGTH_US + SECOND_US))
    assert n_groups(fold) == 20
    assert fold.position.exchange_us == last_us + LENGTH_US
    state = fold.state.slices[KEY].watch.states[BY_BUDGET]
    assert state[header.PAGE_MASS] > 0


def test_a_fold_that_stops_within_sessions_ends_in_the_same_bits() -> None:
    """Resumed from its rows after every batch, open sessions included, nothing is lost or doubled."""
    rows = [
        item(n, f"user {n % 7}", at_us=BEGIN_US + n * LENGTH_US // 9, flip=float(n % 3 == 0))
        for n in range(60)
    ]
    whole = folded(rows).take()
    open_: dict[object, SessionRow] = {}
    snapshot = Snapshot(position=Position())
    for one in stream(rows):
        fold = Fold(CONFIG, snapshot)
        fold.learn(CATALOG)
        fold.batch(one)
        outcome = fold.take()
        open_ = {key: row for key, row in open_.items() if key not in outcome.closed}
        open_ |= {row.key: row for row in outcome.sessions}
        detectors = {(r.slice_id, r.metric, r.kind): r for r in (*snapshot.detectors, *outcome.detectors)}
        verdicts = {r.slice_id: r for r in (*snapshot.verdicts, *outcome.verdicts)}
        snapshot = Snapshot(
            position=outcome.position,
            detectors=tuple(detectors.values()),
            verdicts=tuple(verdicts.values()),
            sessions=tuple(open_.values()),
        )
    # `fold_seq` says which fold wrote a row; everything else is the same.
    assert [row.state for row in snapshot.detectors] == [row.state for row in whole.detectors]
    assert {row.key: row.items for row in open_.values()} == {row.key: row.items for row in whole.sessions}


def test_people_are_missing_only_where_requests_say_who_sends_them() -> None:
    """Of one version: the slice of users lacks people, the slice of a batch job lacks exchanges; a fold that stopped says the same."""
    config = msgspec.structs.replace(
        CONFIG, sampling=msgspec.structs.replace(CONFIG.sampling, sticky_header="x-user")
    )
    rows = [
        msgspec.structs.replace(
            item(n, f"user {n % 7}" if n % 2 else "", at_us=BEGIN_US + n * LENGTH_US // 9),
            slice_ids=(ALL_ID, FAINT_ID if n % 2 else CLEAR_ID),
        )
        for n in range(60)
    ]

    def reasons(stream_: list[BatchRows], snapshot: Snapshot) -> tuple[dict[int, str], FoldResult]:
        fold = Fold(config, snapshot)
        fold.learn(CATALOG)
        for batch in stream_:
            fold.batch(batch)
        rows = [row for row in fold.verdicts() if row.model_version_id == KEY[0]]
        return {row.slice_id: row.reason for row in rows}, fold.take()

    batches_ = stream(rows)
    whole, _ = reasons(batches_, Snapshot(position=Position()))
    before, outcome = reasons(batches_[:-1], Snapshot(position=Position()))
    counts = tuple(
        ItemCount(
            row.model_version_id, row.slice_id, row.hour_us, row.n_items, row.n_unmeasured, bool(row.people)
        )
        for row in outcome.rollups
    )
    stopped = Snapshot(
        position=outcome.position,
        detectors=outcome.detectors,
        verdicts=outcome.verdicts,
        sessions=outcome.sessions,
        recent_items=counts,
    )
    after, _ = reasons(batches_[-1:], stopped)
    assert before.keys() == after.keys() == whole.keys() == {ALL_ID, FAINT_ID, CLEAR_ID}
    for reason in (before, after, whole):
        assert reason[ALL_ID].endswith(" more people")
        assert reason[FAINT_ID].endswith(" more people")
        assert reason[CLEAR_ID].endswith(" more exchanges")
    assert after == whole


def test_a_session_that_was_boosted_counts_with_its_weight_and_is_thinned_where_weights_cannot_be_used() -> (
    None
):
    """The mean uses all that was replayed; a baseline sees a session by its draw alone, in whatever stratum it is."""
    policy = Policy(
        epoch="e",
        header_strata=(
            HeaderStratum(name="boosted", rate=1.0, headers={"x-other": "1"}),
            HeaderStratum(name="default", rate=0.1),
        ),
        body_strata=(BodyStratum(name="default", rate=1.0),),
    )
    catalog = msgspec.structs.replace(CATALOG, policies={TEMPLATE.policy_id: policy})
    late = item(99, "last", at_us=BEGIN_US + 2 * LENGTH_US, u1=0.5)
    seen = folded([item(1, "a", at_us=BEGIN_US, u1=0.05), late], catalog)
    unseen = folded([item(1, "a", at_us=BEGIN_US, u1=0.5), late], catalog)
    assert (n_groups(seen), n_groups(unseen)) == (1, 1)
    weights = [fold.state.slices[KEY].watch.states[BY_BUDGET][header.W] for fold in (seen, unseen)]
    assert weights == [pytest.approx(1 / 11), pytest.approx(1 / 11)], "c / pi1, c of the parts 0.1 and 1"
    learned = [fold.state.slices[KEY].watch.states.get(BY_CHANGE) for fold in (seen, unseen)]
    assert learned[0] is not None
    assert learned[0][header.N_TOTAL] == 1
    assert learned[1] is None


def test_the_number_of_open_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest sessions close early where there are too many, and one that is too long closes at once."""
    monkeypatch.setattr(module, "MOST_OPEN", 5)
    monkeypatch.setattr(module, "MOST_ITEMS", 4)
    held = Sessions(LENGTH_US)
    for n in range(8):
        held.add([item(n, f"user {n}", at_us=BEGIN_US)], BEGIN_US + n)
    assert [rows[0].group_key for _, rows, _ in held.due(BEGIN_US + 8)] == ["user 0", "user 1", "user 2"]
    for n in range(3):
        held.add([item(10 + n, "user 7", at_us=BEGIN_US)], BEGIN_US + 9)
    assert [len(rows) for _, rows, _ in held.due(BEGIN_US + 9)] == [4]
    monkeypatch.setattr(module, "MOST_HELD", 3)
    assert [rows[0].group_key for _, rows, _ in held.due(BEGIN_US + 9)] == ["user 3"]
    monkeypatch.setattr(module, "MOST_HELD", 100)
    held.add([item(3, "user 3", at_us=BEGIN_US)], BEGIN_US + 10)
    rows, closed = held.take(1)
    assert [row.group_key for row in rows] == ["user 3", "user 4", "user 5", "user 6"]
    assert closed == ()


def test_new_policies_do_not_cut_a_session() -> None:
    """Two users send a request in each of six policies: two observations, with the mean of all six and the weight of the first."""
    policies = {
        number: msgspec.structs.replace(CATALOG.policies[1], epoch=f"e{number}") for number in range(1, 7)
    }
    catalog = msgspec.structs.replace(CATALOG, policies=policies)
    rows = [
        msgspec.structs.replace(
            item(number, f"user {number % 2}", at_us=BEGIN_US + number * SECOND_US, flip=float(number == 5)),
            policy_id=1 + number // 2,
        )
        for number in range(12)
    ]
    late = item(99, "another", at_us=BEGIN_US + 20 * SECOND_US + LENGTH_US)
    fold = folded([*rows, late], catalog)
    assert n_groups(fold) == 2
    state = fold.state.slices[KEY].watch.states[BY_BUDGET]
    assert state[header.X] / state[header.W] == pytest.approx(1 / 12)
    assert fold.state.slices[KEY].watch.states[BY_CHANGE][header.N_TOTAL] == 2


def test_what_a_later_policy_boosted_for_what_it_is_does_not_count() -> None:
    """A body stratum samples small margins at rate 1, and others at 0.2: of a later policy only what 0.2 would have taken counts."""
    boosted = msgspec.structs.replace(
        CATALOG.policies[1],
        epoch="e2",
        body_strata=(
            BodyStratum(name="near", rate=1.0, where=(Predicate(key="margin", high=0.1),)),
            BodyStratum(name="default", rate=0.2),
        ),
    )
    catalog = msgspec.structs.replace(CATALOG, policies={1: CATALOG.policies[1], 2: boosted})
    first = item(1, "user", at_us=BEGIN_US)
    near, drawn = (
        msgspec.structs.replace(
            item(number, "user", at_us=BEGIN_US + number * SECOND_US, flip=1.0), policy_id=2, u2=u2
        )
        for number, u2 in ((2, 0.5), (3, 0.1))
    )
    late = item(99, "another", at_us=BEGIN_US + 20 * SECOND_US + LENGTH_US)
    for rows, mean in (([first, near], 0.0), ([first, drawn], 0.5)):
        state = folded([*rows, late], catalog).state.slices[KEY].watch.states[BY_BUDGET]
        assert state[header.X] / state[header.W] == pytest.approx(mean)
