"""Replaying and comparing a batch."""

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from quantdrift.core.config.schema import Model
from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.records import Exchange, Tensor
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.tensors.arrays import Array, TensorSpec
from quantdrift.models.tensors.codec import fit_inputs
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import VersionReference
from quantdrift.shadow.replay.replay import Outcome, ReplayResult, compare_batch
from tests.support.shadow.onnx_models import BIAS, WEIGHT, exchange_of, inputs_of, logits_of, tensor

pytestmark = pytest.mark.unit

BAD = 1e6


class _Fussy(LinearRuntime):
    """Fails on any batch that holds a value of BAD, and takes only `size` items at a time."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__(WEIGHT, BIAS)
        self.sizes: list[int] = []
        if size is not None:
            float32 = np.dtype(np.float32)
            self.inputs = (TensorSpec(name="x", dtype=float32, shape=(size, 4)),)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        self.sizes.append(len(inputs["x"]))
        if np.any(inputs["x"] == BAD):
            raise QuarantineError(QuarantineReason.REPLAY, "too large")
        return super().run(inputs)


class _Unbatched(LinearRuntime):
    """Takes one item without a batch dimension."""

    def __init__(self) -> None:
        super().__init__(WEIGHT, BIAS)
        self.inputs = (TensorSpec(name="x", dtype=np.dtype(np.float32), shape=(4,)),)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        return {"logits": super().run({"x": inputs["x"][np.newaxis]})["logits"][0]}


def _prepared(exchange: Exchange, runtime: ReferenceRuntime, **options: object) -> PreparedExchange:
    model = Model(name="digits", top_k=2, **options)  # type: ignore[arg-type]  # options of the test's own
    version_reference = VersionReference(model=model, runtime=runtime, comparator=comparator_of(model))
    return PreparedExchange(
        stream_sequence=1,
        payload=b"",
        exchange=exchange,
        version_reference=version_reference,
        inputs=fit_inputs(exchange.inputs, runtime.inputs, batched=model.batched),
    )


def _kl(outcome: Outcome) -> npt.NDArray[np.float64]:
    assert isinstance(outcome, ReplayResult)
    return outcome.divergences.divergence


def test_every_exchange_gets_its_own_divergences() -> None:
    """A batch is replayed at once, and each exchange's items come back to it in order."""
    runtime = _Fussy()
    x = inputs_of(3)
    other = logits_of(x)[::-1].copy()
    batch = [
        _prepared(exchange_of(inputs_of(2, 1)), runtime),
        _prepared(exchange_of(x, other), runtime),
        _prepared(exchange_of(inputs_of(1, 2)), runtime),
    ]
    first, second, third = compare_batch(batch, most_items=64)
    assert runtime.sizes == [6]
    np.testing.assert_allclose(_kl(first), [0, 0], atol=1e-9)
    np.testing.assert_allclose(_kl(third), [0], atol=1e-9)
    alone = _kl(compare_batch([batch[1]], most_items=64)[0])
    np.testing.assert_allclose(_kl(second), alone)
    assert alone[0] > 0.01
    assert alone[1] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("n_bad", [1, 2, 5])
def test_only_what_fails_alone_is_set_aside(n_bad: int) -> None:
    """A failing batch is halved down to the culprits; all others are compared."""
    runtime = _Fussy()
    batch = []
    for seed in range(9):
        x = inputs_of(1, seed)
        if seed < n_bad:
            x[0, 0] = BAD
        batch.append(_prepared(exchange_of(x), runtime))
    outcomes = compare_batch(batch, most_items=64)
    assert [isinstance(outcome, QuarantineError) for outcome in outcomes] == [i < n_bad for i in range(9)]
    first = outcomes[0]
    assert isinstance(first, QuarantineError)
    assert first.reason is QuarantineReason.REPLAY


def test_an_exchange_that_is_too_large_is_replayed_in_shorter_steps() -> None:
    """Where memory does not do for all of its items; one that holds a bad item is set aside after the last try."""

    class _Small(_Fussy):
        def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
            if len(inputs["x"]) > 3:
                self.sizes.append(len(inputs["x"]))
                raise QuarantineError(QuarantineReason.REPLAY, "out of memory")
            return super().run(inputs)

    runtime = _Small()
    bad = inputs_of(2)
    bad[1] = BAD
    batch = [_prepared(exchange_of(x), runtime) for x in (inputs_of(10), inputs_of(2, 1), bad)]
    large, small, refused = compare_batch(batch, most_items=8)
    np.testing.assert_allclose(_kl(large), np.zeros(10), atol=1e-9)
    np.testing.assert_allclose(_kl(small), np.zeros(2), atol=1e-9)
    assert isinstance(refused, QuarantineError)
    #                     all, the first: 5 of 10 at once, 4, 2; and the others, together, and each for itself
    assert runtime.sizes == [7, 5, 4, 2, 2, 2, 2, 2, 4, 2, 2, 1, 1]


@pytest.mark.parametrize(("size", "steps"), [(1, 5), (2, 3), (8, 1)])
def test_a_reference_with_a_fixed_number_of_items_gets_that_number(size: int, steps: int) -> None:
    """Items are replayed in that size, filled up at the end, and the filling is thrown away."""
    runtime = _Fussy(size)
    batch = [_prepared(exchange_of(inputs_of(n, n)), runtime) for n in (3, 2)]
    outcomes = compare_batch(batch, most_items=64)
    assert runtime.sizes == [size] * steps
    assert [len(_kl(outcome)) for outcome in outcomes] == [3, 2]
    np.testing.assert_allclose(np.concatenate([_kl(outcome) for outcome in outcomes]), 0, atol=1e-9)


def test_an_exchange_of_many_items_is_replayed_in_steps() -> None:
    """Never more items than `most_items` are given to the reference, and hardly one more than there are."""
    runtime = _Fussy()
    x = inputs_of(10)
    (outcome,) = compare_batch([_prepared(exchange_of(x), runtime)], most_items=4)
    assert runtime.sizes == [4, 4, 4]
    np.testing.assert_allclose(_kl(outcome), np.zeros(10), atol=1e-9)


def test_a_model_without_batches_is_replayed_one_by_one() -> None:
    """Exchanges are single items, with or without a first dimension of one in the candidate's output."""
    runtime = _Unbatched()
    x = inputs_of(2)
    batch = [
        _prepared(exchange_of(x[0], logits_of(x[0])), runtime, batched=False),
        _prepared(exchange_of(x[1], logits_of(x[1:])), runtime, batched=False),
    ]
    for outcome in compare_batch(batch, most_items=64):
        np.testing.assert_allclose(_kl(outcome), [0], atol=1e-9)


def test_the_output_is_the_configured_one_or_the_first_on_both_sides() -> None:
    """Without a common output, or without the configured one, both sides are named."""
    runtime = _Fussy()
    exchange = exchange_of(inputs_of(1))
    other = Tensor(name="other", datatype="FP32", shape=(1, 3), data=bytes(12))
    both = msgspec.structs.replace(exchange, outputs=(other, *exchange.outputs))
    none = msgspec.structs.replace(exchange, outputs=(other,))
    outcomes = compare_batch(
        [_prepared(both, runtime), _prepared(none, runtime), _prepared(both, runtime, output="other")],
        most_items=64,
    )
    np.testing.assert_allclose(_kl(outcomes[0]), [0], atol=1e-9)
    for outcome in outcomes[1:]:
        assert isinstance(outcome, QuarantineError)
        assert outcome.reason is QuarantineReason.OUTPUT
        assert "'logits'" in outcome.detail
        assert "'other'" in outcome.detail


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0,)])
def test_an_answer_with_nothing_in_it_is_a_flip_of_every_item(shape: tuple[int, ...]) -> None:
    """However the server writes it: it is recorded, where one that does not fit is set aside."""
    runtime = _Fussy()
    (outcome,) = compare_batch(
        [_prepared(exchange_of(inputs_of(2), np.empty(shape, np.float32)), runtime)], most_items=64
    )
    assert isinstance(outcome, ReplayResult)
    assert outcome.divergences.flip.tolist() == [1, 1]
    assert not outcome.divergences.candidate_finite.any()


def test_outputs_that_cannot_be_compared_harm_no_neighbour() -> None:
    """Labels, too few classes, too few items and cut bytes are set aside one by one."""
    runtime = _Fussy()
    x = inputs_of(2)
    exchange = exchange_of(x)
    outputs = [
        tensor("logits", np.zeros((2, 3), np.int64), "INT64"),
        tensor("logits", logits_of(x)[:, :2].copy()),
        tensor("logits", logits_of(x)[:1].copy()),
        Tensor(name="logits", datatype="FP32", shape=(2, 3), data=b""),
        tensor("logits", logits_of(x)),
    ]
    batch = [_prepared(msgspec.structs.replace(exchange, outputs=(output,)), runtime) for output in outputs]
    *bad, good = compare_batch(batch, most_items=64)
    np.testing.assert_allclose(_kl(good), [0, 0], atol=1e-9)
    for outcome in bad:
        assert isinstance(outcome, QuarantineError)
        assert outcome.reason is QuarantineReason.OUTPUT
