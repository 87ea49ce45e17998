"""The record of a clustering: what it says of a vector, and that it comes back from the store as it was."""

from typing import Any

import msgspec
import numpy as np
import pytest

from quantdrift.core.clusters import (
    Clustering,
    cluster_slice,
    dump_clustering,
    load_clustering,
    novel_input,
    novel_value,
    space_of,
)
from quantdrift.core.config.schema import Config, Model, Slice
from quantdrift.core.errors import OperatorError
from tests.support.monitor.clusterings import CLUSTERING

pytestmark = pytest.mark.unit


def test_the_nearest_centroid_takes_a_vector_and_beyond_every_radius_it_is_novel() -> None:
    """After scaling: inside, on the border, nearest to the shared one, and far; inside a wide neighbour is not far."""
    scaled = np.array([[0, 0], [1, 0], [4, 0.5], [0, 1.5], [2, 2], [0, 5.5]])
    ids, novel = CLUSTERING.assign((scaled * 2 + [10, 20]).astype(np.float32))
    assert ids.tolist() == [4, 4, 0, -1, -1, 9]
    assert novel.tolist() == [False, False, False, True, True, False]


def test_a_vector_that_is_no_numbers_is_novel_unless_the_fit_met_such() -> None:
    """It is in no cluster either way."""
    vectors = np.array([[np.nan, 20], [np.inf, 20], [10, 20]], np.float32)
    for gaps, expected in ((False, [True, True, False]), (True, [False, False, False])):
        ids, novel = msgspec.structs.replace(CLUSTERING, gaps=gaps).assign(vectors)
        assert ids.tolist() == [-1, -1, 4]
        assert novel.tolist() == expected


def test_vectors_of_another_width_are_refused() -> None:
    """The caller must have asked for the width."""
    with pytest.raises(ValueError, match="2 numbers each"):
        CLUSTERING.assign(np.zeros((3, 5), np.float32))


def test_only_a_value_that_is_there_and_was_never_met_is_unseen() -> None:
    """An absent attribute and one whose values are not known are none."""
    assert CLUSTERING.unseen({"header.x-scanner": "c", "header.x-request-id": "q"}) == ["header.x-scanner"]
    assert CLUSTERING.unseen({"header.x-scanner": "a"}) == []
    assert CLUSTERING.unseen({}) == []


def test_slices_have_a_readable_predicate_of_their_own() -> None:
    """Each is told apart by its text, also where a rule is called `input`."""
    keys = [
        cluster_slice("m", 7),
        cluster_slice("m", 0),
        novel_input("m"),
        novel_value("m", "input", "header.x-input"),
    ]
    assert [key.name for key in keys] == ["cluster=7", "cluster=(other)", "novel=input", "novel=input"]
    assert [key.predicate for key in keys] == [
        "cluster 7",
        "cluster is any other",
        "novel",
        "novel header.x-input",
    ]


def test_the_binary_form_gives_the_same_clustering() -> None:
    """Every field, bit for bit."""
    again = load_clustering(dump_clustering(CLUSTERING))
    for name in Clustering.__struct_fields__:
        before, after = getattr(CLUSTERING, name), getattr(again, name)
        if name == "former":
            assert before.ids == after.ids
            before, after = before.centres, after.centres
        np.testing.assert_array_equal(before, after)
    assert dump_clustering(again) == dump_clustering(CLUSTERING)


def _cut(blob: bytes) -> bytes:
    return blob[:-1]


def _flipped(blob: bytes) -> bytes:
    return blob[:40] + bytes([blob[40] ^ 1]) + blob[41:]


def _newer(blob: bytes) -> bytes:
    return blob[:2] + bytes([blob[2] + 1]) + blob[3:]


def _misfit(_: bytes) -> bytes:
    return dump_clustering(msgspec.structs.replace(CLUSTERING, ids=(1, 2)))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_cut, "checksum"),
        (_flipped, "checksum"),
        (_newer, "format 2, but this release reads format 1"),
        (_misfit, "damaged"),
        (lambda _: b"QD", "no header"),
    ],
)
def test_what_is_damaged_or_newer_is_refused_by_name(harm: Any, said: str) -> None:
    """Never a guess."""
    with pytest.raises(OperatorError, match=said):
        load_clustering(harm(dump_clustering(CLUSTERING)))


def test_the_space_follows_the_configuration() -> None:
    """Other features are another space; switched off there is none."""
    rules = (
        Slice(name="n", feature="norm", edges=(1.0,)),
        Slice(name="a", feature="mean", input="x", edges=(1.0,)),
        Slice(name="o", model="other", feature="rank", edges=(1.0,)),
        Slice(name="s", header="x-scanner"),
    )
    model = Model(name="m", embedding="features")
    columns = ("feature.mean(x)", "feature.norm")
    assert space_of(Config(slices=rules), model) == ("features feature.mean(x), feature.norm", columns)
    assert space_of(Config(slices=rules), Model(name="m", embedding="pool")) == ("pool", ())
    assert space_of(Config(), Model(name="m")) == ("", ())
