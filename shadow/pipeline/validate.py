"""The decoding and validation of stream messages, so that Postgres can store them."""

import re
from datetime import UTC

import msgspec

from quantdrift.core.codec import decode_exchange
from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.records import Exchange, Sampling
from quantdrift.core.text import plain

_ID = re.compile(r"[0-9a-fA-F]{32}")


def read_exchange(wire: bytes) -> Exchange:
    """Return the exchange in `wire`, with texts that are safe to store and to show.

    Raises
    ------
    QuarantineError
        Reason `decode`: it is not an exchange, or its id, time or sampling probabilities are invalid.
    """
    exchange = decode_exchange(wire)
    if not _ID.fullmatch(exchange.id):
        raise _decode("its id is not 32 hexadecimal digits")
    if exchange.captured_at.tzinfo is None:
        raise _decode("its capture time has no time zone")
    sampling = exchange.sampling
    if not (0 < sampling.pi1 <= 1 and 0 < sampling.pi2 <= 1):
        raise _decode(f"its inclusion probabilities are {sampling.pi1:g} and {sampling.pi2:g}")
    if not (0 <= sampling.u1 < sampling.pi1 and 0 <= sampling.u2 < sampling.pi2):
        raise _decode(
            f"its draws, {sampling.u1:g} and {sampling.u2:g}, do not lie below its inclusion probabilities,"
            f" {sampling.pi1:g} and {sampling.pi2:g}"
        )
    return msgspec.structs.replace(
        exchange,
        captured_at=exchange.captured_at.astimezone(UTC),
        source=plain(exchange.source),
        model=plain(exchange.model),
        version=plain(exchange.version),
        group=plain(exchange.group),
        attributes={plain(key): plain(value) for key, value in exchange.attributes.items()},
        trace=plain(exchange.trace),
        sampling=_clean_sampling(sampling),
    )


def _clean_sampling(sampling: Sampling) -> Sampling:
    return msgspec.structs.replace(
        sampling,
        header_stratum=plain(sampling.header_stratum),
        body_stratum=plain(sampling.body_stratum),
    )


def _decode(detail: str) -> QuarantineError:
    return QuarantineError(QuarantineReason.DECODE, detail)
