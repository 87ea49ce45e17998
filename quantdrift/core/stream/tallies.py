"""Tallies as they come from their stream."""

import re
from datetime import UTC
from typing import Final

import msgspec

from quantdrift.core.codec import decode_tally
from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.records import StratumCount, Tally

_BOOT: Final = re.compile(r"[0-9a-f]{32}", re.IGNORECASE)


def read_tally(wire: bytes) -> Tally:
    """Return the tally in `wire`, with the NUL characters of its texts replaced: Postgres cannot store them.

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
        tally, at=tally.at.astimezone(UTC), source=_clean(tally.source), strata=strata
    )


def _clean_stratum(stratum: StratumCount) -> StratumCount:
    models = {_clean(name): model for name, model in stratum.models.items()}
    return msgspec.structs.replace(stratum, stratum=_clean(stratum.stratum), models=models)


def _clean(text: str) -> str:
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _decode(detail: str) -> QuarantineError:
    return QuarantineError(QuarantineReason.DECODE, detail)
