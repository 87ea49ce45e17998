"""Pictures of inputs on the page: what is an image, and what is drawn of it."""

import re
from datetime import UTC, datetime

import msgspec
import numpy as np
import pytest

from quantdrift.core.records import Exemplar, ExemplarItem, ExemplarKind, Tensor
from quantdrift.show.page.pictures import pictures
from tests.support.shadow.onnx_models import exchange_of, inputs_of

pytestmark = pytest.mark.unit


def _exemplar(array: np.ndarray, *, datatype: str = "FP32", item: int = 0, cut: int = 0) -> Exemplar:
    data = array.tobytes()
    tensor = Tensor(name="image", datatype=datatype, shape=array.shape, data=data[: len(data) - cut])
    return Exemplar(
        kind=ExemplarKind.DAMAGED,
        slice="all",
        exchange=msgspec.structs.replace(exchange_of(inputs_of(1)), inputs=(tensor,)),
        items=(ExemplarItem(index=item),),
        reference=(),
        reference_digest="",
        probability=None,
        compared_at=datetime(2026, 11, 28, tzinfo=UTC),
    )


def _cells(svg: str) -> list[tuple[int, int, int, str]]:
    """Return x, y, width and colour of each rectangle."""
    found = re.findall(r'<rect x="(\d+)" y="(\d+)" width="(\d+)" height="1" fill="#(...)"/>', svg)
    return [(int(x), int(y), int(width), colour) for x, y, width, colour in found]


def test_an_image_is_drawn_from_its_smallest_to_its_largest_number() -> None:
    """Black where it is smallest, white where it is largest; runs of one colour are one rectangle; the item that was kept is drawn."""
    images = np.zeros((2, 1, 8, 8), np.float32)
    images[1, 0, 3, 2:6] = 5.0
    (picture,) = pictures([_exemplar(images, item=1)])
    rows = [cell for cell in _cells(picture.svg) if cell[1] == 3]
    assert rows == [(0, 3, 2, "000"), (2, 3, 4, "fff"), (6, 3, 2, "000")]
    assert [cell for cell in _cells(picture.svg) if cell[1] == 4] == [(0, 4, 8, "000")]


def test_a_large_image_becomes_small_and_keeps_its_colours() -> None:
    """Channels last or first, of bytes: at most 32 cells a side, each the mean of its part."""
    image = np.zeros((1, 96, 64, 3), np.uint8)
    image[0, :, :32, 0] = 255
    for array in (image, np.moveaxis(image, 3, 1).copy()):
        (picture,) = pictures([_exemplar(array, datatype="UINT8")])
        assert _cells(picture.svg)[:2] == [(0, 0, 16, "f00"), (16, 0, 16, "000")]
        assert 'viewBox="0 0 32 32"' in picture.svg


@pytest.mark.parametrize(
    "exemplar",
    [
        _exemplar(np.zeros((1, 64), np.float32)),  # a vector
        _exemplar(np.zeros((1, 4, 4), np.float32)),  # too small for a picture
        _exemplar(np.zeros((1, 5, 16, 16), np.float32)),  # five channels
        _exemplar(np.zeros((1, 8, 8), np.float32), item=1),  # an item that is not there
        _exemplar(np.zeros((1, 8, 8), np.float32), cut=4),  # too few bytes
        _exemplar(np.full((1, 8, 8), np.nan, np.float32)),
        _exemplar(np.zeros((1, 8, 8), bool), datatype="BOOL"),
        _exemplar(np.zeros((1, 8, 9000), np.uint8), datatype="UINT8"),
    ],
)
def test_what_is_no_image_is_not_drawn(exemplar: Exemplar) -> None:
    """Nor what its bytes do not hold: exchanges come from clients."""
    assert pictures([exemplar]) == []


def test_one_picture_of_each_exchange_and_few_in_all() -> None:
    """The first ones, in the order that they have."""
    image = np.eye(8, dtype=np.float32)[np.newaxis]
    many = [_exemplar(image)] * 9
    other = [
        msgspec.structs.replace(one, exchange=msgspec.structs.replace(one.exchange, id=f"{n:032x}"))
        for n, one in enumerate(many)
    ]
    assert len(pictures(many)) == 1
    assert [one.exchange_id for one in pictures(other)] == [f"{n:032x}" for n in range(6)]
