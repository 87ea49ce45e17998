"""Pictures of inputs that are images, from exemplars: shown only with `web.exemplars`, and small, since they say what a slice is like."""

from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from quantdrift.core.records import Exemplar, Tensor
from quantdrift.core.tensors import DTYPES

_LEAST_SIDE = 8
_MOST_SIDE = 4096
_SIDE = 32  # of a picture, in cells
_CHANNELS = (1, 3)
_LEVELS = 15.0  # of a channel: a digit of a colour
_MOST = 6
Image = npt.NDArray[np.float64]


class InputPicture(msgspec.Struct, frozen=True, kw_only=True):
    """A picture of one input.

    Parameters
    ----------
    exchange_id
        The exchange that it is of.
    svg
        Ready to show.
    """

    exchange_id: str
    svg: Markup


def pictures(exemplars: Iterable[Exemplar]) -> list[InputPicture]:
    """Return pictures of the first items of exemplars, in their order; none of inputs that are no images."""
    found: dict[str, InputPicture] = {}
    for exemplar in exemplars:
        if not exemplar.items or exemplar.exchange.id in found:
            continue
        images = (_image(tensor, exemplar.items[0].index) for tensor in exemplar.exchange.inputs)
        image = next((image for image in images if image is not None), None)
        if image is not None:
            identifier = exemplar.exchange.id
            found[identifier] = InputPicture(exchange_id=identifier, svg=_drawn(image))
        if len(found) == _MOST:
            break
    return list(found.values())


def _image(tensor: Tensor, item: int) -> Image | None:
    """Return an item of a tensor as an image : (height, width, channels); None: it has not the shape of one."""
    dtype, shape = DTYPES.get(tensor.datatype), tensor.shape[1:]
    if dtype is None or dtype.kind == "b" or not 0 <= item < (tensor.shape or (0,))[0]:
        return None
    width = int(np.prod(shape, dtype=np.int64)) if all(0 < size <= _MOST_SIDE for size in shape) else 0
    if not width or len(tensor.data) != tensor.shape[0] * width * dtype.itemsize:
        return None
    values = np.frombuffer(tensor.data, dtype, width, item * width * dtype.itemsize).astype(np.float64)
    array = values.reshape(shape)
    if array.ndim == 2:
        array = array[:, :, np.newaxis]
    elif array.ndim == 3 and array.shape[0] in _CHANNELS and array.shape[2] not in _CHANNELS:
        array = np.moveaxis(array, 0, 2)
    is_image = array.ndim == 3 and array.shape[2] in _CHANNELS and min(array.shape[:2]) >= _LEAST_SIDE
    return array if is_image and np.isfinite(array).all() else None


def _drawn(image: Image) -> Markup:
    """Return an image as SVG: from its smallest to its largest number, in cells of equal size. Neighbours of one colour are one rectangle."""
    height, width = (min(_SIDE, size) for size in image.shape[:2])
    rows, columns = (
        np.linspace(0, size, n, endpoint=False).astype(np.intp)
        for size, n in zip(image.shape[:2], (height, width), strict=True)
    )
    sums = np.add.reduceat(np.add.reduceat(image, rows, axis=0), columns, axis=1)
    n_rows, n_columns = (
        np.diff(np.append(begins, size))
        for begins, size in zip((rows, columns), image.shape[:2], strict=True)
    )
    small = sums / (n_rows[:, np.newaxis] * n_columns)[:, :, np.newaxis]
    low, high = float(small.min()), float(small.max())
    levels = np.rint((small - low) / ((high - low) or 1.0) * _LEVELS).astype(int)
    cells = []
    for row, of_row in enumerate(np.broadcast_to(levels, (height, width, 3)).tolist()):
        begin = 0
        for column in range(1, width + 1):
            if column == width or of_row[column] != of_row[begin]:
                colour = "".join(f"{level:x}" for level in of_row[begin])
                cells.append(
                    f'<rect x="{begin}" y="{row}" width="{column - begin}" height="1" fill="#{colour}"/>'
                )
                begin = column
    return Markup(  # noqa: S704 - numbers alone
        f'<svg class="input" viewBox="0 0 {width} {height}" width="128" height="{round(128 * height / width)}"'
        f' shape-rendering="crispEdges" role="img" aria-label="an input of this slice">{"".join(cells)}</svg>'
    )
