"""A client that floods a sidecar which lets little leave."""

import json
import secrets
import socket
import threading
from typing import Self

from tests.support.sidecar.raw_exchanges import REQUEST, RESPONSE
from tests.support.sidecar.relay_process import SidecarProcess
from tests.support.sidecar.relay_rig import answer, post

CAP = 20.0
_ASK = json.dumps(REQUEST).encode()
REPLY = json.dumps(RESPONSE).encode()


class Flood:
    """A client that asks as fast as it is answered."""

    def __init__(self, running: SidecarProcess) -> None:
        self._running = running
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.n_asked = 0
        self.n_wrong = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        request, expected = post(_ASK, fields=b"X-Scanner: faint\r\n"), answer(REPLY)
        with self._running.connect() as client:
            while not self._stop.is_set():
                client.sendall(request)
                self.n_wrong += client.recv(len(expected), socket.MSG_WAITALL) != expected
                self.n_asked += 1


def capped(nats_url: str) -> dict[str, object]:
    """Return the options of a sidecar that takes everything of one stratum, and lets little of it leave."""
    return {
        "SAMPLING__RATE": 0,
        "SAMPLING__HEADER_STRATA": '[{"name": "faint", "rate": 1.0, "headers": {"x-scanner": "faint"}}]',
        "SAMPLING__MAX_EXCHANGES_PER_S": CAP,
        "STREAM__URL": nats_url,
        "STREAM__NAME": f"t-{secrets.token_hex(6)}",
        "MODELS": '[{"name": "digits"}]',
    }
