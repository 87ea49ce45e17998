"""Configuration of the streams: subjects, limits, and behaviour when they are full."""

import hashlib
import logging
from pathlib import Path
from typing import Final

import msgspec
import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RePublish, RetentionPolicy, StorageType, StreamConfig

from quantdrift.core.config.connections import stream_problems
from quantdrift.core.config.schema import MIB, Stream
from quantdrift.core.errors import OperatorError
from quantdrift.core.stream.subjects import copies, subject_token

_LOG = logging.getLogger(__name__)

_DUPLICATE_WINDOW_S = 120.0  # far above two publish timeouts: a retried publish is stored once
_TALLY_AGE_S = 86_400.0
_TALLY_BYTES = 64 * MIB
_LONGEST_TOKEN = 200
_NAME_IN_USE = 10058  # JetStream's error code
_OURS = (
    "subjects",
    "storage",
    "retention",
    "discard",
    "max_age",
    "max_bytes",
    "max_msgs_per_subject",
    "duplicate_window",
    "num_replicas",
)


EXEMPLARS_EACH: Final = 64
"""Exemplars of one kind that are kept of one slice."""
EXEMPLAR_AGE_S: Final = 7 * 86_400.0
"""Age at which the server deletes an exemplar."""


REFUSING_BYTES: Final = 1
"""Limit of a stream that refuses every exemplar."""
LONGEST_S: Final = 30.0
"""Time after its comparison within which a shadow stores an exemplar, or leaves it out; an erasure waits for it."""


def exchange_stream(stream: Stream) -> StreamConfig:
    """Return the work queue of exchanges, which deletes acknowledged ones and refuses new ones when it is full."""
    return StreamConfig(
        name=stream.name,
        description="Captured exchanges that wait for their replay.",
        subjects=[f"{stream.name}.exchange.>"],
        storage=StorageType.FILE,
        retention=RetentionPolicy.WORK_QUEUE,
        discard=DiscardPolicy.NEW,
        max_age=stream.max_age_s,
        max_bytes=stream.max_bytes,
        duplicate_window=min(_DUPLICATE_WINDOW_S, stream.max_age_s),
        num_replicas=stream.replicas,
    )


def tally_stream(stream: Stream) -> StreamConfig:
    """Return the stream of tallies, which keeps the last one of each sidecar boot."""
    return StreamConfig(
        name=f"{stream.name}-tally",
        description="The last tally of each sidecar's boot.",
        subjects=[f"{stream.name}.tally.>"],
        storage=StorageType.FILE,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_msgs_per_subject=1,
        max_age=_TALLY_AGE_S,
        max_bytes=_TALLY_BYTES,
        duplicate_window=_DUPLICATE_WINDOW_S,
        num_replicas=stream.replicas,
    )


def current_stream(stream: Stream) -> Stream:
    """Return the section with the address that `url_file` contains now; without such a file, unchanged.

    Raises
    ------
    OperatorError
        The file cannot be read, is empty, or has an address that is not allowed.
    """
    if not stream.url_file:
        return stream
    try:
        url = Path(stream.url_file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise OperatorError(f"stream.url_file: {stream.url_file} cannot be read: {error}") from error
    if not url:
        raise OperatorError(f"stream.url_file: {stream.url_file} is empty: write the address of NATS in it")
    current = msgspec.structs.replace(stream, url=url)
    for problem in stream_problems(current, f"stream.url_file ({stream.url_file})"):
        raise OperatorError(problem)
    return current


def exemplar_stream(stream: Stream) -> StreamConfig:
    """Return the stream of exemplars, which keeps the last ones of each kind and slice, for a week at most."""
    return StreamConfig(
        name=f"{stream.name}-exemplar",
        description="Exchanges with their payload that stand for a slice; see models.exemplars.",
        subjects=[exemplars(stream.name)],
        storage=StorageType.FILE,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_msgs_per_subject=EXEMPLARS_EACH,
        max_age=EXEMPLAR_AGE_S,
        max_bytes=stream.exemplar_bytes,
        duplicate_window=_DUPLICATE_WINDOW_S,
        num_replicas=stream.replicas,
    )


def refusing_exemplars(stream: Stream) -> StreamConfig:
    """Return the stream of exemplars as one that is always full; `exemplar_stream` makes it accept them again."""
    refusing = exemplar_stream(stream)
    refusing.discard, refusing.max_bytes = DiscardPolicy.NEW, REFUSING_BYTES
    return refusing


def exemplars(name: str, model: str = "", slice_name: str = "", kind: str = "") -> str:
    """Return the subject of exemplars; an empty part means any.

    The name of a long slice is a hash in its subject: subjects have a limit.
    """
    parts = [subject_token(model) if model else "", "", kind]
    if slice_name:
        token = subject_token(slice_name)
        parts[1] = token if len(token) <= _LONGEST_TOKEN else hashlib.sha256(token.encode()).hexdigest()
    if not any(parts):
        return f"{name}.exemplar.>"
    return ".".join([name, "exemplar", *(part or "*" for part in parts)])


async def send_copies(jetstream: JetStreamContext, stream: Stream) -> None:
    """Let the server send copies of stored exchanges; from then on it always does.

    A work queue lets nobody but its workers read. The server keeps no copies: without a subscriber they are gone.

    Raises
    ------
    nats.js.errors.NotFoundError
        There is no stream.
    """
    wanted = RePublish(src=f"{stream.name}.exchange.>", dest=copies(stream.name, ">"))
    info = await jetstream.stream_info(stream.name)
    if info.config.republish != wanted:
        await jetstream.update_stream(info.config, republish=wanted)


async def create_or_update(jetstream: JetStreamContext, wanted: StreamConfig) -> None:
    """Create the stream, or update the limits of an existing one to `wanted`; its other settings stay.

    A user without the right to update it gets no answer from the server. Then the stream keeps its limits, with a warning.

    Raises
    ------
    nats.js.errors.APIError
        The server refuses.
    """
    name = str(wanted.name)
    try:
        info = await jetstream.stream_info(name)
    except nats.js.errors.NotFoundError:
        try:
            await jetstream.add_stream(wanted)
        except nats.js.errors.BadRequestError as error:
            if error.err_code != _NAME_IN_USE:
                raise
            info = await jetstream.stream_info(name)  # another process was faster
        else:
            return
    changed = {
        key: getattr(wanted, key) for key in _OURS if getattr(info.config, key) != getattr(wanted, key)
    }
    if changed:
        try:
            await jetstream.update_stream(info.config, **changed)
        except nats.errors.TimeoutError:
            _LOG.warning(
                "the stream %s keeps its %s: NATS did not answer to the change, perhaps because this user may not make it;"
                " `quantdrift setup nats --apply` makes it",
                name,
                ", ".join(changed),
            )
