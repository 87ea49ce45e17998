"""Outputs with a different number of objects for each item, through the whole replay."""

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from quantdrift.core.config.schema import Model
from quantdrift.core.config.vision import Activation, Column, Detection
from quantdrift.core.errors import QuarantineError
from quantdrift.core.records import Tensor
from quantdrift.core.tasks import Task
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.comparators.vision.detection import DetectionComparator
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.models.tensors.arrays import Array, TensorSpec
from quantdrift.models.tensors.codec import fit_inputs
from quantdrift.models.tensors.items import itemised, joined_steps
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import VersionReference
from quantdrift.shadow.replay.replay import Outcome, ReplayResult, compare_batch
from tests.support.shadow.onnx_models import BIAS, WEIGHT, exchange_of, tensor

pytestmark = pytest.mark.unit

TABLE = (Column.ITEM, *(Column.BOX,) * 4, Column.CLASS, Column.SCORE)
Rows = npt.NDArray[np.float32]


def _objects(x: Rows) -> list[Rows]:
    """Return x1, y1, x2, y2, class, score of as many objects as the first feature of each item says."""
    found = []
    for item in x:
        begin = np.arange(int(item[0]), dtype=np.float32) * 20
        rows = [begin, begin, begin + 10, begin + 10, np.full_like(begin, item[1]), np.full_like(begin, 0.9)]
        found.append(np.stack(rows, axis=1))
    return found


def _table(found: list[Rows]) -> Rows:
    """Return the rows of all items in one table, the last item first, and one row of padding."""
    rows = [np.insert(of_item, 0, item, axis=1) for item, of_item in reversed([*enumerate(found)])]
    return np.concatenate([*rows, np.full((1, 7), -1)]).astype(np.float32)


def _padded(found: list[Rows]) -> dict[str, Array]:
    most = max(len(rows) for rows in found)
    boxes = np.zeros((len(found), most, 4), dtype=np.float32)
    scores, labels = np.zeros(boxes.shape[:2], dtype=np.float32), np.zeros(boxes.shape[:2], dtype=np.int64)
    for item, rows in enumerate(found):
        boxes[item, : len(rows)], labels[item, : len(rows)], scores[item, : len(rows)] = (
            rows[:, :4],
            rows[:, 4],
            rows[:, 5],
        )
    counts = np.array([[len(rows)] for rows in found], dtype=np.int32)
    return {"boxes": boxes, "scores": scores, "labels": labels, "n": counts}


class _Detector(LinearRuntime):
    """Gives objects in the form that is asked for."""

    def __init__(self, form: str) -> None:
        super().__init__(WEIGHT, BIAS)
        self._form = form
        if form == "table":
            self.outputs = (msgspec.structs.replace(self.outputs[0], name="out"),)
        if form == "unbatched":
            self.inputs = (TensorSpec(name="x", dtype=np.dtype(np.float32), shape=(4,)),)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        return _outputs(
            self._form, _objects(inputs["x"] if self._form != "unbatched" else inputs["x"][np.newaxis])
        )


def _outputs(form: str, found: list[Rows]) -> dict[str, Array]:
    if form == "table":
        return {"out": _table(found)}
    outputs = _padded(found)
    return {name: array[0] for name, array in outputs.items()} if form == "unbatched" else outputs


def _prepared(form: str, x: Rows, candidate: list[Rows]) -> PreparedExchange:
    separate = Detection(boxes="boxes", scores="scores", classes="labels", count="n")
    model = Model(
        name="digits",
        task=Task.DETECTION,
        batched=form != "unbatched",
        output="out" if form == "table" else "",
        detection=Detection(columns=TABLE) if form == "table" else separate,
    )
    kinds = {"float32": "FP32", "int32": "INT32", "int64": "INT64"}
    outputs: tuple[Tensor, ...] = tuple(
        tensor(name, array, kinds[array.dtype.name]) for name, array in _outputs(form, candidate).items()
    )
    runtime = _Detector(form)
    exchange = msgspec.structs.replace(exchange_of(x), outputs=outputs)
    return PreparedExchange(
        stream_sequence=1,
        payload=b"",
        exchange=exchange,
        version_reference=VersionReference(model=model, runtime=runtime, comparator=comparator_of(model)),
        inputs=fit_inputs(exchange.inputs, runtime.inputs, batched=model.batched),
    )


def _missed(outcome: Outcome) -> list[int]:
    assert isinstance(outcome, ReplayResult)
    assert outcome.divergences.flip.tolist() == [float(n > 0) for n in outcome.divergences.detail["missed"]]
    return list(outcome.divergences.detail["missed"])


def _items(*counts: int) -> Rows:
    return np.array([[count, 2, 0, 0] for count in counts], dtype=np.float32)


@pytest.mark.parametrize("form", ["table", "padded"])
@pytest.mark.parametrize("most_items", [64, 2])
def test_exchanges_of_one_batch_have_as_many_objects_as_they_have(form: str, most_items: int) -> None:
    """Whatever the others have, in whatever steps the reference computes; none and lost objects included."""
    batch = []
    for counts in ((1, 3), (0,), (5, 0, 2)):
        x = _items(*counts)
        candidate = _objects(x)
        candidate[-1] = candidate[-1][:1]
        batch.append(_prepared(form, x, candidate))
    outcomes = compare_batch(batch, most_items=most_items)
    assert [_missed(outcome) for outcome in outcomes] == [[0, 2], [0], [0, 0, 1]]


def test_models_without_batches_have_them_too() -> None:
    """One exchange is one item, with any number of objects, one of them included."""
    batch = []
    for count in (3, 1, 0, 2):
        x = _items(count)
        batch.append(_prepared("unbatched", x[0], [_objects(x)[0][: max(count - 1, 1)]]))
    assert [_missed(outcome) for outcome in compare_batch(batch, most_items=64)] == [[1], [0], [0], [1]]


def test_a_table_with_rows_of_other_items_affects_no_other_exchange() -> None:
    """It is set aside by itself."""
    x = _items(1)
    batch = [_prepared("table", x, _objects(x)) for _ in range(3)]
    batch[1] = _prepared("table", x, [*_objects(x), *_objects(x)])
    good, bad, other = compare_batch(batch, most_items=64)
    assert _missed(good) == _missed(other) == [0]
    assert isinstance(bad, QuarantineError)
    assert "beyond the 1" in bad.detail


@pytest.mark.parametrize("activation", list(Activation))
def test_what_fills_up_is_no_object(activation: Activation) -> None:
    """Whatever is made of the scores: neither between steps of the reference nor behind the rows of an item."""
    box, columns = [0, 0, 9, 9], (Column.ITEM, *(Column.BOX,) * 4, Column.SCORE)
    model = Model(
        name="m", task=Task.DETECTION, detection=Detection(boxes="b", scores="s", activation=activation)
    )
    steps = [np.full((1, n, 1), 5, dtype=np.float32) * np.ones(4) for n in (1, 3)]
    boxes = joined_steps([step * 0 + box for step in steps], model)
    scores = joined_steps([step[..., :2] * [-1, 1] for step in steps], model)
    assert boxes is not None
    assert scores is not None
    one = {"b": boxes[:1, :1], "s": scores[:1, :1]}
    found = comparator_of(model).compare(one, {"b": boxes[:1], "s": scores[:1]})
    assert (found.flip.tolist(), found.detail["n_reference"].tolist()) == ([0], [1])
    if activation is Activation.SOFTMAX:
        return
    options = Detection(columns=columns, activation=activation)
    table = np.array(
        [[0, *box, 5], [0, 20, 20, 29, 29, 5], [1, *box, 5], [-1, 40, 40, 49, 49, 5]], dtype=np.float32
    )
    for rows in (itemised(table, 0, 2)[1:], table[np.newaxis, 2:]):  # the latter of a model without batches
        found = DetectionComparator(options, threshold=0.25).compare(
            {"t": rows}, {"t": table[np.newaxis, 2:3]}
        )
        assert (found.flip.tolist(), found.detail["n_candidate"].tolist()) == ([0], [1])


def test_rows_keep_their_order() -> None:
    """Within their item; whatever shape the table comes in."""
    table = np.array([[1, 7], [0, 8], [-1, 0], [1, 9]], dtype=np.float32)
    expected = [[[0, 8], [-1, -1]], [[1, 7], [1, 9]], [[-1, -1], [-1, -1]]]
    np.testing.assert_array_equal(itemised(table[np.newaxis], 0, 3), expected)
    assert itemised(table[:0], 0, 2).shape == (2, 0, 2)
    for wrong in (np.array([[np.nan, 0]]), np.zeros(3), np.zeros((2, 2), dtype=np.uint8)):
        with pytest.raises(QuarantineError):
            itemised(wrong, 0, 1)
