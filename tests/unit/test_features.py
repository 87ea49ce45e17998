"""Input features of items."""

import numpy as np
import pytest

from quantdrift.core.config.schema import Slice
from quantdrift.models.tensors.arrays import Array
from quantdrift.models.tensors.features import describing_features, features_of

pytestmark = pytest.mark.unit

NAMES = ("length", "rank", "size", "norm", "mean", "contrast", "missing")
RULES = [Slice(name=name, feature=name, edges=(1.0,)) for name in NAMES]


def test_features_are_those_of_each_item() -> None:
    """Each agrees with its definition, item by item."""
    array = np.random.default_rng(2).normal(size=(3, 4, 5)).astype(np.float32)
    for item, found in zip(array.astype(np.float64), features_of(RULES, {"x": array}), strict=True):
        expected = {
            "length": 4,
            "rank": 2,
            "size": 20,
            "norm": np.linalg.norm(item),
            "mean": item.mean(),
            "contrast": item.std(),
            "missing": 0,
        }
        assert found == pytest.approx({f"feature.{name}": value for name, value in expected.items()})


def test_what_is_missing_is_left_out() -> None:
    """Not a number counts as missing and enters nothing else; an item of nothing else has only its shape."""
    array = np.array([[3.0, np.nan, 4.0, np.nan], [np.nan] * 4, [np.inf, 1, 1, 1]], np.float32)
    some, none, infinite = features_of(RULES, {"x": array})
    assert (some["feature.missing"], some["feature.norm"], some["feature.mean"]) == (0.5, 5.0, 3.5)
    assert some["feature.contrast"] == 0.5
    assert set(none) == {"feature.length", "feature.rank", "feature.size", "feature.missing"}
    assert set(infinite) == set(none)


def test_an_input_is_chosen_by_name_or_is_the_first() -> None:
    """The key says which; an input that is not there gives no feature."""
    rules = [
        Slice(name="a", feature="mean", edges=(1.0,)),
        Slice(name="b", feature="mean", input="y", edges=(1.0,)),
        Slice(name="c", feature="mean", input="z", edges=(1.0,)),
        Slice(name="d", header="x-scanner"),
    ]
    inputs: dict[str, Array] = {"x": np.ones((1, 2), np.float32), "y": np.full((1, 2), 7, np.uint8)}
    assert features_of(rules, inputs) == [{"feature.mean": 1.0, "feature.mean(y)": 7.0}]


def test_the_value_of_a_column_is_that_number_of_each_item() -> None:
    """By the place in the item, whatever its dimensions; what is missing, beyond the last column or text gives none."""
    rules = [Slice(name=f"c{column}", feature="value", column=column, edges=(1.0,)) for column in (0, 3, 9)]
    rules.append(Slice(name="named", feature="value", column=1, input="t", edges=(1.0,)))
    table = np.array([[1.0, 2, 3, 4], [np.nan, 6, 7, 8]], np.float32)
    texts = np.array([["a", "b"], ["c", "d"]], dtype=object)
    expected = [{"feature.value[0]": 1.0, "feature.value[3]": 4.0}, {"feature.value[3]": 8.0}]
    assert features_of(rules, {"x": table, "t": texts}) == expected
    assert features_of(rules[:2], {"x": table.reshape(2, 2, 2)}) == expected
    assert features_of(rules[3:], {"t": table}) == [
        {"feature.value[1](t)": 2.0},
        {"feature.value[1](t)": 6.0},
    ]


def test_a_missing_number_of_a_column_is_one_and_another_is_zero() -> None:
    """Text has no missing numbers."""
    rules = [Slice(name="savings", feature="missing", column=1, edges=(0.5,))]
    table = np.array([[1.0, 2], [np.nan, np.nan]], np.float32)
    assert features_of(rules, {"x": table}) == [{"feature.missing[1]": 0.0}, {"feature.missing[1]": 1.0}]
    assert features_of(rules, {"x": np.array([["a", "b"]], dtype=object)}) == [{}]


def test_the_length_of_text_is_its_characters() -> None:
    """Text has a length and a shape, and no numbers."""
    texts = np.array([["ab", "cde"], ["", "ü"]], dtype=object)
    found = features_of(RULES, {"t": texts})
    assert [item["feature.length"] for item in found] == [5, 1]
    assert set(found[0]) == {"feature.length", "feature.rank", "feature.size"}


def test_scalars_are_items_too() -> None:
    """An item without dimensions has length and size 1."""
    (found,) = features_of(RULES, {"x": np.array([2.0], np.float32)})
    assert (found["feature.length"], found["feature.rank"], found["feature.size"]) == (1, 0, 1)
    assert found["feature.norm"] == 2.0


def test_what_describes_a_cluster_says_no_single_number() -> None:
    """Of images mean, contrast and shares, of texts the length; of fewer than sixteen numbers the length alone."""
    image = np.zeros((2, 4, 5), np.float32)
    image[1, 0] = 1.0
    inputs: dict[str, Array] = {
        "image": image,
        "age": np.array([[41.0], [77.0]], np.float32),
        "text": np.array([["ab"], ["abc"]], dtype=object),
    }
    assert describing_features(inputs, 1) == pytest.approx(
        {
            "input.length(image)": 4,
            "input.mean(image)": 0.25,
            "input.contrast(image)": np.sqrt(0.1875),
            "input.missing(image)": 0,
            "input.zeros(image)": 0.75,
            "input.length(age)": 1,
            "input.length(text)": 3,
        }
    )
    assert describing_features({"threshold": np.array(0.5, np.float32), "once": image[:1]}, 1) == {}
    many = {f"x{number}": image for number in range(9)}
    assert {key.rpartition("(")[2] for key in describing_features(many, 0)} == {"x0)", "x1)", "x2)", "x3)"}


def test_objects_that_are_no_texts_have_no_describing_features() -> None:
    """What a language model is asked is neither a number nor a text; of many texts in an item the length is told, and no mean."""
    asked = np.array([object()], dtype=object)
    texts = np.array([["abc"] * 20], dtype=object)
    assert describing_features({"asked": asked}, 0) == {}
    assert list(describing_features({"texts": texts}, 0).values()) == [60.0]
