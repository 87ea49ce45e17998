"""What became of exchanges that were not compared: the meaning of each reason for a loss, a quarantine or a skip."""

from datetime import timedelta
from types import MappingProxyType
from typing import Final

from quantdrift.core.notation import duration, number

REASONS: Final = MappingProxyType(
    {
        "held_bytes": "the relay's memory bound was reached",
        "truncated": "the connection was closed in the middle of the exchange",
        "framing": "the byte stream of its connection could not be parsed any more",
        "observer_error": "the observer of its connection stopped after an error",
        "capture_down": "the capture process was down",
        "capture_behind": "the capture process did not keep up",
        "error_status": "the candidate answered with an error; no loss for verdicts",
        "client_abort": "the client left before the answer was complete; no loss for verdicts",
        "unknown_model": "the model is not in the configuration",
        "decode": "the message does not follow its protocol",
        "shared_memory": "the tensors were in shared memory, not on the wire",
        "sequence": "part of a stateful sequence",
        "too_large": "larger than the stream's payload limit",
        "rate_cap": "the sidecar's limit on exchanges per second was reached",
        "byte_cap": "the sidecar's limit on bytes per second was reached",
        "queue_full": "the stream did not keep up",
        "stream_full": "the stream was full",
        "publish": "the stream could not be reached",
        "expired": "left the stream before it was replayed: the shadow was too slow or not running, or a person dropped it",
        "capture_error": "an error of quantdrift itself",
        "process_ended": "a process of the sidecar was killed, or crashed, while it had them",
        "metadata": "its tensors are not described: describe them in the configuration",
        "unobserved": "the relay could not follow its connection; how many there were is an estimate",
        "too_costly": "decoding it takes more processor time than one exchange may use",
        "no_key": "it must be encrypted, and the sidecar could not read the key",
        "unpaired": "its request or response did not arrive, or could not be matched to it",
        "no_reference": "the version has no reference",
        "schema": "its tensors do not fit the reference",
        "media": "a message has an image, audio or the like that the reference does not read",
        "output": "the output cannot be compared with the reference's",
        "tokenizer": "candidate and reference have different tokenizers or chat templates",
        "replay": "the reference failed on this input",
        "too_late": "its capture time is older than the oldest partition",
        "too_early": "captured in the future: the sidecar's clock is wrong",
        "encrypted": "no key of the shadow opens it",
        "poison": "delivered too many times without being finished",
    }
)


def from_standby(age_s: float) -> str:
    """Return that what is shown was read from a standby of the database, and how old the last change there is."""
    return (
        "what is shown was read from a standby of the database, where the last change arrived"
        f" {duration(timedelta(seconds=age_s))} ago"
    )


def lowered(factor: float) -> str:
    """Return that the sampling rates are lowered because the shadow does not keep up, and what to do."""
    return (
        f"the shadow does not keep up, so every sampling rate is multiplied by {number(factor)} until it does: start more shadow"
        " workers, or lower sampling.rate"
    )
