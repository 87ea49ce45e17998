"""Learned and discovered slices of recorded items."""

import msgspec
import numpy as np
import pytest

from quantdrift.core.clusters import cluster_slice, novel_input, novel_value
from quantdrift.core.config.schema import Config, Model, Slice
from quantdrift.core.records import Predicate
from quantdrift.core.slices import slice_of
from quantdrift.release.gate.found import FoundSlices, LearnedItems
from tests.support.monitor.clusterings import CLUSTERING
from tests.support.shadow.onnx_models import exchange_of, inputs_of

pytestmark = pytest.mark.unit

MODEL = Model(name="digits", embedding="pool")
CONFIG = Config(models=(MODEL,), slices=(Slice(name="scanner", header="x-scanner"),))
NEW_SCANNER = novel_value("digits", "scanner", "header.x-scanner")
FOUND = FoundSlices(
    learned=(cluster_slice("digits", 4), novel_input("digits"), NEW_SCANNER),
    discovered=(slice_of("digits", [Predicate(key="header.x-site", equals="s3")]),),
    clusterings=(CLUSTERING,),
)


def test_each_item_has_the_learned_slices_of_its_own_vector_and_of_its_own_attributes() -> None:
    """Known and unknown scanners alternate; a cluster that is not judged is left out."""
    inside, far, other = [10.0, 20.0], [99.0, 99.0], [18.0, 20.0]
    items = LearnedItems(CONFIG, MODEL, FOUND, CLUSTERING.reference_digest)
    assigned = items.of(
        exchange_of(inputs_of(1)),
        attributes={"header.x-scanner": ["a", "never-met", "a", "never-met"], "header.x-user": [*"1234"]},
        features=[{}] * 4,
        embedding=np.array([inside, inside, far, other], np.float32),
    )
    names = [[key.name for key in keys] for keys in assigned]
    assert names == [["cluster=4"], ["cluster=4", "novel=scanner"], ["novel=input"], ["novel=scanner"]]


def test_what_a_recording_does_not_tell_is_left_out_and_said() -> None:
    """A site needs its header, an unknown value the attribute that it is of; clusters need none."""
    assert FOUND.attributes == {"header.x-site", "header.x-scanner"}
    assert FOUND.told_by(FOUND.attributes) == FOUND
    told = FOUND.told_by({"header.x-site"})
    assert told.learned == FOUND.learned[:2]
    assert told.left_out == ("novel=scanner: the recording has no `header.x-scanner`",)
    assert FOUND.told_by([]).keys == FOUND.learned[:2]


def test_slices_are_chosen_by_their_kind() -> None:
    """As `--slice` names them."""
    assert FOUND.only(["cluster"]).keys == FOUND.learned[:1]
    assert FOUND.only(["novel"]).keys == FOUND.learned[1:]
    assert FOUND.only(["discovered"]) == msgspec.structs.replace(FOUND, learned=())
