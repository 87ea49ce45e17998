"""The requests of the storm and their exact answers: both are functions of one name, so that every byte can be checked."""

import re
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from examples import tiny

MODEL: Final = "storm"
VERSION: Final = "int8-1"
OUTPUT: Final = "logits"
SCANNERS: Final = ("archive", "office", "lab")
DRIFTING: Final = SCANNERS[0]
LENGTH: Final = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
N_ITEMS: Final = 64
_N_CLASSES: Final = 5
_NOISE: Final = 0.01


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Parameters
    ----------
    number
        Of the request, from 0: no two have the same.
    item
        Index of its input.
    scanner
        Value of the header that the slices are made from.
    flips
        Whether the candidate's answer has another top class than the reference's.
    """

    number: int
    item: int
    scanner: str
    flips: bool

    @property
    def id(self) -> str:
        """The name that the request carries, and that its answer repeats."""
        return f"{self.number:010d}-{self.item:02d}-{int(self.flips)}"


class Exchanges:
    """Makes requests and answers; every instance makes the same ones."""

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        weight = rng.normal(size=(tiny.N_FEATURES, _N_CLASSES)).astype(np.float32)  # as `tiny.write` draws it
        items = np.random.default_rng(1).normal(size=(N_ITEMS, tiny.N_FEATURES)).astype(np.float32)
        logits = items @ weight
        logits += _NOISE * np.random.default_rng(2).normal(size=logits.shape).astype(np.float32)
        self._inputs = [msgspec.json.encode(item.tolist()).decode() for item in items]
        self._outputs = [
            tuple(msgspec.json.encode(one.tolist()).decode() for one in (row, _flipped(row)))
            for row in logits
        ]

    def request(self, asked: Asked) -> bytes:
        """Return a request as it is sent."""
        body = (
            f'{{"id":"{asked.id}","inputs":[{{"name":"features","datatype":"FP32",'
            f'"shape":[1,{tiny.N_FEATURES}],"data":{self._inputs[asked.item]}}}]}}'
        )
        head = (
            f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nhost: storm\r\ncontent-type: application/json\r\n"
            f"x-scanner: {asked.scanner}\r\nx-request-id: {asked.id}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return (head + body).encode()

    def answer(self, name: str) -> bytes:
        """Return the answer to the request with the id `name`."""
        _, item, flips = name.split("-")
        body = (
            f'{{"model_name":"{MODEL}","model_version":"{VERSION}","id":"{name}","outputs":[{{"name":"{OUTPUT}",'
            f'"datatype":"FP32","shape":[1,{_N_CLASSES}],"data":{self._outputs[int(item)][int(flips)]}}}]}}'
        )
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        return (head + body).encode()


def write_reference(directory: Path) -> Path:
    """Write the reference as an ONNX file, and return its path."""
    tiny.write(directory, {OUTPUT: _N_CLASSES})
    return directory / tiny.REFERENCE


def _flipped(
    row: "np.ndarray[tuple[int], np.dtype[np.float32]]",
) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """Return logits whose largest and second largest entry are exchanged."""
    second, first = np.argsort(row)[-2:]
    flipped = row.copy()
    flipped[[first, second]] = row[[second, first]]
    return flipped
