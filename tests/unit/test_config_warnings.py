"""Warnings about a configuration that the reference's outputs contradict."""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from scipy.special import expit, softmax

from quantdrift.core.clock import SystemClock
from quantdrift.core.config.schema import Config, Model, OutputKind
from quantdrift.core.config.tasks import Ranking, Regression
from quantdrift.core.config.vision import Segmentation
from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.tasks import Task
from quantdrift.core.telemetry import Telemetry
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.comparators.regression import RegressionComparator
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.shadow.pipeline.assess import Assessor
from quantdrift.shadow.pipeline.metrics import ShadowMetrics
from quantdrift.shadow.replay.config_warnings import N_ITEMS, ConfigWarnings
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import VersionReference
from tests.support.shadow.onnx_models import BIAS, WEIGHT, exchange_of, inputs_of

pytestmark = pytest.mark.unit

Output = npt.NDArray[Any]


def _found(
    model: Model, output: Output, *, n_items: int = 16, doubts: ConfigWarnings | None = None
) -> dict[tuple[str, str], str]:
    """Let a reference give `output`, some items an exchange; return what is doubted."""
    doubts = doubts or ConfigWarnings()
    version_reference = VersionReference(
        model=model, runtime=LinearRuntime(WEIGHT, BIAS), comparator=comparator_of(model)
    )
    for begin in range(0, len(output), n_items):
        some = output[begin : begin + n_items]
        x = inputs_of(len(some))
        exchange = exchange_of(x, np.zeros(some.shape, np.float32))
        entry = PreparedExchange(
            stream_sequence=1,
            payload=b"",
            exchange=exchange,
            version_reference=version_reference,
            inputs={"x": x},
        )
        doubts.check([entry], [{"logits": some}])
    return doubts.found


def _model(task: Task, **options: Any) -> Model:
    return Model(name="m", task=task, **options)


def _scores(seed: int = 1, n_items: int = 300, n: int = 5) -> Output:
    return np.random.default_rng(seed).normal(size=(n_items, n)).astype(np.float32)


def _mask(output: Output) -> Output:
    return output[:, :4].reshape(-1, 2, 2)


@pytest.mark.parametrize(
    ("task", "made"),
    [
        (Task.CLASSIFICATION, lambda x: softmax(x, axis=1)),
        (Task.MULTILABEL, expit),
        (Task.SEGMENTATION, lambda x: _mask(expit(x))),
        (Task.SEGMENTATION, lambda x: _mask(expit(x))[:, np.newaxis]),
    ],
)
def test_probabilities_declared_as_logits_are_warned_about_once(
    task: Task, made: Callable[[Output], Output], caplog: pytest.LogCaptureFixture
) -> None:
    """After so many items, with what to set; nothing where they are said to be what they are."""
    output, doubts = made(_scores()), ConfigWarnings()
    with caplog.at_level(logging.WARNING):
        assert not _found(_model(task), output[: N_ITEMS - 1], doubts=doubts)
        found = _found(_model(task), output[N_ITEMS - 1 :], doubts=doubts)
        _found(_model(task), output, doubts=doubts)
    assert list(found) == [("m", "output_kind")]
    assert 'output_kind = "probabilities"' in found["m", "output_kind"]
    assert len(caplog.records) == 1
    assert not _found(_model(task, output_kind=OutputKind.PROBABILITIES), output)


@pytest.mark.parametrize(
    ("task", "output"),
    [
        (Task.CLASSIFICATION, _scores()),
        (Task.CLASSIFICATION, expit(_scores())),  # from 0 to 1, and no distributions
        (Task.CLASSIFICATION, np.eye(5)[np.arange(300) % 5]),  # no model's probabilities are that sure
        (Task.MULTILABEL, _scores()),
        (Task.MULTILABEL, np.concatenate([expit(_scores())[:299], _scores()[:1]])[::-1]),
        (Task.SEGMENTATION, _mask(_scores())),
        (Task.SEGMENTATION, _mask(_scores()) > 0),
        (Task.SEGMENTATION, (_mask(_scores()) > 0).astype(np.float32)),  # which a threshold of 0 reads well
        (Task.SEGMENTATION, softmax(_scores(n=20).reshape(300, 5, 2, 2), axis=1)),
        (Task.MULTILABEL, np.full((300, 5), np.nan)),
        (Task.EMBEDDING, softmax(_scores(), axis=1)),
    ],
)
def test_what_may_be_logits_is_not_doubted(task: Task, output: Output) -> None:
    """Nor what makes no difference, nor items that are no numbers."""
    assert not _found(_model(task), output)


def test_class_numbers_are_no_mask() -> None:
    """Of floating point, where the configuration says so."""
    model = _model(Task.SEGMENTATION, segmentation=Segmentation(classes_axis=0))
    assert not _found(model, (_mask(_scores()) > 0).astype(np.float32) * 0.5)


def test_class_numbers_read_as_a_mask_are_warned_about() -> None:
    """Of floating point, as some models give them: a change from class 1 to class 2 would not be seen."""
    numbers = np.random.default_rng(9).integers(0, 4, size=(300, 2, 2)).astype(np.float32)
    found = _found(_model(Task.SEGMENTATION), numbers)
    assert list(found) == [("m", "segmentation.classes_axis")]
    assert "whole numbers from 0 to 3" in found["m", "segmentation.classes_axis"]
    assert not _found(_model(Task.SEGMENTATION, segmentation=Segmentation(classes_axis=0)), numbers)
    assert not _found(_model(Task.SEGMENTATION), numbers.astype(np.int64))
    numbers[200, 0, 0] = 0.5
    assert not _found(_model(Task.SEGMENTATION), numbers)


@pytest.mark.parametrize("fill", [-1e4, -65504.0])
def test_an_undeclared_padding_score_is_warned_about(fill: float) -> None:
    """A mask of FP16 is above the default: beside it the loss of any order is next to nothing."""
    scores = _scores(n=12)
    scores[:, 9:] = np.where(np.arange(300)[:, np.newaxis] % 2, fill, scores[:, 9:])
    found = _found(_model(Task.RANKING), scores)
    assert (
        f"in 128 of 256 items the reference's lowest score, down to {fill:g}" in found["m", "ranking.padding"]
    )
    filled = scores[1::2]
    turned = np.where(filled == fill, fill, -filled)  # the worst order that there is
    blind = comparator_of(_model(Task.RANKING)).compare({"y": turned}, {"y": filled})
    assert blind.divergence.max() < 0.01
    assert not _found(_model(Task.RANKING, ranking=Ranking(padding=fill)), scores)


@pytest.mark.parametrize(
    "scores",
    [
        _scores(n=12),
        _scores(n=1),
        np.where(np.arange(12) < 6, _scores(n=12), -np.inf),
        np.zeros((300, 4)),
        np.full((300, 4), np.nan),
        np.where(np.arange(12) < 6, 1.0, -5.0) * np.ones((300, 1)),  # two levels: none is an outlier
    ],
)
def test_other_scores_of_a_ranking_are_not_doubted(scores: Output) -> None:
    """Nor those that are filled up by what is known, or are no numbers."""
    assert not _found(_model(Task.RANKING), scores)


def test_a_floor_far_below_outputs_that_cross_zero_is_warned_about() -> None:
    """On standardised targets a healthy candidate flips by it, and with the floor that is told it does not."""
    reference = np.random.default_rng(2).normal(size=(300, 2))
    reference[:, 0] += 50  # the first output never comes near zero
    found = _found(_model(Task.REGRESSION), reference)
    told = found["m", "regression.floor"]
    assert told.startswith("7 % of the reference's values of output 1 (")
    assert told.endswith("such as 0.1")
    candidate = reference + np.random.default_rng(3).normal(scale=0.002, size=reference.shape)
    flips = [
        RegressionComparator(Regression(floor=floor)).compare(candidate, reference).flip.mean()
        for floor in (0.001, 0.1)
    ]
    assert flips[0] > 0.01
    assert flips[1] == 0
    assert not _found(_model(Task.REGRESSION, regression=Regression(floor=0.1)), reference)


@pytest.mark.parametrize(
    "output",
    [
        np.random.default_rng(4).lognormal(sigma=2, size=(300, 1)),  # small values that somebody pays for
        np.where(np.arange(300) % 2, -5.0, 5.0)[:, np.newaxis],
        np.random.default_rng(5).normal(size=(300, 1)) * 1e-3,  # all of it is below the floor, or nearly
        np.random.default_rng(6).normal(size=(300, 1)) * 1e200,
        np.zeros((300, 3)),
    ],
)
def test_other_outputs_of_a_regression_are_not_doubted(output: Output) -> None:
    """Of one sign, away from zero, below the floor, too large to be squared, or nothing but zero."""
    assert not _found(_model(Task.REGRESSION), output)


def test_what_cannot_be_looked_at_harms_nobody() -> None:
    """Exchanges that the reference fails at, outputs of no use, and steps of a forecast that vary in number."""
    model, doubts = _model(Task.SEGMENTATION), ConfigWarnings()
    assert not _found(model, np.zeros((300, 3)), doubts=doubts)
    version_reference = VersionReference(
        model=model, runtime=LinearRuntime(WEIGHT, BIAS), comparator=comparator_of(model)
    )
    x = inputs_of(1)
    entry = PreparedExchange(
        stream_sequence=1,
        payload=b"",
        exchange=exchange_of(x),
        version_reference=version_reference,
        inputs={"x": x},
    )
    doubts.check([entry], [QuarantineError(QuarantineReason.REPLAY, "planted")])
    without = msgspec.structs.replace(entry, exchange=msgspec.structs.replace(entry.exchange, outputs=()))
    doubts.check([without], [{"logits": x}])
    varying = ConfigWarnings()
    regression = _model(Task.REGRESSION)
    for n in (3, 4):
        _found(regression, np.random.default_rng(n).normal(size=(150, n)), doubts=varying)
    assert not doubts.found
    assert not varying.found


@pytest.mark.parametrize("task", [Task.MULTILABEL, Task.EMBEDDING])
def test_that_nothing_is_doubted_is_known_as_well(task: Task) -> None:
    """After a look that found nothing, and where there is nothing to look for: the record forgets older doubts."""
    doubts = ConfigWarnings()
    output = _scores(n_items=N_ITEMS)
    _found(_model(task), output, doubts=doubts)
    (told,) = doubts.take()
    assert (told.model, told.option, told.doubt) == ("m", "", "")
    _found(_model(task), output, doubts=doubts)
    assert not doubts.take()


def test_a_worker_looks_at_what_it_compares_and_counts_what_it_doubts() -> None:
    """Once for each model and option, however often it is told; rows are stored as ever."""
    runtime = LinearRuntime(np.zeros_like(WEIGHT), np.full_like(BIAS, 0.25))  # scores of 0.25 throughout
    model = _model(Task.MULTILABEL)
    version_reference = VersionReference(model=model, runtime=runtime, comparator=comparator_of(model))
    x = inputs_of(N_ITEMS)
    exchange = exchange_of(x, np.full((N_ITEMS, 3), 0.25, np.float32), model="m")
    entry = PreparedExchange(
        stream_sequence=1,
        payload=b"",
        exchange=exchange,
        version_reference=version_reference,
        inputs={"x": x},
    )
    assessor = Assessor(Config(models=(model,)), "w")
    batch = assessor.assess([entry], datetime.now(UTC))
    assert len(batch.compared[0].items) == N_ITEMS
    assert list(assessor.config_warnings.found) == [("m", "output_kind")]
    (told,) = batch.doubts
    assert (told.model, told.reference_digest) == ("m", runtime.artefact.digest)
    assert (told.option, told.doubt) == ("output_kind", assessor.config_warnings.found["m", "output_kind"])
    assert not assessor.assess([entry], datetime.now(UTC)).doubts  # it is in the record
    reader = InMemoryMetricReader()
    meters = ShadowMetrics(Telemetry("test", [reader]), SystemClock())
    for _ in range(3):
        meters.config_warned(assessor.config_warnings.found)
    points = [
        (metric.name, dict(point.attributes or {}), point.value)
        for resource in reader.get_metrics_data().resource_metrics  # type: ignore[union-attr]  # there is one
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "quantdrift.shadow.doubts"
        for point in metric.data.data_points
        if isinstance(point, NumberDataPoint)
    ]
    assert points == [("quantdrift.shadow.doubts", {"model": "m", "option": "output_kind"}, 1)]


def test_what_was_found_when_a_reference_was_opened_is_told_once() -> None:
    """A tokenizer that differs: with the first exchange, since only then the reference is in the record."""
    runtime = LinearRuntime(np.zeros_like(WEIGHT), np.zeros_like(BIAS))
    model = _model(Task.GENERATION)
    version_reference = VersionReference(model=model, runtime=runtime, comparator=comparator_of(model))
    entry = PreparedExchange(
        stream_sequence=1,
        payload=b"",
        exchange=exchange_of(inputs_of(1), np.zeros((1, 3), np.float32), model="m"),
        version_reference=version_reference,
        inputs={"x": inputs_of(1)},
    )
    at_start: dict[tuple[str, str], str] = {}
    warnings = ConfigWarnings(at_start)
    at_start["m", runtime.artefact.digest] = "their tokenizers differ"  # it was opened later
    for _ in range(2):
        warnings.check([entry], [{}])
    (told,) = warnings.take()
    assert (told.option, told.doubt) == ("references.path", "their tokenizers differ")
    assert warnings.found == {("m", "references.path"): "their tokenizers differ"}
