"""Clients that send scans through the sidecar: Open Inference Protocol v2 over REST, JSON and binary in turn."""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from quantdrift.demo.model import INPUT, NAME
from quantdrift.demo.scans import Images, Labels, Scanner, Scans
from quantdrift.demo.services import SCANNER_HEADER

REQUEST_ID_HEADER = "x-request-id"
READER_HEADER = "x-reader"

_JSON_LENGTH = "Inference-Header-Content-Length"
_CLIENTS = 16
_MOST_PAGES = 3  # that one reader reads in a row, on one scanner: 1, 2 or 3, equally often
_BLOCK = 256  # scans drawn at a time
_BEHIND_S = 0.5  # a client that is later than this lets the rest go instead of sending a burst
_KEPT = 20_000  # served pages kept per scanner for the check against the true labels


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One scan that was read in production.

    Parameters
    ----------
    image
        (1, 8, 8), float32, as it was sent.
    label
        The digit that was written.
    answer
        The digit that the served model read.
    request_id
        Of its request.
    """

    image: Images
    label: int
    answer: int
    request_id: str


class DemoTraffic:
    """Sends scans at a Poisson rate until it is cancelled.

    Parameters
    ----------
    url
        Where the sidecar listens.
    scans
        Pages to draw from; every scan gets a shift and noise of its own.
    seed
        Of everything that is drawn.
    rate_per_s
        Requests per second, all clients together.
    archive_share
        Share of the requests that the archive's scanner sends; may be changed while running.

    Attributes
    ----------
    sent, failed
        Requests by scanner, and how many of them got no proper answer.
    """

    def __init__(self, url: str, scans: Scans, seed: int, *, rate_per_s: float, archive_share: float) -> None:
        self.archive_share = archive_share
        self.sent: Counter[Scanner] = Counter()
        self.failed: Counter[Scanner] = Counter()
        self._url = f"{url}/v2/models/{NAME}/infer"
        self._rate = rate_per_s
        self._random = random.Random(seed)
        self._source = _Source(scans, seed)
        self._readers = {scanner: _Readers(scanner, self._random) for scanner in Scanner}
        self._pages: dict[Scanner, deque[Page]] = {scanner: deque(maxlen=_KEPT) for scanner in Scanner}

    def served(self, scanner: Scanner) -> Sequence[Page]:
        """Return the pages of `scanner` that were answered, oldest first."""
        return tuple(self._pages[scanner])

    async def run(self) -> None:
        """Send until cancelled."""
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as clients:
            for _ in range(_CLIENTS):
                clients.create_task(self._client(session))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            due += self._random.expovariate(self._rate / _CLIENTS)
            if (wait_s := due - clock()) > 0:
                await asyncio.sleep(wait_s)
            elif wait_s < -_BEHIND_S:
                due = clock()
            await self._send(session, self._pick())

    def _pick(self) -> Scanner:
        if self._random.random() < self.archive_share:
            return Scanner.ARCHIVE
        return self._random.choice(_OTHERS)

    async def _send(self, session: aiohttp.ClientSession, scanner: Scanner) -> None:
        image, label = self._source.next(scanner)
        self.sent[scanner] += 1
        body, headers = encode(image, binary=sum(self.sent.values()) % 2 == 0)
        request_id = f"{self._random.getrandbits(128):032x}"
        headers |= {
            SCANNER_HEADER: scanner.value,
            REQUEST_ID_HEADER: request_id,
            READER_HEADER: self._readers[scanner].next(),
            "traceparent": f"00-{request_id}-{request_id[:16]}-01",
        }
        try:
            async with session.post(self._url, data=body, headers=headers) as response:
                payload = await response.read()
                if response.status != 200:
                    self.failed[scanner] += 1
                    return
                logits = decode(payload, response.headers)
        except (aiohttp.ClientError, TimeoutError):
            self.failed[scanner] += 1
            return
        self._pages[scanner].append(
            Page(image=image, label=label, answer=int(logits.argmax()), request_id=request_id)
        )


_OTHERS = [scanner for scanner in Scanner if scanner is not Scanner.ARCHIVE]


class _Readers:
    """People at one scanner, one after the other: each reads a few pages in a row and does not come back."""

    def __init__(self, scanner: Scanner, random_: random.Random) -> None:
        self._scanner, self._random = scanner, random_
        self._number, self._left = 0, 0

    def next(self) -> str:
        """Return who reads the next page."""
        if self._left == 0:
            self._number, self._left = self._number + 1, self._random.randint(1, _MOST_PAGES)
        self._left -= 1
        return f"{self._scanner.value}-reader-{self._number}"


class _Source:
    """Hands out scans one by one; draws them in blocks."""

    def __init__(self, scans: Scans, seed: int) -> None:
        self._scans, self._rng = scans, default_rng(seed)
        self._ready: dict[Scanner, list[tuple[Images, int]]] = {scanner: [] for scanner in Scanner}

    def next(self, scanner: Scanner) -> tuple[Images, int]:
        ready = self._ready[scanner]
        if not ready:
            images, labels = self._scans.draw(scanner, _BLOCK, self._rng)
            ready.extend(zip(images, labels.tolist(), strict=True))
        return ready.pop()


def encode(image: Images, *, binary: bool) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of a request for one scan.

    Parameters
    ----------
    image
        (1, 8, 8), float32.
    binary
        Send the tensor, and ask for the answer, by the binary tensor extension.
    """
    tensor: dict[str, Any] = {"name": INPUT, "datatype": "FP32", "shape": [1, *image.shape]}
    if not binary:
        tensor["data"] = image.ravel().tolist()
        return msgspec.json.encode({"inputs": [tensor]}), {"Content-Type": "application/json"}
    tensor["parameters"] = {"binary_data_size": image.nbytes}
    head = msgspec.json.encode({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    return head + image.astype("<f4").tobytes(), {
        "Content-Type": "application/octet-stream",
        _JSON_LENGTH: str(len(head)),
    }


def decode(payload: bytes, headers: Mapping[str, str]) -> NDArray[np.float32]:
    """Return the logits, (10,), of a response to one scan."""
    at = int(headers.get(_JSON_LENGTH, len(payload)))
    output = msgspec.json.decode(payload[:at])["outputs"][0]
    if "data" in output:
        return np.asarray(output["data"], dtype=np.float32)
    return np.frombuffer(payload[at:], dtype="<f4")


def stack(pages: Sequence[Page]) -> tuple[Images, Labels]:
    """Return the images, (n, 1, 8, 8), and the true labels, (n,), of `pages`."""
    images = np.stack([page.image for page in pages]) if pages else np.empty((0, 1, 8, 8), dtype=np.float32)
    return images, np.asarray([page.label for page in pages], dtype=np.int64)
