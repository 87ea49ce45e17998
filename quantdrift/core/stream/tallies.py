"""Tallies as they come from their stream."""

import re
from collections.abc import Sequence
from datetime import UTC
from typing import Final

import msgspec

from quantdrift.core.codec import decode_tally
from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.process_state import read_state
from quantdrift.core.records import ModelCount, StratumCount, Tally
from quantdrift.core.stream.subjects import models_of, subject_token
from quantdrift.core.text import plain

_MOST: Final = 1 << 53  # the database's counts have room for the sum of a thousand of them
_MOST_STRATA: Final = 1024
_MOST_ROWS: Final = 1 << 14  # a sidecar counts in 4,096 rows, and some names that are not configured
_LONGEST_NAME: Final = 1024
_BOUND_TOKENS: Final = 5  # NAME.tally.MODELS.SOURCE.BOOT
_NONE: Final = ModelCount(taken=0)
_BOOT: Final = re.compile(r"[0-9a-f]{32}", re.IGNORECASE)


def read_tally(wire: bytes, subject: str = "") -> Tally:
    """Return the tally in `wire`, with texts that are safe to store and to show.

    Parameters
    ----------
    subject
        The subject it was published to; empty: it did not come through a stream. If it has models, the key that NATS let publish
        there may report on these alone: what the tally has of others is left out, and what it has of none counts for these.

    Raises
    ------
    QuarantineError
        Reason `decode`: it is not a tally, or its boot id, time or counts are invalid. Reason `subject`: it says another
        sidecar than its subject. Reason `limits`: it is larger than that of any sidecar.
    """
    tally = decode_tally(wire)
    if not _BOOT.fullmatch(tally.boot):
        raise _decode("its boot id is not 32 hexadecimal digits")
    if tally.at.tzinfo is None:
        raise _decode("its time has no time zone")
    if subject and subject.split(".")[-2:] != [subject_token(tally.source), subject_token(tally.boot)]:
        raise QuarantineError(QuarantineReason.SUBJECT, "it says another sidecar than its subject")
    _check(tally)
    tokens = subject.split(".")
    strata = tuple(_clean_stratum(stratum) for stratum in tally.strata)
    if len(tokens) == _BOUND_TOKENS:
        models = sorted(map(plain, models_of(tokens[2])))
        strata = tuple(_only(stratum, models) for stratum in strata)
    return msgspec.structs.replace(
        tally,
        at=tally.at.astimezone(UTC),
        source=plain(tally.source),
        strata=strata,
        state=None if tally.state is None else read_state(tally.state),
    )


def _check(tally: Tally) -> None:
    rows = [row for stratum in tally.strata for row in stratum.models.values()]
    if len(tally.strata) > _MOST_STRATA or len(rows) > _MOST_ROWS:
        raise QuarantineError(
            QuarantineReason.LIMITS, f"it has {len(tally.strata)} strata and {len(rows)} models"
        )
    names = [
        tally.source,
        *(name for stratum_tally in tally.strata for name in (stratum_tally.stratum, *stratum_tally.models)),
    ]
    if max(map(len, names)) > _LONGEST_NAME:
        raise QuarantineError(
            QuarantineReason.LIMITS, f"a name in it is longer than {_LONGEST_NAME} characters"
        )
    counts = [tally.sequence, tally.blind_connections]
    for stratum_tally in tally.strata:
        counts += [
            stratum_tally.offered,
            stratum_tally.taken,
            stratum_tally.thinned,
            stratum_tally.published,
            *stratum_tally.lost.values(),
        ]
    for row in rows:
        counts += [
            row.taken,
            row.published,
            row.numbered,
            row.thinned,
            row.unknown,
            row.row + 1,
            *row.lost.values(),
        ]
    if not all(0 <= count < _MOST for count in counts):
        raise _decode("a count in it is negative, or larger than any sidecar can count")


def _clean_stratum(stratum: StratumCount) -> StratumCount:
    models = {plain(name): model for name, model in stratum.models.items()}
    return msgspec.structs.replace(stratum, stratum=plain(stratum.stratum), models=models)


def _only(stratum: StratumCount, models: Sequence[str]) -> StratumCount:
    rows = {model: stratum.models[model] for model in models if model in stratum.models}
    if not any(row.taken or row.lost or row.configured for row in rows.values()):
        rows = {model: msgspec.structs.replace(rows.get(model, _NONE), configured=True) for model in models}
    return msgspec.structs.replace(stratum, models=rows)


def _decode(detail: str) -> QuarantineError:
    return QuarantineError(QuarantineReason.DECODE, detail)
