"""The choice of exemplars: which exchanges of a slice are kept, and how many."""

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.config.schema import Budget, Model
from quantdrift.core.records import ExemplarKind, Way
from quantdrift.core.slices import SliceKey
from quantdrift.core.stream.config import EXEMPLARS_EACH, exemplars
from quantdrift.core.tasks import Task
from quantdrift.shadow.pipeline.exemplars import Chooser, ChosenExemplar, DamageLimits
from quantdrift.storage.comparisons.rows import ComparedExchange
from tests.support.shadow.compared_exchanges import ARCHIVE, compared_of, item_of

pytestmark = pytest.mark.unit


def chooser_at(clock: ManualClock, draw: float = 1.0) -> Chooser:
    """Return a chooser of the model `digits` that draws this number; with 1 it draws no random exemplar."""
    return Chooser({"digits": DamageLimits(divergence=0.5)}, clock, lambda: draw)


@pytest.fixture
def clock() -> ManualClock:
    """Return a clock."""
    return ManualClock(datetime(2026, 11, 23, tzinfo=UTC))


def damaged_of(chooser: Chooser, exchanges: Sequence[ComparedExchange]) -> list[ChosenExemplar]:
    """Return what is chosen as damaged from a batch."""
    return [one for one in chooser.choose(exchanges) if one.kind is ExemplarKind.DAMAGED]


def test_the_damaged_are_those_with_a_flip_or_above_the_budget_and_the_worst_come_first(
    clock: ManualClock,
) -> None:
    """A divergence within the budget is no damage."""
    flipped, worse = compared_of(item_of(flip=True, divergence=0.1)), compared_of(item_of(divergence=3.0))
    bad, fine = compared_of(item_of(divergence=0.6)), compared_of(item_of(divergence=0.5))
    found = damaged_of(chooser_at(clock), [fine, bad, worse, flipped])
    assert [one.compared for one in found] == [flipped, worse, bad]
    assert {one.probability for one in found} == {None}


def test_of_generated_text_a_flip_alone_is_no_damage(clock: ManualClock) -> None:
    """A sound model changes long answers somewhere: the broken and those with many changed tokens are kept, then the unlikely ones."""
    model = Model(name="digits", task=Task.GENERATION)
    chooser = Chooser({"digits": DamageLimits.of(model)}, clock, lambda: 1.0)

    def text(divergence: float | None, **detail: float) -> ComparedExchange:
        one = msgspec.structs.replace(item_of(flip=True), divergence=divergence)
        return compared_of(msgspec.structs.replace(one, detail=msgspec.json.encode(detail).decode()))

    sound, sampled = text(0.02, changed_tokens=0.05, broken=0), text(None, unlikely=0.05)
    broken, other = text(None, broken=1), text(0.01, changed_tokens=0.4)
    far, unlikely = text(0.5, changed_tokens=0.1), text(None, unlikely=0.9)
    found = damaged_of(chooser, [sound, unlikely, sampled, other, far, broken])
    assert [one.compared for one in found] == [broken, far, other, unlikely]
    watched = msgspec.structs.replace(model, budget=Budget(watch=("flip",)))
    flips = Chooser({"digits": DamageLimits.of(watched)}, clock, lambda: 1.0)
    assert [one.compared for one in damaged_of(flips, [sound])] == [sound]


def test_of_a_storm_of_damage_64_are_kept_at_once_and_64_an_hour_afterwards(clock: ManualClock) -> None:
    """However many exchanges flip, the work and the traffic to NATS are bounded."""
    chooser = chooser_at(clock)
    storm = [compared_of(item_of(flip=True)) for _ in range(500)]
    assert len(damaged_of(chooser, storm)) == EXEMPLARS_EACH
    assert not damaged_of(chooser, storm)
    kept = 0
    for _ in range(60):
        clock.advance(60.0)
        kept += len(damaged_of(chooser, storm))
    assert EXEMPLARS_EACH - 1 <= kept <= EXEMPLARS_EACH


def test_damage_without_a_flip_leaves_half_to_flips(clock: ManualClock) -> None:
    """A slice whose divergence is always above the budget still keeps those whose answer changes."""
    chooser = chooser_at(clock)
    assert len(damaged_of(chooser, [compared_of(item_of(divergence=1.0))] * 500)) == EXEMPLARS_EACH / 2
    assert len(damaged_of(chooser, [compared_of(item_of(flip=True))] * 500)) == EXEMPLARS_EACH / 2


def test_what_an_unverified_sender_says_is_no_exemplar(clock: ManualClock) -> None:
    """Nobody can fill a slice's exemplars, on which a repair is calibrated, without proving who he is."""
    stranger = compared_of(item_of(flip=True), way=Way.TAP)
    assert not list(chooser_at(clock, 0.0).choose([stranger]))


def test_a_value_without_a_place_has_no_exemplars(clock: ManualClock) -> None:
    """Values that clients choose are without end, and slices with exemplars are not."""
    exchange = compared_of(item_of(flip=True))
    without_place = frozenset({(ARCHIVE.model, ARCHIVE.predicate)})
    assert not list(chooser_at(clock, 0.0).choose([exchange], without_place))


def test_an_exchange_with_several_items_is_one_exemplar_with_those_of_the_slice(clock: ManualClock) -> None:
    """Its items are named by their number."""
    other = item_of(flip=True, key=SliceKey(model="digits", name="other", predicate="o"))
    found = list(chooser_at(clock).choose([compared_of(item_of(), other, item_of(flip=True))]))
    of_slice = {one.slice: [item.index for item in one.items] for one in found}
    assert of_slice == {"scanner=archive": [0, 2], "other": [1]}


def test_a_long_name_of_a_slice_is_a_hash_in_the_subject() -> None:
    """The server refuses subjects of any length."""
    assert exemplars("qd", "digits", "scanner=a.b", "random") == "qd.exemplar.digits.scanner%3Da%2Eb.random"
    assert len(exemplars("qd", "digits", "x" * 5000, "random")) < 100
    assert exemplars("qd") == "qd.exemplar.>"
    assert exemplars("qd", "digits") == "qd.exemplar.digits.*.*"
