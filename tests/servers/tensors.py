"""What the tests send to real servers, and how the record holds it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantdrift.core.records import Tensor

X = np.random.default_rng(4).random((3, 4), dtype=np.float32)
TEXT = np.array([b"", "größe".encode(), b"\x00\xff", b"a" * 300], dtype=np.object_)
N_READABLE = 2  # so many of them are UTF-8 without control characters, and may come as JSON
TIMES = np.array([2], dtype=np.int32)


def tensor(name: str, datatype: str, values: NDArray[Any]) -> Tensor:
    """Return an array as the record holds it; texts are an array of bytes or str objects."""
    if datatype == "BYTES":
        texts = [text if isinstance(text, bytes) else text.encode() for text in values.ravel().tolist()]
        data = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    else:
        data = np.ascontiguousarray(values).tobytes()
    return Tensor(name=name, datatype=datatype, shape=values.shape, data=data)


def texts(held: Tensor) -> list[str]:
    """Return the elements of a tensor of UTF-8 texts, flat."""
    found, rest = [], held.data
    while rest:
        end = 4 + int.from_bytes(rest[:4], "little")
        found.append(rest[4:end].decode())
        rest = rest[end:]
    return found
