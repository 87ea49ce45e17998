"""The comparator of raw outputs, against closed forms, numpy, SciPy and torch."""

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.spatial.distance import cosine

from quantdrift.core.config.tasks import RawTensor
from quantdrift.core.errors import QuarantineError
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.comparators.tensor import TensorComparator, steps_apart
from quantdrift.shadow.replay.rows import items_of

PAIR = arrays(
    np.float64,
    st.tuples(st.just(2), st.integers(1, 4), st.integers(1, 6)),
    elements=st.floats(allow_nan=False, allow_infinity=False),
)


def _compared(candidate: Any, reference: Any, **options: Any) -> Divergences:
    sides = ({"y": np.asarray(side)} for side in (candidate, reference))
    return TensorComparator(RawTensor(**options)).compare(*sides)


@pytest.mark.unit
def test_figures_are_those_of_numpy_and_scipy() -> None:
    """Relative error and SQNR by their definitions, cosine and the largest error by the libraries'."""
    reference = np.random.default_rng(1).normal(size=(10, 3, 4)).astype(np.float32)
    candidate = reference + np.random.default_rng(2).normal(scale=0.02, size=reference.shape).astype(
        np.float32
    )
    found = _compared(candidate, reference)
    for item, (q, p) in enumerate(zip(candidate.astype(float), reference.astype(float), strict=True)):
        noise, signal = np.mean((q - p) ** 2), np.mean(p**2)
        assert found.divergence[item] == pytest.approx(np.sqrt(noise / signal))
        assert found.detail["sqnr_db"][item] == pytest.approx(10 * np.log10(signal / noise))
        assert found.detail["cosine_distance"][item] == pytest.approx(cosine(q.ravel(), p.ravel()))
        assert found.detail["max_absolute_error"][item] == np.abs(q - p).max()
    assert found.flip.tolist() == [0.0] * 10


@pytest.mark.unit
def test_a_scale_has_its_closed_form() -> None:
    """A tenth more of everything is 20 dB, and the same direction."""
    found = _compared([[1.1, 2.2, -3.3]], [[1.0, 2.0, -3.0]])
    assert found.divergence[0] == pytest.approx(0.1)
    assert found.detail["sqnr_db"][0] == pytest.approx(20)
    assert found.detail["cosine_distance"][0] == pytest.approx(0, abs=1e-15)
    assert found.flip[0] == 1


@pytest.mark.unit
@pytest.mark.parametrize(
    ("name", "numpy_type"), [("FP16", np.float16), ("FP32", np.float32), ("FP64", np.float64)]
)
def test_a_step_is_what_nextafter_says(name: str, numpy_type: Any) -> None:
    """One for a neighbour at every size and sign; across zero the steps add up; from 1 to 2 there are 2^bits."""
    values = np.array([1.0, -1.0, 1000.0, 2.0**-14, -(2.0**-16), 0.0], dtype=numpy_type)
    above = np.nextafter(values, numpy_type(np.inf))
    np.testing.assert_array_equal(steps_apart(values, above, name), 1)
    below = np.nextafter(np.zeros(1, numpy_type), numpy_type(-1))
    np.testing.assert_array_equal(steps_apart(-below, below, name), 2)
    np.testing.assert_array_equal(steps_apart(np.array([0.0]), np.array([-0.0]), name), 0)
    bits = np.finfo(numpy_type).nmant
    assert steps_apart(np.array([1.0]), np.array([2.0]), name).tolist() == [2.0**bits]


@pytest.mark.integration
def test_steps_of_bfloat16_are_torchs() -> None:
    """Rounded as torch rounds, and as many apart as its bits."""
    import torch

    values = np.random.default_rng(3).normal(size=2000).astype(np.float32) * 100
    values[:3] = [1.00390625, 1.01171875, -1.00390625]  # half way: ties go to even
    rounded = torch.from_numpy(values).to(torch.bfloat16)
    np.testing.assert_array_equal(steps_apart(values, rounded.to(torch.float64).numpy(), "BF16"), 0)
    bits = rounded.view(torch.int16).numpy()
    above = torch.from_numpy(bits + np.int16(1)).view(torch.bfloat16).to(torch.float64).numpy()
    np.testing.assert_array_equal(steps_apart(values, above, "BF16"), 1)


@pytest.mark.unit
def test_rounding_to_the_candidates_type_is_no_error_in_its_steps() -> None:
    """FP16 of an FP32 reference; sent as FP32, it must be told."""
    reference = np.random.default_rng(4).normal(size=(5, 8)).astype(np.float32)
    candidate = reference.astype(np.float16)
    assert _compared(candidate, reference).detail["max_ulp_error"].tolist() == [0] * 5
    sent = candidate.astype(np.float32)
    assert _compared(sent, reference).detail["max_ulp_error"].min() > 100
    assert _compared(sent, reference, element_type="FP16").detail["max_ulp_error"].tolist() == [0] * 5


@pytest.mark.unit
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_an_outcome_and_counted(bad: float) -> None:
    """Of the candidate a flip, of the reference nothing; neighbours are untouched."""
    found = _compared([[bad, bad], [1, 2], [1, 2]], [[1.0, 2], [bad, 1], [1, 2]])
    np.testing.assert_array_equal(found.flip, [1, np.nan, 0])
    np.testing.assert_array_equal(found.divergence, [np.nan, np.nan, 0])
    kind = "nan" if np.isnan(bad) else "infinite"
    assert found.detail[f"candidate_{kind}"].tolist() == [2, None, None]
    assert found.detail[f"reference_{kind}"].tolist() == [None, 1, None]
    assert np.isnan(found.detail["max_absolute_error"]).tolist() == [True, True, False]


@pytest.mark.unit
def test_a_mask_on_both_sides_is_no_difference() -> None:
    """Minus infinity at the same place; beside it numbers are compared."""
    found = _compared([[-np.inf, 1.1], [1.0, -np.inf]], [[-np.inf, 1.0], [-np.inf, 1.0]])
    assert found.divergence[0] == pytest.approx(0.1)
    assert found.detail["candidate_infinite"].tolist() == [1, 1]
    assert (found.candidate_finite.tolist(), found.reference_finite.tolist()) == (
        [True, False],
        [True, False],
    )


@pytest.mark.unit
def test_a_reference_of_zeros_has_no_scale() -> None:
    """Whatever differs from it is infinitely far, and what is equal is not."""
    found = _compared([[0.0, 1e-9], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]])
    assert found.divergence.tolist() == [np.inf, 0]
    assert found.flip.tolist() == [1, 0]


@pytest.mark.unit
def test_integers_are_compared_exactly() -> None:
    """Identifiers beyond 2^53, signed and unsigned; truth values and smaller ones are numbers."""
    for kind, large in ((np.int64, 2**62), (np.uint64, 2**63 + 1)):
        ids = np.array([[large, 1]], dtype=kind)
        found = _compared(ids + np.array([[1, 0]], dtype=kind), ids)  # the same number in float64
        assert found.detail["max_absolute_error"].tolist() == [1]
        assert found.divergence[0] > 0
        assert "max_ulp_error" not in found.detail or np.isnan(found.detail["max_ulp_error"]).all()
    wide = np.array([[-(2**63), 0]]), np.array([[2**63 - 1, 0]])
    assert _compared(*wide).detail["max_absolute_error"].tolist() == [2.0**64]
    assert _compared([[True, False]], [[True, True]]).divergence.tolist() == [pytest.approx(1 / np.sqrt(2))]
    assert _compared(np.array([[250]], np.uint8), np.array([[1]], np.uint8)).divergence.tolist() == [249]


@pytest.mark.unit
def test_texts_are_equal_or_not() -> None:
    """As bytes or as a runtime gives them."""
    candidate = np.array([[b"a", "ü".encode()], [b"a", b"b"]], dtype=object)
    reference = np.array([["a", "ü"], ["a", "c"]], dtype=object)
    found = _compared(candidate, reference)
    assert (found.flip.tolist(), found.divergence.tolist()) == ([0, 1], [0, 1])
    with pytest.raises(QuarantineError, match="texts"):
        _compared(candidate, np.ones((2, 2)))


@pytest.mark.unit
def test_of_several_outputs_the_worst_counts() -> None:
    """Each is told; one that is not finite spoils the item."""
    comparator = TensorComparator(RawTensor(outputs=("a", "b")))
    assert comparator.outputs == ("a", "b")
    reference = {"a": np.array([[1.0], [1.0]]), "b": np.array([[10.0], [10.0]])}
    candidate = {"a": np.array([[1.01], [1.0]]), "b": np.array([[12.0], [np.nan]])}
    found = comparator.compare(candidate, reference)
    np.testing.assert_allclose(found.divergence, [0.2, np.nan])
    assert found.flip.tolist() == [1, 1]
    assert found.detail["by_output"][0] == {"a": pytest.approx(0.01), "b": pytest.approx(0.2)}
    assert found.detail["by_output"][1] is None
    assert found.detail["candidate_nan"].tolist() == [None, 1]
    reference["a"][0] = 0  # against which any error is infinite, which JSON cannot say
    found = comparator.compare(candidate, reference)
    assert found.divergence[0] == np.inf
    assert found.detail["by_output"][0] == {"b": pytest.approx(0.2)}


@pytest.mark.unit
def test_the_record_holds_what_is_defined() -> None:
    """As JSON that Postgres takes: an equal output has no SQNR, and counts only what there is."""
    found = _compared([[1.0, 2.0], [np.nan, 2.0]], [[1.0, 2.0], [1.0, 2.0]])
    details = [
        json.loads(one.detail or "")
        for one in items_of(found, slices=[(), ()], features=[{}, {}], clusterings=[0, 0])
    ]
    assert details[0] == {"cosine_distance": 0, "max_absolute_error": 0, "max_ulp_error": 0}
    assert details[1] == {"candidate_nan": 1, "candidate_not_finite": True}


@pytest.mark.unit
def test_an_empty_answer_is_an_outcome() -> None:
    """Of the candidate a flip, also where texts were due; other shapes are refused."""
    assert _compared(np.empty((2, 0)), np.ones((2, 3))).flip.tolist() == [1, 1]
    assert _compared(np.empty((1, 0), object), np.array([["a"]], object)).flip.tolist() == [1]
    assert not _compared(np.ones((1, 3)), np.empty((1, 0))).reference_finite.any()
    with pytest.raises(QuarantineError, match=r"float64\[1, 2\].*float64\[1, 3\]"):
        _compared(np.ones((1, 2)), np.ones((1, 3)))


@pytest.mark.slow
@pytest.mark.unit
@given(PAIR)
def test_every_figure_stays_in_its_range(pair: npt.NDArray[np.float64]) -> None:
    """Errors are not negative however large the values; steps and absolute errors are symmetric; equal is 0."""
    there, back = _compared(pair[0], pair[1]), _compared(pair[1], pair[0])
    assert np.all(there.divergence >= 0)
    for name in ("max_absolute_error", "max_ulp_error", "cosine_distance"):
        np.testing.assert_array_equal(there.detail[name], back.detail[name])
    turn = there.detail["cosine_distance"]
    assert np.all(np.isnan(turn) | ((turn >= 0) & (turn <= 2)))
    same = _compared(pair[0], pair[0])
    assert not same.divergence.any()
    assert not same.flip.any()
