"""Learned slices in the shadow worker: the cluster of each item, and the vectors that are stored."""

from datetime import UTC, datetime, timedelta

import msgspec
import numpy as np
import pytest

from quantdrift.core.clusters import MOST_VECTORS, SAMPLE_SHARE
from quantdrift.core.config.schema import Config, Model, Slice
from quantdrift.models.tensors.arrays import Array
from quantdrift.shadow.slices.clusters import ClusterAssignment, ClusterSlices
from tests.support.monitor.clusterings import CLUSTERING
from tests.support.shadow.onnx_models import exchange_of, inputs_of

pytestmark = pytest.mark.unit

AT = datetime(2031, 1, 1, tzinfo=UTC)
MODEL = Model(name="digits", embedding="pool")
SCANNER = Slice(name="scanner", header="x-scanner")
INSIDE, FAR, OTHER = [10.0, 20.0], [99.0, 99.0], [18.0, 20.0]


def _slices(most_vectors: int = MOST_VECTORS, sample_share: float = SAMPLE_SHARE) -> ClusterSlices:
    config = Config(models=(MODEL,), slices=(SCANNER,))
    learned = ClusterSlices(config, most_vectors=most_vectors)
    learned.sample_share = sample_share
    learned.use_clusterings([CLUSTERING])
    return learned


def _learn(
    learned: ClusterSlices,
    embedding: Array | None,
    *,
    model: Model = MODEL,
    digest: str = CLUSTERING.reference_digest,
    scanner: str = "a",
    at: datetime = AT,
    features: list[dict[str, float]] | None = None,
) -> ClusterAssignment:
    features = [{}] * (0 if embedding is None else len(embedding)) if features is None else features
    exchange = exchange_of(inputs_of(1), attributes={"header.x-scanner": scanner})
    return learned.assign(
        model=model, exchange=exchange, digest=digest, embedding=embedding, features=features, at=at
    )


def _names(found: ClusterAssignment) -> list[list[str]]:
    return [[key.name for key in of_item] for of_item in found.slices]


def test_items_fall_into_clusters_or_are_novel() -> None:
    """Each on its own; a value that was never met makes all items of the exchange novel."""
    learned = _slices()
    found = _learn(learned, np.array([INSIDE, FAR, OTHER], np.float32))
    assert _names(found) == [["cluster=4"], ["novel=input"], ["cluster=(other)"]]
    assert found.version == 3
    assert learned.overflow == {"digits": 1}
    found = _learn(learned, np.array([INSIDE, FAR], np.float32), scanner="never-met")
    assert _names(found) == [["cluster=4", "novel=scanner"], ["novel=input", "novel=scanner"]]


@pytest.mark.parametrize(
    ("model", "digest"),
    [
        (Model(name="digits", embedding="other"), CLUSTERING.reference_digest),
        (MODEL, "e" * 64),
        (Model(name="letters", embedding="pool"), CLUSTERING.reference_digest),
        (Model(name="digits"), CLUSTERING.reference_digest),
    ],
)
def test_a_clustering_holds_for_its_model_reference_and_space_alone(model: Model, digest: str) -> None:
    """Elsewhere there are no learned slices, and no version is named."""
    found = _learn(_slices(), np.array([INSIDE], np.float32), model=model, digest=digest)
    assert (_names(found), found.version) == ([[]], 0)


@pytest.mark.parametrize("embedding", [None, np.zeros((1, 5)), np.zeros(()), np.zeros((3, 2))])
def test_an_embedding_that_does_not_fit_teaches_nothing_and_harms_nothing(embedding: Array | None) -> None:
    """None, another width, no entry per item, and another number of items."""
    found = _learn(_slices(), embedding, features=[{}])
    assert (_names(found), found.version) == ([[]], 0)


def test_switched_off_nothing_is_kept_or_assigned() -> None:
    """By a model without an `embedding`."""
    model = msgspec.structs.replace(MODEL, embedding="")
    found = _learn(_slices(sample_share=1.0), np.array([INSIDE], np.float32), model=model)
    assert found == ClusterAssignment(slices=((),), version=0, vectors=())


def test_features_are_vectors_in_the_order_of_their_keys() -> None:
    """What is absent is not a number: it is kept, and falls nowhere."""
    rules = tuple(Slice(name=name, feature=name, edges=(1.0,)) for name in ("norm", "mean"))
    model = Model(name="digits", embedding="features")
    config = Config(models=(model,), slices=rules)
    learned = ClusterSlices(config)
    learned.sample_share = 1.0
    columns = ("feature.mean", "feature.norm")
    space = f"features {', '.join(columns)}"
    learned.use_clusterings([msgspec.structs.replace(CLUSTERING, space=space, columns=columns, gaps=True)])
    features = [{"feature.norm": 20.0, "feature.mean": 10.0}, {"feature.norm": 1e300}]
    found = _learn(learned, None, model=model, features=features)
    assert _names(found) == [["cluster=4"], []]
    assert [np.frombuffer(row.vector, "<f4").tolist() for row in found.vectors] == [
        [10, 20],
        [pytest.approx(np.nan, nan_ok=True), np.inf],
    ]
    assert found.vectors[0].space == space


def test_a_share_is_kept_whatever_it_holds_and_the_same_again() -> None:
    """About `sample_share` of the items: 6 standard errors, and a hash that is the same for ever."""
    learned = _slices(sample_share=0.3)
    vectors = np.tile(np.array([INSIDE, FAR], np.float32), (2000, 1))
    exchange = exchange_of(inputs_of(1))
    exchange = msgspec.structs.replace(exchange, id="0" * 32)
    first, second = (
        learned.assign(
            model=MODEL,
            exchange=exchange,
            digest=CLUSTERING.reference_digest,
            embedding=vectors,
            features=[{}] * 4000,
            at=AT,
        ).vectors
        for _ in range(2)
    )
    assert first == second
    assert len(first) == pytest.approx(1200, abs=6 * np.sqrt(4000 * 0.3 * 0.7))
    assert {row.pi for row in first} == {0.5}
    assert np.mean([row.item % 2 for row in first]) == pytest.approx(0.5, abs=6 * 0.5 / np.sqrt(1200))


def test_no_more_than_the_cap_is_kept_in_an_hour() -> None:
    """The rest is counted; the next hour begins anew."""
    learned = _slices(sample_share=1.0, most_vectors=100)
    vectors = np.tile(np.array([INSIDE], np.float32), (70, 1))
    kept = [
        len(_learn(learned, vectors, at=AT + timedelta(minutes=minutes)).vectors)
        for minutes in (0, 20, 40, 61)
    ]
    assert kept == [70, 30, 0, 70]
    assert learned.n_over_cap == {"digits": 110}
