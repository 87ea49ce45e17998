"""The shipped fold, with its arrays over a batch, gives the bits of one that takes group after group."""

from collections import Counter
from functools import cache

import msgspec
import pytest

from quantdrift.core.records import Verdict
from quantdrift.monitor.fold import sessions
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.fold_rows import BatchRows, ComparisonRow, FoldResult, Position, Snapshot, Source
from tests.support.monitor.mixed_stream import CATALOG, CONFIG, mixed
from tests.support.monitor.plain_fold import PlainFold

pytestmark = [pytest.mark.unit, pytest.mark.slow]

N_QUICK = 100


@pytest.fixture(autouse=True)
def _short_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show begins of two seconds, where sessions have twenty."""
    monkeypatch.setattr(sessions, "LEAST_BEGIN_US", 2_000_000)


@cache
def stream(n: int) -> list[BatchRows]:
    """Return the batches; they take a second to make, so that no process makes them which only collects."""
    return mixed(n, n_noise=1800 // n)


@cache
def folded(kind: type[Fold], n: int, every: int) -> list[FoldResult]:
    """Return what a fold of `n` batches writes after each `every` of them."""
    fold = kind(CONFIG, Snapshot(position=Position()))
    fold.learn(CATALOG)
    outcomes = []
    for number, rows in enumerate(stream(n), start=1):
        fold.batch(rows)
        if number % every == 0:
            outcomes.append(fold.take())
    return [*outcomes, fold.take()]


def bits(outcome: FoldResult) -> bytes:
    """Return every row of it, floats to the bit; also of those that are no numbers."""
    return msgspec.msgpack.encode(msgspec.to_builtins(outcome, builtin_types=(bytes,)))


@pytest.mark.parametrize(
    ("n", "every"),
    [
        pytest.param(300, 1, marks=pytest.mark.release),
        pytest.param(300, 64, marks=pytest.mark.release),
        (N_QUICK, 16),
    ],
)
def test_a_batch_at_a_time_is_the_same_to_the_bit_as_group_after_group(n: int, every: int) -> None:
    """States, verdicts, transitions, roll-ups, baselines, sessions and noise; written out after each batch, or rarely."""
    ours, plain = folded(Fold, n, every), folded(PlainFold, n, every)
    for number, (one, other) in enumerate(zip(ours, plain, strict=True)):
        for name in FoldResult.__struct_fields__:
            assert bits(getattr(one, name)) == bits(getattr(other, name)), (name, number)


@pytest.mark.parametrize("n", [pytest.param(300, marks=pytest.mark.release), N_QUICK])
def test_the_stream_shows_all_that_it_is_there_for(n: int) -> None:
    """Without these the comparison would say less than it seems to."""
    outcomes = folded(Fold, n, 1)
    verdicts = Counter(row.to_verdict for one in outcomes for row in one.transitions)
    assert {Verdict.FIRING, Verdict.OK, Verdict.UNKNOWN} <= verdicts.keys()
    reasons = {row.reason.split(":")[0] for one in outcomes for row in one.transitions}
    assert {"loss", "replaced", "undecided"} <= reasons
    assert {Source.INHERITED} <= {row.source for one in outcomes for row in one.learned}
    assert any(one.closed for one in outcomes)
    assert any(row.retired_us for one in outcomes for row in one.detectors)
    assert any(row.noise for one in outcomes for row in one.detectors)
    assert any(
        "low" in values for one in outcomes for row in one.verdicts for values in row.estimate.values()
    )
    stored = [row.items for one in outcomes for row in one.sessions]
    assert any(
        item.is_shown for items in stored for item in msgspec.msgpack.decode(items, type=list[ComparisonRow])
    )
