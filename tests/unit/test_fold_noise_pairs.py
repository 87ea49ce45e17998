"""Pages that noise would explain, in the fold: they wait for second replays, and those that it does not explain come."""

import msgspec
import pytest

from quantdrift.core.records import Verdict
from quantdrift.drift.noise_pairs import PairTest
from quantdrift.facts.words.verdict import NOISE_ASKED
from quantdrift.monitor.fold.fold import Fold
from quantdrift.monitor.fold.noise_pairs import PATIENCE_US
from quantdrift.storage.fold_rows import (
    BatchRows,
    DetectorRow,
    FloorRow,
    PairRow,
    Snapshot,
    TallyRow,
    TransitionRow,
    VerdictRow,
)
from tests.support.monitor.fold_stream import (
    ALL_ID,
    BEGIN_US,
    CATALOG,
    CONFIG,
    FAINT_ID,
    SECOND_US,
    batches,
    second_replay,
    with_pairs,
)
from tests.support.monitor.folds import EMPTY, fold_all

pytestmark = pytest.mark.unit
CALM = 0.001


def pages(
    transitions: tuple[TransitionRow, ...], slice_id: int = FAINT_ID, verdict: Verdict = Verdict.FIRING
) -> list[int]:
    """Return when a slice paged, in seconds of the stream, or came to another verdict."""
    return [
        (row.at_us - BEGIN_US) // SECOND_US
        for row in transitions
        if row.to_verdict is verdict and row.slice_id == slice_id
    ]


def test_a_drift_beside_a_reference_that_never_differs_pages_within_a_batch_of_when_it_did() -> None:
    """8 % changed at a budget of 1 %: the test began with a head start, and is done when the evidence is. The ticket is as it was."""
    stream = batches(150)
    _, without = fold_all(stream)
    _, outcome = fold_all(with_pairs(stream, 0.0))
    (before,), (now,) = pages(without.transitions), pages(outcome.transitions)
    assert before <= now <= before + 20
    tickets = [pages(of.transitions, verdict=Verdict.WARNING) for of in (without, outcome)]
    assert tickets[0] == tickets[1] != []


@pytest.mark.slow
def test_noise_of_the_reference_pages_no_more() -> None:
    """8 % noise in one slice: without second replays it pages; with them a ticket goes out, and ends when the allowance is known."""
    noisy = with_pairs(batches(400, faint_flips=CALM), 0.08, slice_id=FAINT_ID)
    _, without = fold_all([msgspec.structs.replace(rows, noise=()) for rows in noisy])
    assert pages(without.transitions)
    fold, outcome = fold_all(noisy)
    assert not pages(outcome.transitions)
    assert not pages(outcome.transitions, ALL_ID)
    assert len(pages(outcome.transitions, verdict=Verdict.WARNING)) == 1
    assert not any(row.verdict is Verdict.WARNING for row in fold.verdicts())
    assert {row.explained for row in outcome.pairs if (row.slice_id, row.metric) == (FAINT_ID, "flip")} == {
        True
    }


def test_a_slice_whose_noise_is_not_known_is_not_ok() -> None:
    """Between the first doubt and the ticket it says what is waited for."""
    fold = Fold(CONFIG, EMPTY)
    fold.learn(CATALOG)
    said = []
    for rows in with_pairs(batches(60), 0.0):
        fold.batch(rows)
        said += [row for row in fold.verdicts() if row.slice_id == FAINT_ID and row.reason == NOISE_ASKED]
    assert said
    assert {row.verdict for row in said} == {Verdict.UNKNOWN}


@pytest.mark.slow
def test_a_page_does_not_wait_for_second_replays_that_do_not_come() -> None:
    """Workers of an earlier release: after a minute it pages as a version without second replays."""
    stream = batches(300)
    _, without = fold_all(stream)
    _, outcome = fold_all(with_pairs(stream, 0.0, until=2))
    (before,), (now,) = pages(without.transitions), pages(outcome.transitions)
    assert before + PATIENCE_US // SECOND_US <= now <= before + PATIENCE_US // SECOND_US + 60


def resumed(stream: list[BatchRows], every: int) -> tuple[TransitionRow, ...]:
    """Return the transitions of a fold that is killed after each `every` batches; all that it stores is as in one go."""
    _, whole = fold_all(stream)
    floors: dict[tuple[object, ...], FloorRow] = {}
    pairs: dict[tuple[int, int, str], PairRow] = {}
    detectors: dict[tuple[int, str, str], DetectorRow] = {}
    verdicts: dict[tuple[int, int], VerdictRow] = {}
    transitions: tuple[TransitionRow, ...] = ()
    snapshot = EMPTY
    for begin in range(0, len(stream), every):
        fold = Fold(CONFIG, snapshot)
        fold.learn(CATALOG)
        tallies = snapshot.tallies
        for rows in stream[begin : begin + every]:
            fold.batch(rows)
            tallies += rows.tallies
        outcome = fold.take()
        floors |= {(row.slice_id, row.side, row.metric): row for row in outcome.floors}
        pairs = {key: row for key, row in pairs.items() if key not in outcome.ended_pairs}
        pairs |= {row.key: row for row in outcome.pairs}
        detectors |= {(row.slice_id, row.metric, row.kind): row for row in outcome.detectors}
        verdicts |= {(row.model_version_id, row.slice_id): row for row in outcome.verdicts}
        transitions += outcome.transitions
        snapshot = Snapshot(
            position=outcome.position,
            detectors=tuple(detectors.values()),
            verdicts=tuple(verdicts.values()),
            tallies=tallies,
            floors=tuple(floors.values()),
            pairs=tuple(pairs.values()),
            serving=outcome.serving or snapshot.serving,
        )
    assert tuple(pairs[key] for key in sorted(pairs)) == whole.pairs
    assert tuple(detectors[key] for key in sorted(detectors)) == whole.detectors
    assert transitions == whole.transitions
    return transitions


@pytest.mark.parametrize("every", [1, 7])
def test_it_resumes_with_the_same_bits(every: int) -> None:
    """However the batches are cut into folds, tests that run, that are over and that page included."""
    stream = with_pairs(batches(110, faint_flips=0.05), 0.03)
    resumed(stream, every)
    assert any(row.suspect for row in fold_all(stream)[1].pairs)


def burst(stream: list[BatchRows], *, n: int = 60, silence_s: int = 120) -> list[BatchRows]:
    """Return the stream and `n` exchanges of `faint` that all changed, in one batch; then a tally every five seconds."""
    last = stream[-1]
    row = next(row for row in stream[0].comparisons if FAINT_ID in row.slice_ids)
    at_us = last.stored_us + SECOND_US
    changed = tuple(
        msgspec.structs.replace(
            row, exchange_id=f"{at_us + number:032x}", item=0, captured_us=at_us + number * 10_000, flip=1.0
        )
        for number in range(1, n + 1)
    )
    batch = BatchRows(fold_seq=last.fold_seq + 1, stored_us=at_us + SECOND_US, comparisons=changed)
    tallies = [
        BatchRows(
            fold_seq=batch.fold_seq + number,
            stored_us=at_us + 5 * number * SECOND_US,
            compares=False,
            tallies=(
                TallyRow(
                    source="pod",
                    boot="b" * 32,
                    stratum="faint",
                    sequence=10_000 + number,
                    at_us=at_us + 5 * number * SECOND_US,
                    offered=1_000_000,
                    taken=500_000,
                    lost=0,
                ),
            ),
        )
        for number in range(1, silence_s // 5 + 1)
    ]
    return [*stream, batch, *tallies]


def paged_after_s(stream: list[BatchRows], transitions: tuple[TransitionRow, ...]) -> float:
    """Return the stored time from the last exchange to the batch with which `faint` paged."""
    (fold_seq,) = [
        row.fold_seq for row in transitions if row.slice_id == FAINT_ID and row.to_verdict is Verdict.FIRING
    ]
    stored_us = {rows.fold_seq: rows.stored_us for rows in stream}
    last_us = max(row.captured_us for rows in stream for row in rows.comparisons)
    return (stored_us[fold_seq] - last_us) / SECOND_US


@pytest.mark.parametrize("every", [1, 7])
def test_a_page_does_not_wait_for_traffic_that_has_stopped(every: int) -> None:
    """60 changed exchanges in one batch, and no more: it pages when no second replay has come for a minute, and not before."""
    stream = burst(with_pairs(batches(8, faint_flips=CALM), 0.0))
    waited_s = paged_after_s(stream, resumed(stream, every))
    assert PATIENCE_US / SECOND_US - 15 <= waited_s <= PATIENCE_US / SECOND_US + 15


@pytest.mark.parametrize("n", [60, 120])
def test_a_large_drift_does_not_wait_where_the_noise_is_known(n: int) -> None:
    """900 second replays that never differed: all of `n` exchanges changed, and it pages with the batch that shows it."""
    stream = burst(with_pairs(batches(200, faint_flips=CALM), 0.0), n=n)
    assert paged_after_s(stream, resumed(stream, 7)) < 5


def test_second_replays_page_without_another_exchange() -> None:
    """The pairs of a slice's last exchanges come when its traffic has stopped: the page goes out with them."""
    stream = burst(burst(with_pairs(batches(8, faint_flips=CALM), 0.0), n=20, silence_s=0), n=20)
    # Of the second burst, which came after the slice was suspect.
    replays = tuple(second_replay(row) for row in stream[9].comparisons)
    stream[11] = msgspec.structs.replace(stream[11], noise=replays)
    assert 5 <= paged_after_s(stream, resumed(stream, 1)) <= 15


def test_a_version_of_which_nothing_is_replayed_twice_any_more_does_not_wait() -> None:
    """After minutes without a second replay a burst pages with the batch that shows it."""
    calm = with_pairs(batches(200, faint_flips=CALM), 0.0, until=2)
    stream = burst(calm)
    transitions = resumed(stream, 1)
    assert paged_after_s(stream, transitions) < 5
    assert transitions == resumed([msgspec.structs.replace(rows, noise=()) for rows in stream], 1)


def test_a_page_waits_on_where_the_reference_is_known_to_be_noisy() -> None:
    """Four in five answers of a slice are decided at random, and its traffic stops: no page goes out."""
    noisy = with_pairs(batches(60, faint_flips=CALM), 0.4, slice_id=FAINT_ID)
    stream = burst(noisy, n=1)
    assert pages(fold_all([msgspec.structs.replace(rows, noise=()) for rows in stream])[1].transitions)
    assert not pages(resumed(stream, 7))
    assert not any(row.unpaired for row in fold_all(stream)[1].pairs)


def test_a_pair_is_refused_that_is_larger_than_its_weight() -> None:
    """It would break the bound."""
    test = PairTest(budget=0.01, since_us=0)
    with pytest.raises(ValueError, match="weight"):
        test.seen(0.6, 0.5)
