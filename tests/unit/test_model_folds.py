"""Batches among the folds of models: `quantdrift.monitor.fold.models`."""

import msgspec
import pytest

from quantdrift.monitor.fold.models import ModelFolds
from tests.support.monitor.fold_stream import CATALOG, CONFIG, WITH_REFERENCE, batches, second_replay
from tests.support.monitor.folds import EMPTY

pytestmark = pytest.mark.unit


def test_a_model_gets_no_noise_of_another_one() -> None:
    """Workers of the release before store it with any batch; who folds the other model alone would not see it."""
    letters = 9
    version = msgspec.structs.replace(CATALOG.versions[WITH_REFERENCE], id=letters, model="letters")
    everything = msgspec.structs.replace(CATALOG.slices[1], id=letters, model="letters")
    catalog = msgspec.structs.replace(
        CATALOG,
        versions={**CATALOG.versions, letters: version},
        slices={**CATALOG.slices, letters: everything},
    )
    folds = ModelFolds(CONFIG)
    for model in ("digits", "letters"):
        folds.begin(model, EMPTY)
    folds.learn(catalog, {})
    (rows,) = batches(1)
    own = second_replay(rows.comparisons[0])
    foreign = msgspec.structs.replace(own, model_version_id=letters, slice_ids=(letters,))
    folds.batch(msgspec.structs.replace(rows, model="digits", noise=(foreign, own)))
    assert {row.model_version_id for row in folds.floors()} == {WITH_REFERENCE}
    assert all(outcome.position.fold_seq == rows.fold_seq for _, outcome in folds.take())
