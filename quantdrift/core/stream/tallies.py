"""Tallies as they come from their stream."""

import re
from datetime import UTC
from typing import Final

import msgspec

from quantdrift.core.codec import decode_tally
from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.records import StratumCount, Tally
from quantdrift.core.text import plain

_BOOT: Final = re.compile(r"[0-9a-f]{32}", re.IGNORECASE)


def read_tally(wire: bytes) -> Tally:
    """Return the tally in `wire`, with texts that are safe to store and to show.

    Raises
    ------
    QuarantineError
        Reason `decode`: it is not a tally, or its boot id or time is invalid.
    """
    tally = decode_tally(wire)
    if not _BOOT.fullmatch(tally.boot):
        raise _decode("its boot id is not 32 hexadecimal digits")
    if tally.at.tzinfo is None:
        raise _decode("its time has no time zone")
    strata = tuple(_clean_stratum(stratum) for stratum in tally.strata)
    return msgspec.structs.replace(
        tally, at=tally.at.astimezone(UTC), source=plain(tally.source), strata=strata
    )


def _clean_stratum(stratum: StratumCount) -> StratumCount:
    models = {plain(name): model for name, model in stratum.models.items()}
    return msgspec.structs.replace(stratum, stratum=plain(stratum.stratum), models=models)


def _decode(detail: str) -> QuarantineError:
    return QuarantineError(QuarantineReason.DECODE, detail)
