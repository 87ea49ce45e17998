"""Warnings about lost exchanges, unreadable or unpublished: at most one line a minute for each model and reason."""

import logging
from typing import Final

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.logs import of_model
from quantdrift.core.records import Loss

PERIOD_S: Final = 60.0
_MOST: Final = 256  # models and reasons; the model's name comes from a client
_ADVICE: Final = {
    Loss.DECODE: (
        "they cannot be read: with telemetry.log_level = debug a line for each says what is wrong; for TorchServe check"
        " models.adapter"
    ),
    Loss.PUBLISH: "NATS did not acknowledge them: check the server at stream.url",
    Loss.STREAM_FULL: "the stream is full: add shadow workers, lower the sampling rates or raise stream.max_bytes",
    Loss.TOO_LARGE: "they are above max_payload of the NATS server: raise it, or lower sidecar.max_exchange_bytes",
    Loss.QUEUE_FULL: "the queue to NATS is full because the server is slow or away: check the server at stream.url",
    Loss.NO_KEY: "they must be encrypted, and the key cannot be read: check the file stream.payload_key_file",
}
_LOG = logging.getLogger(__name__)


class _Line(msgspec.Struct):
    """What was lost since the last line, and when that was."""

    logged_s: float
    n: int = 0


class LossWarnings:
    """Logs lost exchanges. Losses by a configured limit are counted but not logged: somebody has asked for them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lines: dict[tuple[str, Loss], _Line] = {}

    def count(self, model: str, loss: Loss) -> None:
        """Note a lost exchange; log it, or with the next line of its model and reason."""
        advice = _ADVICE.get(loss)
        if advice is None:
            return
        now_s = self._clock.monotonic_s()
        key = (model, loss) if (model, loss) in self._lines or len(self._lines) < _MOST else ("", loss)
        line = self._lines.setdefault(key, _Line(logged_s=now_s - PERIOD_S))
        line.n += 1
        if now_s - line.logged_s >= PERIOD_S:
            _LOG.warning(
                "model %s: lost %d captured exchanges (%s): %s",
                key[0],
                line.n,
                loss.value,
                advice,
                extra=of_model(key[0]),
            )
            line.logged_s, line.n = now_s, 0

    def log_rest(self) -> None:
        """Log what was counted since the last lines, where a minute has passed since then."""
        now_s = self._clock.monotonic_s()
        for (model, loss), line in list(self._lines.items()):
            if now_s - line.logged_s < PERIOD_S:
                continue
            del self._lines[model, loss]
            if line.n:
                self._lines[model, loss] = _Line(logged_s=now_s - PERIOD_S, n=line.n - 1)
                self.count(model, loss)
