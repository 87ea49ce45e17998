"""The classification of a message: to be replayed, only counted, or quarantined."""

import contextlib
import re
from collections.abc import Callable

import msgspec

from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.records import Exchange, Protocol
from quantdrift.core.sealing import envelope_of, is_sealed
from quantdrift.core.tasks import Task
from quantdrift.core.text import plain
from quantdrift.models.language.from_exchange import embedding_inputs, scoring_inputs
from quantdrift.models.tensors.codec import fit_inputs
from quantdrift.shadow.pipeline.validate import AttributeRules, PolicyCheck, StreamedMessage, read_exchange
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import References
from quantdrift.storage.comparisons.rows import Quarantined, Unreferenced, VersionKey

Case = PreparedExchange | Quarantined | Unreferenced
_ID = re.compile(r"[0-9a-fA-F]{32}")


def classify(
    payload: bytes,
    *,
    sequence: int,
    n_delivered: int,
    max_deliveries: int,
    references: References,
    opened: Callable[[bytes], bytes] = bytes,
    envelope: StreamedMessage | None = None,
    rules: AttributeRules | None = None,
    check_policy: PolicyCheck | None = None,
    dropped: Callable[[str, int], None] = lambda _model, _number: None,
) -> Case:
    """Classify one message.

    Parameters
    ----------
    sequence
        Its sequence number in the stream.
    n_delivered, max_deliveries
        How often it was delivered, this time included, and how often it may be. Above the limit it is quarantined
        unread, because it may crash the worker that reads it.
    opened
        Returns the message without its encryption. An encrypted one goes to the quarantine as it came.
    envelope, rules
        What the stream says of the message, and which attributes it may have; None: neither is checked.
    check_policy
        As for `read_exchange`.
    dropped
        Called with the model and the number of attributes that the rules do not let in, if there are any.
    """
    if n_delivered > max_deliveries:
        return Quarantined(
            stream_sequence=sequence,
            payload=payload,
            reason=QuarantineReason.POISON,
            detail=f"delivered {n_delivered - 1} times, and no worker finished it",
        )
    try:
        exchange = read_exchange(opened(payload), envelope, check_policy)
    except QuarantineError as error:
        return _unreadable(sequence, payload, error, "" if envelope is None else plain(envelope.model))
    if rules is not None and (others := rules.dropped(exchange.attributes)):
        dropped(exchange.model, len(others))
        kept = {key: value for key, value in exchange.attributes.items() if key not in others}
        exchange = msgspec.structs.replace(exchange, attributes=kept)
    version_reference = references.find(exchange.model, exchange.version)
    if version_reference is None:
        key = VersionKey(model=exchange.model, candidate_version=exchange.stored_version, reference_digest="")
        return Unreferenced(version=key, captured_at=exchange.captured_at)
    candidate = None
    try:
        if version_reference.model.task is Task.GENERATION:
            inputs, candidate = scoring_inputs(
                exchange,
                version_reference.model.generation,
                has_replica=version_reference.has_replica(exchange.version),
                media=version_reference.reference.media,
            )
        else:
            openai = exchange.protocol == Protocol.OPENAI_EMBEDDINGS
            inputs = fit_inputs(
                embedding_inputs(exchange) if openai else exchange.inputs,
                version_reference.runtime.inputs,
                batched=version_reference.model.batched,
                mapping=version_reference.reference.inputs,
            )
    except QuarantineError as error:
        return quarantine(sequence, payload, exchange, error)
    return PreparedExchange(
        stream_sequence=sequence,
        payload=payload,
        exchange=exchange,
        version_reference=version_reference,
        inputs=inputs,
        candidate=candidate,
    )


def quarantine(sequence: int, payload: bytes, exchange: Exchange, error: QuarantineError) -> Quarantined:
    """Return the quarantine row of an exchange that could be decoded."""
    return Quarantined(
        stream_sequence=sequence,
        payload=payload,
        reason=error.reason,
        detail=error.detail,
        exchange_id=exchange.id,
        model=exchange.model,
        captured_at=exchange.captured_at,
    )


def _unreadable(sequence: int, payload: bytes, error: QuarantineError, model: str) -> Quarantined:
    """Return the row of a message that could not be read, with what the envelope of an encrypted one says of it."""
    exchange_id = None
    if is_sealed(payload):
        with contextlib.suppress(QuarantineError):
            envelope = envelope_of(payload)
            model = model or plain(envelope.model)
            exchange_id = envelope.exchange_id if _ID.fullmatch(envelope.exchange_id) else None
    return Quarantined(
        stream_sequence=sequence,
        payload=payload,
        reason=error.reason,
        detail=error.detail,
        exchange_id=exchange_id,
        model=model,
    )
