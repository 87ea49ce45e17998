"""JSON documents of bounded size, and their numbers as tensors."""

import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.core.records import Loss
from quantdrift.core.tensors import DTYPES
from quantdrift.sidecar.protocols.cost import limited
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.json_tensors import pack_values, read_json

pytestmark = pytest.mark.unit

NUMBERS = st.one_of(st.floats(), st.integers(-(2**80), 2**80))


@pytest.mark.slow
@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64"])
@given(values=st.lists(st.floats(), max_size=40) | st.lists(NUMBERS, max_size=40))
def test_numbers_become_what_numpy_makes_of_them(datatype: str, values: list[float]) -> None:
    """Whether they were written with a fraction, without, or both; whole where they are no numbers."""
    with np.errstate(over="ignore"):
        expected = np.array([float(value) for value in values], DTYPES[datatype])
    found = np.frombuffer(pack_values(values, datatype), DTYPES[datatype])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("n_values", [1, 15, 16, 65_535, 65_536])
def test_long_lists_are_read_like_short_ones(n_values: int) -> None:
    """Their lengths are told in one, three or five bytes on the way."""
    values = np.random.default_rng(n_values).standard_normal(n_values)
    assert pack_values(values.tolist(), "FP64") == values.tobytes()


@pytest.mark.parametrize("strange", ["text", True, {}, [1.0], [0.5] * 9])
def test_a_value_that_is_no_number_is_a_loss_at_any_depth(strange: Any) -> None:
    """Also where the first is one."""
    for values in ([strange, 0.5], [0.5, strange], [0.5, strange, 0.25]):
        with pytest.raises(LostError) as lost:
            pack_values(values, "FP32")
        assert lost.value.loss is Loss.DECODE


@pytest.mark.parametrize("document", [[0.5] * 100, [[]] * 100, [{}] * 100, {str(i): 1 for i in range(100)}])
def test_more_values_than_the_limit_are_refused(document: Any) -> None:
    """Before they are read."""
    part = json.dumps(document, separators=(",", ":")).encode()
    read_json(part, 300)
    with pytest.raises(LostError) as lost:
        read_json(part, 90)
    assert lost.value.loss is Loss.TOO_LARGE


def cost_s(part: bytes) -> float:
    """Return the least processor time of three readings."""
    found = []
    for _ in range(3):
        begun = time.thread_time()
        read_json(part, len(part))
        found.append(time.thread_time() - begun)
    return min(found)


@pytest.mark.parametrize(
    "number", ["1e308", "1.7976931348623157E+308", "4.9e-324", "2.2250738585072011e-308"]
)
def test_numbers_near_the_ends_of_the_range_take_about_as_long_as_others(number: str) -> None:
    """Two million of them held the capture process for 16 s, 400 times as long as others."""
    n = 20_000
    plain = "[" + ",".join(["0.12345678"] * n) + "]"
    extreme = "[" + ",".join([number] * n) + "]"
    assert read_json(extreme.encode(), 2 * n) == [float(number)] * n
    assert cost_s(extreme.encode()) < 80 * cost_s(plain.encode())


@pytest.mark.slow
@given(numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20), text=st.text())
def test_a_document_with_many_extreme_numbers_has_the_values_of_its_numbers(
    numbers: list[float], text: str
) -> None:
    """It takes another way through the parsers, with the same result."""
    values = [*numbers, *([1e308, -4.9e-324] * 600)]
    document = {"data": values, "text": text, "n": [2**70, True, None]}
    assert read_json(json.dumps(document).encode(), 10_000) == document


def test_an_exchange_that_has_used_up_its_processor_time_is_lost() -> None:
    """Before each document and each tensor, and only inside the limit."""
    for work in (lambda: read_json(b"[1]", 9), lambda: pack_values([1.0], "FP32")):
        work()
        with limited(-1.0), pytest.raises(LostError) as lost:
            work()
        assert lost.value.loss is Loss.TOO_COSTLY
