"""Labels that come after the exchanges that a gate has seen."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import numpy as np
import pytest

from quantdrift.release.gate.labels import NO_CLASS, Answers, ExpectedLabels
from quantdrift.storage.gate import TrueLabel

pytestmark = pytest.mark.unit

NOW = datetime(2026, 11, 23, tzinfo=UTC)
SESSION = timedelta(minutes=30)
NEITHER, REFERENCE, CANDIDATE, BOTH = range(4)


def label(
    number: int, true: str | None, *, item: int = 0, rights: tuple[bool, bool] = (False, False)
) -> TrueLabel:
    """Return a label of an exchange; `rights` are those of the version that served and of the reference."""
    return TrueLabel(
        exchange=UUID(int=number), item=item, label=true, candidate_right=rights[0], reference_right=rights[1]
    )


def answers(reference: int, candidate: int, served: int = 7) -> Answers:
    """Return the top classes of one item."""
    return Answers(
        reference=np.array([reference]), candidate=np.array([candidate]), served=np.array([served])
    )


@pytest.mark.parametrize(
    ("of", "true", "value"),
    [
        (answers(1, 1), "1", BOTH),
        (answers(1, 1), "one", BOTH),
        (answers(1, 2), "1", REFERENCE),
        (answers(1, 2), "two", CANDIDATE),
        (answers(1, 2), "3", NEITHER),
        (answers(1, NO_CLASS), "1", REFERENCE),
    ],
)
def test_a_true_class_says_who_is_right(of: Answers, true: str, value: int) -> None:
    """By its number or its name; a candidate without an answer is wrong."""
    assert of.value(label(1, true), {"zero": 0, "one": 1, "two": 2}) == value


@pytest.mark.parametrize(
    ("of", "rights", "value"),
    [
        (answers(1, 1, served=2), (False, True), BOTH),
        (answers(1, 1, served=2), (True, False), NEITHER),
        (answers(1, 2, served=2), (True, False), CANDIDATE),
        (answers(1, 2, served=2), (False, True), REFERENCE),
        (answers(1, 3, served=2), (False, False), NEITHER),
        (answers(NO_CLASS, NO_CLASS, served=2), (False, True), REFERENCE),
    ],
)
def test_a_label_without_a_class_is_that_of_the_side_that_decides_alike(
    of: Answers, rights: tuple[bool, bool], value: int
) -> None:
    """The candidate is as right as whom it agrees with, and wrong if it agrees with nobody."""
    assert of.value(label(1, None, rights=rights), {}) == value


def test_an_exchange_counts_once_when_its_label_comes() -> None:
    """With its weight; before it, and when the label comes again, nothing counts; unknown exchanges and items change nothing."""
    expected = ExpectedLabels((), SESSION)
    two = Answers(reference=np.array([1, 2]), candidate=np.array([1, 1]), served=np.array([1, 1]))
    expected.expect(UUID(int=1), two, at=NOW, weight=0.5)
    expected.expect(UUID(int=2), answers(1, 1), at=NOW, weight=1.0)
    assert list(expected.taken(NOW)) == []
    expected.give([label(1, "1"), label(1, "2", item=1), label(1, "1", item=9), label(99, "1")])
    (weights,) = expected.taken(NOW)
    assert weights.tolist() == [0, 0.25, 0, 0.25]
    expected.give([label(1, "1")])
    assert (list(expected.taken(NOW)), len(expected)) == ([], 1)


def test_a_session_counts_once_by_its_labelled_exchanges_when_it_is_over() -> None:
    """Part by part; a later session of the same name is another one, and the first still gets its labels."""
    expected = ExpectedLabels((), SESSION)
    for number, part in ((1, 1.0), (2, 1.0), (3, 0.5), (4, 0.5)):
        expected.expect(UUID(int=number), answers(1, 1), at=NOW, weight=1 / 3, part=part, session="s")
    later = NOW + 2 * SESSION
    expected.expect(UUID(int=5), answers(1, 1), at=later, weight=1 / 3, part=1.0, session="s")
    expected.give([label(1, "1"), label(2, "0"), label(3, "1"), label(5, "1")])
    assert list(expected.taken(NOW)) == []
    (first,) = expected.taken(later)
    assert first.tolist() == pytest.approx([1 / 6, 0, 0, 1 / 6 + 2 / 3])
    (second,) = expected.taken(None)
    assert second.tolist() == pytest.approx([0, 0, 0, 1 / 3])
    assert len(expected) == 0


def test_the_oldest_are_forgotten_where_too_many_wait() -> None:
    """And counted, so that people hear of it."""
    expected = ExpectedLabels((), SESSION, most=3)
    for number in range(5):
        expected.expect(UUID(int=number), answers(1, 1), at=NOW, weight=1.0)
    assert (len(expected), expected.forgotten) == (3, 2)
    expected.give([label(number, "1") for number in range(5)])
    assert len(list(expected.taken(NOW))) == 3
