"""Replaying again: what is chosen, in which company, what it may take, and what it says."""

import random
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr

from quantdrift.core.clock import ManualClock
from quantdrift.core.config.schema import Config, Generation, Model, Reference
from quantdrift.core.errors import RetryError
from quantdrift.core.records import Predicate, Side
from quantdrift.core.sampling.hash_draw import draw
from quantdrift.core.slices import SliceKey, everything
from quantdrift.core.tasks import Task
from quantdrift.models.comparators.protocol import Comparator, Divergences
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.language.scoring import PROMPT, REQUEST, SCORES, objects
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.tensors.arrays import Array, Outputs
from quantdrift.models.tensors.codec import fit_inputs
from quantdrift.shadow.pipeline.assess import Assessor
from quantdrift.shadow.replay import noise
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.noise import NoiseReplays
from quantdrift.shadow.replay.noise_items import version_of
from quantdrift.shadow.replay.references import VersionReference
from quantdrift.shadow.replay.replay import ReplayResult, assemble, compare, replay
from quantdrift.storage.comparisons.rows import NoiseItem
from tests.support.shadow.onnx_models import BIAS, WEIGHT, exchange_of, inputs_of
from tests.support.shadow.openai_exchanges import chat, exchange
from tests.support.shadow.openai_exchanges import prepared as answered
from tests.support.shadow.score_streams import scores_of

pytestmark = pytest.mark.unit

ALL = everything("digits")
RARE = SliceKey(model="digits", name="scanner=faint", predicate='header.x-scanner = "faint"')


class _Watched(LinearRuntime):
    """Takes a tenth of a second of the clock for each run, and knows its batches."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(WEIGHT, BIAS)
        self.clock = clock
        self.sizes: list[int] = []
        self.away_after = 10**9

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        self.clock.advance(0.1)
        self.sizes.append(len(inputs["x"]))
        if len(self.sizes) > self.away_after:
            raise RetryError("away")
        return super().run(inputs)


class _BatchStatistics(_Watched):
    """Subtracts the mean of its batch, as a network does whose normalisation was not switched to inference."""

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        return super().run({"x": inputs["x"] - inputs["x"].mean(axis=0)})


def prepared(n_items: int, seed: int, runtime: ReferenceRuntime, name: str = "digits") -> PreparedExchange:
    """Return an exchange that is ready to be replayed."""
    model = Model(name=name, top_k=2)
    exchange = msgspec.structs.replace(exchange_of(inputs_of(n_items, seed)), model=name)
    return PreparedExchange(
        stream_sequence=seed,
        payload=b"x" * 100,
        exchange=exchange,
        version_reference=VersionReference(model=model, runtime=runtime, comparator=comparator_of(model)),
        inputs=fit_inputs(exchange.inputs, runtime.inputs, batched=True),
    )


class Worker:
    """Replays batches one after the other, as an assessor does."""

    def __init__(self, kind: type[_Watched] = _Watched, share: float = 1.0) -> None:
        self.clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
        self.runtime = kind(self.clock)
        self.noise = NoiseReplays(share, self.clock, rng=random.Random(5))
        self._n = 0

    def batch(self, sizes: Sequence[int], *, rare: Sequence[int] = ()) -> tuple[NoiseItem, ...]:
        """Replay a batch of exchanges with so many items each; return what was measured meanwhile.

        Parameters
        ----------
        rare
            Places of the exchanges that lie in the slice `RARE`, too.
        """
        entries = []
        for size in sizes:
            self._n += 1
            entries.append(prepared(size, self._n, self.runtime))
        return self.replay(entries, rare)

    def replay(self, entries: Sequence[PreparedExchange], rare: Sequence[int] = ()) -> tuple[NoiseItem, ...]:
        """Replay a batch; return what was measured meanwhile."""
        with self.noise.timed():
            outputs = replay(assemble(entries), most_items=64)
        outcomes = compare(entries, outputs)
        assert all(isinstance(outcome, ReplayResult) for outcome in outcomes)
        slices = [
            [(ALL, RARE) if place in rare else (ALL,)] * entry.n_items for place, entry in enumerate(entries)
        ]
        self.noise.choose(entries, outputs, outcomes, slices)
        if self.noise.is_due(entries[0]):
            self.noise.replay_due(entries[0])
        return self.noise.take(entries[0].exchange.model)


def test_what_was_measured_of_a_model_waits_for_a_batch_of_its_own() -> None:
    """The monitor that folds one model does not read the batches of another one."""
    worker = Worker()
    measured = {"digits": 0, "letters": 0}
    for number in range(40):
        name = ("digits", "letters")[number % 2]
        items = worker.replay([prepared(1, 100 + 8 * number + k, worker.runtime, name) for k in range(8)])
        assert {item.version.model for item in items} <= {name}
        measured[name] += len(items)
    assert min(measured.values()) > 0
    assert worker.noise.take("other") == ()


def test_a_reference_that_knows_no_neighbours_has_no_noise() -> None:
    """Exactly none: the same bits in whatever company."""
    worker = Worker()
    items = [item for _ in range(12) for item in worker.batch([1] * 8)]
    assert len(items) >= 48
    assert {(item.side, item.flip, item.divergence) for item in items} == {(Side.REFERENCE, False, 0.0)}
    assert worker.noise.counts["digits", Side.REFERENCE, "measured"] == len(items)


def test_a_reference_whose_answers_depend_on_the_batch_is_detected() -> None:
    """Nearly every item differs, and each is told with its own place and probability."""
    worker = Worker(_BatchStatistics)
    items = [item for _ in range(12) for item in worker.batch([1, 3, 4])]
    divergences = [item.divergence or 0.0 for item in items]
    assert np.mean([value > 0 for value in divergences]) > 0.9
    assert any(item.flip for item in items)
    assert {(item.pi1, item.pi2) for item in items} == {(0.5, 1.0)}
    assert {item.item for item in items} == {0, 1, 2, 3}
    assert len({(item.exchange_id, item.item) for item in items}) == len(items)


def test_what_was_alone_is_replayed_in_company() -> None:
    """Where traffic is thin every batch is one item, and alone again would be no other batch."""
    worker = Worker(_BatchStatistics)
    items = [item for _ in range(60) for item in worker.batch([1])]
    assert items
    again = [size for size in worker.runtime.sizes if size > 1]
    assert sum(again) >= len(items)
    assert all((item.divergence or 0.0) > 0 for item in items)


@pytest.mark.slow
def test_it_takes_a_bounded_share_of_the_time() -> None:
    """However much is chosen; what does not fit in is counted, and costs no memory."""
    worker = Worker(share=0.01)
    for _ in range(400):
        worker.batch([1] * 8)
    extra = len(worker.runtime.sizes) - 400
    assert 0 < extra <= 0.02 * 400 + 16
    assert worker.noise.counts["digits", Side.REFERENCE, "left_out"] > 0


def test_items_that_wait_for_a_version_that_never_returns_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would keep others out for good."""
    monkeypatch.setattr(noise, "_MOST_WAITING", 4)
    worker = Worker()

    def left_out() -> int:
        return worker.noise.counts["digits", Side.REFERENCE, "left_out"]

    for seed in range(3):
        entry = prepared(1, seed, worker.runtime)
        exchange = msgspec.structs.replace(entry.exchange, version="gone")
        worker.replay([msgspec.structs.replace(entry, exchange=exchange)])
    worker.batch([1] * 4)
    assert left_out() == 3
    worker.clock.advance(601)
    worker.batch([1] * 4)
    assert left_out() == 3 + 3 + 1


def test_what_waits_is_counted_with_what_the_reference_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of every pixel is far larger than the picture."""
    monkeypatch.setattr(noise, "_MOST_BYTES", 8 * 100)
    worker = Worker()
    worker.batch([1] * 8)
    assert worker.noise.counts["digits", Side.REFERENCE, "left_out"] > 0


def test_one_exchange_may_be_larger_than_all_that_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or nothing would ever be known of such a reference."""
    monkeypatch.setattr(noise, "_MOST_BYTES", 1)
    worker = Worker()
    worker.batch([8])
    worker.clock.advance(31)
    assert len(worker.batch([8])) == 8


def test_an_item_counts_for_the_slices_that_it_lies_in() -> None:
    """The worker knows them when it chooses, so nobody has to look for its comparison later."""
    worker = Worker()
    items = [item for _ in range(12) for item in worker.batch([1, 1, 2, 4], rare=[2])]
    assert {item.slices for item in items} == {(ALL,), (ALL, RARE)}
    rare = {item.exchange_id for item in items if RARE in item.slices}
    assert rare
    assert all((RARE in item.slices) is (item.exchange_id in rare) for item in items)


def test_an_item_counts_for_discovered_slices_too() -> None:
    """For the same slices as its comparison, whatever found them."""
    clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
    runtime = _Watched(clock)
    config = Config(models=(Model(name="digits", top_k=2),))
    assessor = Assessor(config, "w", NoiseReplays(1.0, clock, rng=random.Random(5)))
    found = msgspec.structs.replace(RARE, where=(Predicate(key="header.x-scanner", equals="faint"),))
    assessor.watch_discovered({"digits": (found,)})
    compared: dict[str, tuple[SliceKey, ...]] = {}
    items: list[NoiseItem] = []
    for turn in range(8):
        batch = [prepared(1, 10 * turn + place, runtime) for place in range(8)]
        batch[0] = msgspec.structs.replace(
            batch[0],
            exchange=msgspec.structs.replace(batch[0].exchange, attributes={"header.x-scanner": "faint"}),
        )
        rows = assessor.assess(batch, clock.now())
        compared |= {row.exchange.id: row.items[0].slices for row in rows.compared}
        items += rows.noise
        if assessor.noise.is_due(batch[0]):
            assessor.noise.replay_due(batch[0])
    assert {item.slices for item in items} == {(ALL,), (ALL, found)}
    assert all(item.slices == compared[item.exchange_id] for item in items)


@pytest.mark.slow
def test_the_noise_of_a_rare_slice_is_known_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice with one exchange in 50, of which 1 % are chosen by chance: 500 of its exchanges would take 2.5 million.

    What was chosen for it counts for it alone: in the slice of all traffic it would be more than its share. Once 500 are
    kept, chance alone chooses.
    """
    monkeypatch.setattr(noise, "_ALL_UNTIL", 10)
    worker = Worker(share=0.01)
    items: list[NoiseItem] = []
    for turn in range(1500):
        items += worker.batch([1] * 5, rare=[0] if turn % 10 == 0 else ())
    of_rare = {item.exchange_id for item in items if RARE in item.slices}
    everywhere = {item.exchange_id for item in items if ALL in item.slices}
    assert 10 <= len(of_rare) <= 15
    assert any(item.slices == (RARE,) for item in items)
    drawn = {item.exchange_id for item in items if draw(item.exchange_id, b"quantdrift noise") < 0.01}
    assert len(everywhere) <= 20 + len(drawn)
    extra = len(worker.runtime.sizes) - 1500
    assert 0 < extra <= 0.02 * 1500 + 16
    assert worker.noise.counts["digits", Side.REFERENCE, "left_out"] <= 10 + len(drawn)


def test_all_of_a_suspect_slice_is_replayed_again_and_the_rest_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a time of its own; what is chosen for it counts for it alone, as that of a rare slice does."""
    monkeypatch.setattr(noise, "_ALL_UNTIL", 0)
    worker = Worker(share=0.001)
    assert not [item for _ in range(8) for item in worker.batch([1] * 8, rare=[0, 1, 2, 3])]
    worker.noise.suspect(frozenset({(version_of(prepared(1, 1, worker.runtime)), RARE.predicate)}))
    items = [item for _ in range(40) for item in worker.batch([1] * 8, rare=[0, 1, 2, 3])]
    assert 4 * 40 - 16 <= len(items) <= 4 * 40
    assert {item.slices for item in items} == {(RARE,)}
    worker.noise.suspect(frozenset())
    for _ in range(8):
        worker.batch([1] * 8, rare=[0, 1, 2, 3])
    assert worker.noise.counts["digits", Side.REFERENCE, "measured"] <= 4 * 40


def test_suspect_slices_have_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that is noisy for good costs a tenth, once what was saved is used up; what does not fit is counted."""
    monkeypatch.setattr(noise, "_ALL_UNTIL", 0)
    monkeypatch.setattr(noise, "_MOST_SUSPECT_S", 1.0)
    worker = Worker(share=0.001)
    worker.noise.suspect(frozenset({(version_of(prepared(1, 1, worker.runtime)), ALL.predicate)}))
    for _ in range(200):
        worker.batch([1] * 8)
    extra = len(worker.runtime.sizes) - 200
    assert 0.05 * 200 < extra <= 0.1 * 200 + 10 + 64
    assert worker.noise.counts["digits", Side.REFERENCE, "left_out"] > 0


def test_nothing_is_done_where_nothing_is_asked_for() -> None:
    """A share of 0 is off."""
    worker = Worker(share=0.0)
    assert [item for _ in range(20) for item in worker.batch([1] * 8)] == []
    assert len(worker.runtime.sizes) == 20
    assert not worker.noise.counts


def test_a_reference_that_goes_away_costs_the_sample_alone() -> None:
    """Nothing is raised: the batch that was replayed just before is stored."""
    worker = Worker()
    worker.runtime.away_after = 2
    assert worker.batch([1] * 8) == worker.batch([1] * 8) == ()
    assert worker.noise.counts == {("digits", Side.REFERENCE, "failed"): 16}


class _Scoring(_Watched):
    """Scores answers of two tokens, the first of which it likes better in company."""

    n_own = 0

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        n_items = len(inputs[PROMPT])
        self.sizes.append(n_items)
        self.n_own += sum(one.free_answer is not None for one in inputs[REQUEST])
        self.clock.advance(0.1)
        first = [0.5, 0.3, 0.2] if n_items == 1 else [0.6, 0.3, 0.1]
        return {SCORES: objects([scores_of(np.log([first, [0.1, 0.2, 0.7]]), (0, 2))] * n_items)}


def test_scores_of_text_are_compared_without_what_the_candidate_said() -> None:
    """An answer that is broken is so whatever its reference does."""
    worker = Worker(_Scoring)
    model = Model(name="digits", task=Task.GENERATION, references=(Reference(path="folder"),))
    asked = {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}
    spoken = exchange("/v1/chat/completions", {"model": "digits", **asked}, chat("no JSON"))
    items = [item for _ in range(40) for item in worker.replay([answered(spoken, model, worker.runtime)])]
    assert len(items) >= 16
    assert {item.flip for item in items} == {False}
    expected = rel_entr([0.5, 0.3, 0.2], [0.6, 0.3, 0.1]).sum() / 2
    assert [item.divergence for item in items] == pytest.approx([expected] * len(items))


def test_what_is_replayed_again_is_not_answered_again() -> None:
    """The reference's own answers take as long as all else together."""
    worker = Worker(_Scoring)
    model = Model(
        name="digits",
        task=Task.GENERATION,
        references=(Reference(path="folder"),),
        generation=Generation(own_share=1.0),
    )
    spoken = exchange(
        "/v1/chat/completions", {"model": "digits", "messages": [{"role": "user", "content": "a"}]}, chat()
    )
    items = [item for _ in range(20) for item in worker.replay([answered(spoken, model, worker.runtime)])]
    assert items
    assert isinstance(worker.runtime, _Scoring)
    assert worker.runtime.n_own == 20


class _Counting(Comparator):
    """Knows how often it was asked, as one knows that remembers what it has seen."""

    outputs: tuple[str, ...] = ()
    n_asked = 0

    def compare(self, candidate: Outputs, reference: Outputs) -> Divergences:
        """Compare as a classifier's does."""
        self.n_asked += 1
        return comparator_of(Model(name="digits", top_k=2)).compare(candidate, reference)


def test_what_is_replayed_again_is_not_shown_to_the_models_own_comparator() -> None:
    """Some remember what they have seen."""
    worker, comparator = Worker(), _Counting()
    for turn in range(6):
        entry = prepared(8, turn, worker.runtime)
        entry = msgspec.structs.replace(
            entry, version_reference=msgspec.structs.replace(entry.version_reference, comparator=comparator)
        )
        worker.replay([entry])
    assert worker.noise.counts["digits", Side.REFERENCE, "measured"] > 0
    assert comparator.n_asked == 6


def test_of_a_large_exchange_a_part_is_replayed() -> None:
    """At random: its mean is that of the whole."""
    worker = Worker()
    items = [item for _ in range(8) for item in worker.batch([40])]
    of_exchange: dict[str, set[int]] = {}
    for item in items:
        of_exchange.setdefault(item.exchange_id, set()).add(item.item)
    assert {len(rows) for rows in of_exchange.values()} == {8}
    assert max(max(rows) for rows in of_exchange.values()) > 20


@pytest.mark.slow
@given(st.lists(st.uuids(), min_size=1, max_size=20))
def test_the_draw_is_the_same_on_every_worker(ids: list[object]) -> None:
    """And lies in [0, 1)."""
    names = [str(one) for one in ids]
    draws = [draw(name, b"key") for name in names]
    assert draws == [draw(name, b"key") for name in names]
    assert all(0.0 <= value < 1.0 for value in draws)


def test_about_the_share_is_chosen() -> None:
    """Once some hundreds of a version are measured: 5 % of 20,000 ids, within five standard errors."""
    chosen = np.mean([draw(f"{n:032x}", b"key") < 0.05 for n in range(20_000)])
    assert abs(chosen - 0.05) < 5 * np.sqrt(0.05 * 0.95 / 20_000)
