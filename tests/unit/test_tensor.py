"""Wire tensors as arrays."""

import struct

import numpy as np
import pytest

from quantdrift.core.errors import QuarantineError
from quantdrift.core.records import Tensor
from quantdrift.models.tensors.arrays import TensorSpec
from quantdrift.models.tensors.codec import decode, fit_inputs
from tests.support.shadow.onnx_models import tensor

pytestmark = pytest.mark.unit

FLOAT = TensorSpec(name="x", dtype=np.dtype(np.float32), shape=(None, 2))
TEXT = TensorSpec(name="t", dtype=np.dtype(object), shape=(None,))


def _texts(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


@pytest.mark.parametrize(
    ("datatype", "dtype"),
    [
        ("BOOL", np.bool_),
        ("UINT8", np.uint8),
        ("INT16", np.int16),
        ("UINT32", np.uint32),
        ("INT64", np.int64),
        ("FP16", np.float16),
        ("FP32", np.float32),
        ("FP64", np.float64),
    ],
)
def test_elements_come_back(datatype: str, dtype: type[np.generic]) -> None:
    """Every datatype is decoded to its own type and shape."""
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    decoded = decode(tensor("x", array, datatype))
    assert decoded.dtype == array.dtype
    np.testing.assert_array_equal(decoded, array)


@pytest.mark.parametrize(
    ("datatype", "shape"),
    [("BYTES", (10**15,)), ("FP32", (0, 10**30)), ("BYTES", (0, 10**30)), ("FP32", (0,) + 70 * (1,))],
)
def test_shapes_that_no_array_can_have_are_refused(datatype: str, shape: tuple[int, ...]) -> None:
    """What a client writes as a shape asks for no memory and raises nothing but the reason for a quarantine."""
    with pytest.raises(QuarantineError, match="schema"):
        decode(Tensor(name="x", datatype=datatype, shape=shape, data=b""))


def test_bfloat16_is_widened_exactly() -> None:
    """BF16 is the upper half of a float32."""
    values = np.array([1.5, -2.0, 3.140625], np.float32)
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    decoded = decode(Tensor(name="x", datatype="BF16", shape=(3,), data=halves.tobytes()))
    assert decoded.tolist() == values.tolist()


def test_text_is_decoded_by_lengths() -> None:
    """BYTES elements become bytes, empty ones too; a cut or surplus element is refused."""
    good = Tensor(name="t", datatype="BYTES", shape=(2, 1), data=_texts(b"", "ü".encode()))
    assert decode(good).tolist() == [[b""], ["ü".encode()]]
    for data in (_texts(b"ab")[:-1], b"\0\0", _texts(b"a", b"b", b"c")):
        with pytest.raises(QuarantineError, match="schema"):
            decode(Tensor(name="t", datatype="BYTES", shape=(2, 1), data=data))


@pytest.mark.parametrize(
    ("changed", "hint"),
    [
        (Tensor(name="x", datatype="FP32", shape=(1, 2), data=b"\0" * 7), "holds 7 bytes"),
        (Tensor(name="x", datatype="FP24", shape=(1, 2), data=b""), "a datatype that is not known"),
        (Tensor(name="x", datatype="FP32", shape=(-1, 2), data=b""), "negative"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(changed: Tensor, hint: str) -> None:
    """Size and datatype are checked before anything is read."""
    with pytest.raises(QuarantineError, match=hint):
        decode(changed)


def test_floats_are_cast_up_and_nothing_else_is_cast() -> None:
    """FP16 and BF16 become the reference's FP32; FP64 and integers are refused, naming both sides."""
    half = fit_inputs([tensor("x", np.ones((3, 2), np.float16), "FP16")], [FLOAT], batched=True)
    assert half["x"].dtype == np.float32
    for array, datatype in ((np.ones((3, 2)), "FP64"), (np.ones((3, 2), np.int32), "INT32")):
        with pytest.raises(QuarantineError, match=rf"{datatype}\[3, 2\].*float32\[\?, 2\]"):
            fit_inputs([tensor("x", array, datatype)], [FLOAT], batched=True)


def test_names_and_shapes_must_fit() -> None:
    """Other names, ranks and trailing dimensions, items that differ in number, and no items at all are refused."""
    two = TensorSpec(name="z", dtype=np.dtype(np.float32), shape=(None,))
    ones = np.ones((3, 2), np.float32)
    for tensors, specs, hint in (
        ([tensor("y", ones)], [FLOAT], r"\['y'\].*\['x'\]"),
        ([tensor("x", ones[:, :1])], [FLOAT], r"FP32\[3, 1\]"),
        ([tensor("x", ones[0])], [FLOAT], r"FP32\[2\]"),
        ([tensor("x", ones), tensor("z", ones[:2, 0].copy())], [FLOAT, two], "first dimension"),
        ([tensor("x", ones[:0])], [FLOAT], "holds 0"),
    ):
        with pytest.raises(QuarantineError, match=hint):
            fit_inputs(tensors, specs, batched=True)


def test_a_fixed_number_of_items_does_not_bind_the_exchange() -> None:
    """A reference exported with one item takes exchanges of any number of them."""
    fixed = TensorSpec(name="x", dtype=np.dtype(np.float32), shape=(1, 2))
    assert fit_inputs([tensor("x", np.ones((3, 2), np.float32))], [fixed], batched=True)["x"].shape == (3, 2)


def test_an_exchange_of_a_model_without_batches_is_one_item() -> None:
    """Its inputs get a first dimension of one; text becomes text."""
    specs = [TensorSpec(name="x", dtype=np.dtype(np.float32), shape=(None,)), TEXT]
    text = Tensor(name="t", datatype="BYTES", shape=(1,), data=_texts("ü".encode()))
    inputs = fit_inputs([tensor("x", np.ones(5, np.float32)), text], specs, batched=False)
    assert inputs["x"].shape == (1, 5)
    assert inputs["t"].tolist() == [["ü"]]
