"""The connection to NATS, with its JetStream streams: one for exchanges, one for tallies, and one for exemplars if they are kept.

Exchanges are a work queue: each goes to one shadow worker and is deleted once it is acknowledged. A full stream refuses
new ones, so that every loss is counted where it happens. Tallies are cumulative, so only the last one of each sidecar
boot is kept.

Workers pull messages through durable consumers; messages that are not acknowledged are delivered again.
"""

import asyncio
import contextlib
import hashlib
import logging
import ssl
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self
from urllib.parse import quote

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, Header, StreamConfig

from quantdrift.core.config.schema import MIB, Stream
from quantdrift.core.errors import OperatorError, RetryError, os_error_text
from quantdrift.core.stream.config import (
    REFUSING_BYTES,
    create_or_update,
    current_stream,
    exchange_stream,
    exemplar_stream,
    exemplars,
    refusing_exemplars,
    send_copies,
    tally_stream,
)
from quantdrift.core.stream.consume import REQUEST_S, Delivery, PullInbox
from quantdrift.core.stream.errors import StreamFullError, TooLargeError, in_words, is_refusal, mapped
from quantdrift.core.stream.nats_client import Acknowledged, NatsClient, PlaintextError, within
from quantdrift.core.stream.numbering import HEADER, Numbered
from quantdrift.core.stream.rights import OWN_RIGHTS, NatsRole, bound_models, inbox
from quantdrift.core.stream.subjects import copies, model_of, subject_token
from quantdrift.core.tls import Tls

_DURABLE = "shadow"
_LONGEST_TOKEN = 200  # the server uses names of consumers as file names
_MAX_ACK_PENDING = 20_000  # exchanges with a delayed redelivery must not block the others


class Readers(msgspec.Struct, frozen=True, kw_only=True):
    """Who reads a consumer's messages.

    Parameters
    ----------
    n_readers
        Requests for messages that wait at the server: one of each worker that has nothing else to do.
    n_pending
        Messages that no worker has.
    """

    n_readers: int
    n_pending: int


class Consumer:
    """A durable pull consumer of one stream; several with the same name share the messages.

    Use `Queue.consumer`. Only one task may fetch at a time.

    Parameters
    ----------
    ack_wait_s
        Time a worker has to acknowledge.
    subject
        The subject to take messages of; empty: all.
    kept_s
        The server deletes the consumer if nobody fetches for so long; None: never.
    """

    def __init__(
        self, queue: "Queue", stream: str, ack_wait_s: float, subject: str = "", kept_s: float | None = None
    ) -> None:
        self._queue = queue
        self._stream = stream
        self._ack_wait_s = ack_wait_s
        self._subject = subject
        self._kept_s = kept_s
        self._durable = durable_name(subject)
        self._inbox: PullInbox | None = None
        self._exists = False

    async def fetch(self, n: int, *, max_bytes: int, timeout_s: float) -> list[Delivery]:
        """Return up to `n` messages or `max_bytes`, or the ones that arrived within `timeout_s`.

        Parameters
        ----------
        n
            Largest number of messages, >= 1.
        max_bytes
            Limit of bytes that the server sends at once; a single larger message is returned alone.
        timeout_s
            Longest wait; 0: only messages that wait already. The result is empty if none arrived.

        Raises
        ------
        RetryError
            The server is unavailable, or lost the consumer; the next call creates it again.
        """
        inbox = await self.bind()
        try:
            return await inbox.pull(n, max_bytes, timeout_s)
        except RetryError:
            self._exists = False  # it may be gone; creating an existing one changes nothing
            raise

    async def pending(self) -> int:
        """Return the number of messages that are not yet delivered or not yet acknowledged.

        Raises
        ------
        RetryError
            The server is unavailable.
        """
        info = await self._info()
        return int(info.num_pending or 0) + int(info.num_ack_pending or 0)

    async def unacknowledged(self) -> int:
        """Return the number of messages delivered to any worker and not yet acknowledged.

        Raises
        ------
        RetryError
            The server is unavailable.
        """
        return int((await self._info()).num_ack_pending or 0)

    async def readers(self) -> Readers:
        """Return how many workers wait for messages now, and how many messages wait for a worker.

        Raises
        ------
        RetryError
            The server is unavailable.
        """
        info = await self._info()
        return Readers(n_readers=int(info.num_waiting or 0), n_pending=int(info.num_pending or 0))

    async def _info(self) -> ConsumerInfo:
        jetstream = (await self._queue.live()).jetstream(timeout=REQUEST_S)
        async with mapped():
            info: ConsumerInfo = await jetstream.consumer_info(self._stream, self._durable)
        return info

    async def bind(self) -> PullInbox:
        """Create the consumer if it does not exist, and return the inbox of its messages.

        Raises
        ------
        RetryError
            The server is unavailable.
        """
        client = await self._queue.live()
        if self._inbox is None or self._inbox.client is not client:
            self._inbox = await PullInbox.open(client, self._stream, self._durable)
        if not self._exists:
            await self._create(client)
            self._exists = True
        return self._inbox

    async def _create(self, client: Client) -> None:
        config = ConsumerConfig(
            durable_name=self._durable,
            name=self._durable,
            filter_subject=self._subject or None,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self._ack_wait_s,
            max_deliver=-1,  # the shadow quarantines what is delivered too often; the server must never drop it silently
            max_ack_pending=_MAX_ACK_PENDING,
            inactive_threshold=self._kept_s,
        )
        jetstream = client.jetstream(timeout=REQUEST_S)
        async with mapped():
            try:
                await jetstream.add_consumer(self._stream, config)
            except nats.js.errors.NotFoundError:
                await self._queue.ensure()
                await jetstream.add_consumer(self._stream, config)


class Copies:
    """A subscription to copies of exchanges; see `Queue.copies`."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    async def next(self, timeout_s: float) -> bytes | None:
        """Return the next one as it was published; None: none arrived within `timeout_s`."""
        try:
            message = await self._subscription.next_msg(timeout=timeout_s)
        except nats.errors.TimeoutError:
            return None
        except nats.errors.Error as error:
            raise RetryError(
                "the subscription to copies of exchanges has ended: NATS closed the connection"
            ) from error
        data: bytes = message.data
        return data

    async def batch(self, timeout_s: float, *, most: int, most_bytes: int) -> list[bytes]:
        """Return the next one and what has arrived after it, in order; empty: none arrived within `timeout_s`.

        Parameters
        ----------
        most, most_bytes
            After so many, or so many bytes, no further one is taken.
        """
        first = await self.next(timeout_s)
        if first is None:
            return []
        taken, n_bytes = [first], len(first)
        while len(taken) < most and n_bytes < most_bytes and self._subscription.pending_msgs:
            following = await self.next(timeout_s)
            if following is None:
                break
            taken.append(following)
            n_bytes += len(following)
        return taken


def durable_name(subject: str) -> str:
    """Return the name of the consumer of a subject; an empty subject means all."""
    if not subject:
        return _DURABLE
    token = subject.rpartition(".")[2]
    if len(token) > _LONGEST_TOKEN:
        token = hashlib.sha256(token.encode()).hexdigest()
    return f"{_DURABLE}-{token}"


__all__ = ["Delivery", "Kind", "Queue", "StreamFullError", "TooLargeError"]

_LOG = logging.getLogger(__name__)
# A process has several connections, which are lost together: that NATS is back is said once, by the last of them.
_AWAY: "weakref.WeakSet[Queue]" = weakref.WeakSet()

Kind = Literal["exchange", "tally", "exemplar"]

_CONNECT_S = 3
_RECONNECT_WAIT_S = 1
_PING_S = 10  # after three without an answer the connection counts as lost
_UNSENT_BYTES = 8 * MIB  # with more unsent data in the client, the server does not read
_HEADER_BYTES = 512  # headers count towards the payload limit
_LEAST_KEPT_S = 86_400.0
_DENIED = "permissions violation"
_SEED = b"SU"
_RIGHTS_S = 2.0

SLICE_HEADER = "Quantdrift-Slice"
"""Header of an exemplar with the name of its slice, percent-encoded."""
COPIED_BYTES = 64 * MIB
"""Most bytes of copies that wait for their reader."""
PUBLISH_TIMEOUT_S = 5.0
"""Longest wait for an acknowledgement: a sidecar's two tries fit into the 20 s that it has left after its drain delay."""


class Queue:
    """A connection to the streams, which reconnects without limit.

    Use `connect`. It belongs to one event loop; its methods may run concurrently.

    Parameters
    ----------
    client_name
        Name in the server's monitoring.
    role
        Whose rights the connection needs; its answers come to the inbox of this role.
    publish_timeout_s
        Longest wait for the acknowledgement of one message.
    """

    def __init__(
        self,
        stream: Stream,
        client_name: str,
        role: NatsRole = NatsRole.ADMIN,
        publish_timeout_s: float = PUBLISH_TIMEOUT_S,
    ) -> None:
        self._stream = stream
        self._role = role
        self._tls = Tls.of_stream(stream)
        self._client_name = client_name
        self._publish_timeout_s = publish_timeout_s
        self._client = self._new_client()
        self._reopening = asyncio.Lock()
        self._closed = False
        self._back = asyncio.Event()
        self._set_on_connect: set[asyncio.Event] = set()
        self._acknowledged: Acknowledged | None = None
        self._bound: str | None = None

    @classmethod
    async def connect(
        cls,
        stream: Stream,
        *,
        client_name: str,
        role: NatsRole = NatsRole.ADMIN,
        publish_timeout_s: float = PUBLISH_TIMEOUT_S,
    ) -> Self:
        """Connect; afterwards lost connections are restored automatically.

        Raises
        ------
        RetryError
            No server can be reached now, or it refuses the connection.
        OperatorError
            The credentials or certificates cannot be used.
        """
        queue = cls(stream, client_name, role, publish_timeout_s)
        await queue._open()
        return queue

    @property
    def connected(self) -> bool:
        """Whether the client is connected now."""
        return bool(self._client.is_connected)

    @property
    def address(self) -> str:
        """The servers, without any credentials."""
        return self._stream.address

    @property
    def max_payload_bytes(self) -> int:
        """Size of the longest record that the server accepts."""
        return int(self._client.max_payload) - _HEADER_BYTES

    async def ensure(self) -> None:
        """Create the streams of exchanges and of tallies, or update existing ones to the configured limits. Idempotent.

        Raises
        ------
        RetryError
            The server is unavailable, or JetStream is not ready.
        OperatorError
            The server refuses the configuration; the message says why.
        """
        await self._ensure(exchange_stream(self._stream))
        await self._ensure(tally_stream(self._stream))

    async def publish_exchange(
        self, model: str, exchange_id: str, wire: bytes, numbered: Numbered | None = None
    ) -> None:
        """Store an exchange and return once the server has acknowledged it.

        Publishing the same id again within two minutes stores nothing. A missing stream is created, except by a sidecar with a key
        of its own, which may not do that.

        Parameters
        ----------
        numbered
            Its number at its sidecar; None: it is not counted if it expires in the stream.

        Raises
        ------
        StreamFullError
            The stream is full.
        TooLargeError
            Above the payload limit.
        RetryError
            The server is unavailable or did not acknowledge within `publish_timeout_s`; it may or may not be stored.
        """
        more = {} if numbered is None else {HEADER: numbered.header}
        await self._publish(f"{self._stream.name}.exchange.{subject_token(model)}", exchange_id, wire, more)

    async def ensure_exemplars(self) -> None:
        """Create the stream of exemplars, or update its limits. Errors as of `ensure`."""
        await self._ensure(exemplar_stream(self._stream))

    async def refuse_exemplars(self) -> tuple[int, int] | None:
        """Delete all exemplars with their stream, and refuse new ones until `ensure_exemplars`.

        Returns how many there were, and the bytes that they might take; None: nothing had to be done. It works on a full disk, too, where the server deletes no single message. Needs the rights of
        the administrator.

        Raises
        ------
        RetryError
            The server is unavailable.
        """
        jetstream = (await self.live()).jetstream(timeout=REQUEST_S)
        name = self.stream_name("exemplar")
        async with mapped():
            try:
                info = await jetstream.stream_info(name)
            except nats.js.errors.NotFoundError:
                return None
            if info.config.max_bytes == REFUSING_BYTES:
                return None
            await jetstream.delete_stream(name)
            await jetstream.add_stream(refusing_exemplars(self._stream))
        return int(info.state.messages), int(info.config.max_bytes or 0)

    async def publish_exemplar(
        self, model: str, slice_name: str, kind: str, exchange_id: str, wire: bytes
    ) -> None:
        """Store an exemplar, which displaces the oldest one of its slice and kind. Errors as for an exchange.

        A missing stream is created.
        """
        subject = exemplars(self._stream.name, model, slice_name, kind)
        token = subject.split(".")[-2]
        more = {SLICE_HEADER: quote(slice_name)}
        await self._publish(subject, f"{exchange_id}-{kind}-{token}", wire, more)

    async def publish_tally(self, source: str, boot: str, sequence: int, wire: bytes) -> None:
        """Store a tally, which replaces the last one of the same boot. Errors as for an exchange.

        Its subject has the models to which NATS binds this key: readers believe it of no other model.
        """
        token = f"{subject_token(source)}.{subject_token(boot)}"
        bound = await self._bound_models()
        subject = (
            f"{self._stream.name}.tally.{bound}.{token}" if bound else f"{self._stream.name}.tally.{token}"
        )
        try:
            await self._publish(subject, f"{source}-{boot}-{sequence}", wire)
        except RetryError:
            self._bound = None  # the rights may have changed
            raise

    async def _bound_models(self) -> str:
        """Return the models of this key's tallies, as in their subject; empty: of all, or NATS does not say."""
        if self._bound is None:
            client = await self.live()
            try:
                answer = await client.request(OWN_RIGHTS, b"", timeout=_RIGHTS_S)
            except (
                nats.errors.Error
            ):  # rights of the release before, or a server that does not know the question
                self._bound = ""
            else:
                self._bound = bound_models(self._stream.name, answer.data)
        return self._bound

    async def consumer(self, kind: Kind, *, ack_wait_s: float, model: str | None = None) -> Consumer:
        """Return the pull consumer that all shadow workers share; it is created if missing.

        Parameters
        ----------
        ack_wait_s
            A message that is not acknowledged for so long is delivered again.
        model
            Only exchanges of this model; None: all messages. The work queue allows no two consumers with the same
            messages, so one for all excludes those for a model.

        Raises
        ------
        RetryError
            The server is unavailable.
        """
        only = "" if model is None else f"{self._stream.name}.exchange.{subject_token(model)}"
        # If a model is removed, its exchanges have expired by then. If it returns, a new consumer misses nothing.
        kept_s = None if model is None else max(_LEAST_KEPT_S, self._stream.max_age_s)
        consumer = Consumer(self, self.stream_name(kind), ack_wait_s, only, kept_s)
        await consumer.bind()
        return consumer

    @contextlib.asynccontextmanager
    async def copies(self, model: str) -> AsyncIterator["Copies"]:
        """Subscribe to copies of the exchanges of a model that are stored from now on; workers get the exchanges as well.

        What arrives while more than `COPIED_BYTES` wait is lost, and so is what is stored while the connection is down. In some 1 % of cases the server
        loses an exchange that is stored just after the subscription. Needs the rights of a shadow.

        Raises
        ------
        RetryError
            The server is unavailable.
        """
        client = await self.live()
        await self._send_copies(client)
        subject = copies(self._stream.name, subject_token(model))
        subscription = await client.subscribe(subject, pending_bytes_limit=COPIED_BYTES)
        try:
            async with mapped():
                await client.flush(timeout=_CONNECT_S)
            yield Copies(subscription)
        finally:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    async def _send_copies(self, client: Client) -> None:
        jetstream = client.jetstream(timeout=REQUEST_S)
        async with mapped():
            try:
                await send_copies(jetstream, self._stream)
            except nats.js.errors.NotFoundError:
                await self.ensure()
                await send_copies(jetstream, self._stream)

    async def models(self) -> frozenset[str]:
        """Return the names of the models whose exchanges wait in the stream.

        Raises
        ------
        RetryError
            The server is unavailable, or there is no stream yet.
        """
        prefix = f"{self._stream.name}.exchange."
        jetstream = (await self.live()).jetstream(timeout=REQUEST_S)
        async with mapped():
            info = await jetstream.stream_info(self._stream.name, subjects_filter=f"{prefix}*")
        return frozenset(model_of(subject.removeprefix(prefix)) for subject in info.state.subjects or ())

    def stream_name(self, kind: Kind) -> str:
        """Return the name of the stream for `kind`."""
        return self._stream.name if kind == "exchange" else f"{self._stream.name}-{kind}"

    async def close(self) -> None:
        """Disconnect."""
        self._closed = True
        _AWAY.discard(self)
        with contextlib.suppress(OSError):  # the server has just ended the connection
            await self._client.close()

    async def live(self) -> NatsClient:
        """Return the connected client.

        After some answers of the server, such as expired credentials, the library gives up and closes the client; it is
        replaced here.

        Raises
        ------
        RetryError
            The server is unavailable.
        """
        if self._client.is_closed and not self._closed:
            async with self._reopening:
                if self._client.is_closed:
                    await self._reopen()
        if not self._client.is_connected:
            raise RetryError(f"NATS at {self._stream.address} is not available")
        return self._client

    async def wait_connected(self) -> None:
        """Return once the client is connected, however long that takes."""
        while True:
            try:
                await self.live()
            except RetryError:
                self._back.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RECONNECT_WAIT_S):
                        await self._back.wait()
            else:
                return

    @contextlib.contextmanager
    def setting_on_connect(self, event: asyncio.Event) -> Iterator[None]:
        """Set `event` whenever the connection is restored, inside the block: messages may have been missed."""
        self._set_on_connect.add(event)
        try:
            yield
        finally:
            self._set_on_connect.discard(event)

    async def _reopen(self) -> None:
        try:
            await self._open()
        except OperatorError as error:  # files are read again with the next attempt
            raise RetryError(str(error)) from error

    def _connected_again(self) -> None:
        for event in (self._back, *self._set_on_connect):
            event.set()

    async def _open(self) -> None:
        self._stream = current_stream(self._stream)
        if self._stream.requires_tls:
            self._tls.context()  # unusable files need a person: fail before the first attempt
        client = self._new_client()
        problems: list[Exception] = []
        logged: set[str] = set()

        async def note(problem: Exception) -> None:
            problems[:] = [problem]
            why = self._worth_a_warning(client, problem)
            if why and why not in logged:
                _LOG.warning("NATS at %s %s", self._stream.address, why)
                logged.add(why)

        async def lost() -> None:
            self._back.clear()
            if not client.is_closed:
                _AWAY.add(self)
                _LOG.warning("lost the connection to NATS at %s: reconnecting", self._stream.address)

        async def back() -> None:
            self._connected_again()
            logged.clear()
            _AWAY.discard(self)
            if not _AWAY:
                _LOG.info("connected to NATS again")

        try:
            await within(
                _CONNECT_S,
                client.connect(
                    servers=[server.url for server in self._stream.servers],
                    name=self._client_name,
                    error_cb=note,
                    disconnected_cb=lost,
                    reconnected_cb=back,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RECONNECT_WAIT_S,
                    connect_timeout=_CONNECT_S,
                    ping_interval=_PING_S,
                    max_outstanding_pings=2,
                    pending_size=_UNSENT_BYTES,
                    inbox_prefix=inbox(self._stream.name, self._role),
                    **_credentials(self._stream.credentials_file),
                ),
            )
        except (nats.errors.Error, OSError, TimeoutError) as error:
            await client.close()
            why = problems[0] if problems else error
            raise RetryError(
                f"NATS at {self._stream.address} is not reachable: {self._in_words(why)}"
            ) from error
        except ImportError as error:
            raise OperatorError("stream.credentials_file needs the nkeys package: install it") from error
        self._client = client
        self._connected_again()

    def _worth_a_warning(self, client: Client, problem: Exception) -> str:
        """Return what a person must hear of a problem on the connection; empty: nothing."""
        if _DENIED in str(problem).lower():
            if OWN_RIGHTS.lower() in str(problem).lower():
                return ""  # rights that an earlier release printed: a tally is then bound to no model
            return f"refuses: {in_words(problem)}; `quantdrift setup nats` prints the rights of each role"
        is_lost = self._client is client  # not the first attempt, whose error the caller gets
        is_final = isinstance(problem, (ssl.SSLError, PlaintextError, OperatorError)) or is_refusal(problem)
        if is_lost and is_final:
            return f"is not reachable: {self._in_words(problem)}"
        return ""

    def _in_words(self, error: Exception) -> str:
        return self._tls.in_words(error) if isinstance(error, ssl.SSLError) else in_words(error)

    def _new_client(self) -> NatsClient:
        return NatsClient(self._tls, self._stream)

    async def _ensure(self, wanted: StreamConfig) -> None:
        jetstream = (await self.live()).jetstream(timeout=REQUEST_S)
        try:
            async with mapped():
                await create_or_update(jetstream, wanted)
        except RetryError as error:
            cause = error.__cause__
            if isinstance(cause, nats.js.errors.APIError) and not isinstance(
                cause, nats.js.errors.ServiceUnavailableError
            ):
                advice = ""
                if isinstance(error, StreamFullError):
                    size = f"stream.max_bytes ({self._stream.max_bytes})"
                    if wanted.name == self.stream_name("exemplar"):
                        need = f"lower stream.exemplar_bytes ({self._stream.exemplar_bytes}) or {size}"
                    else:
                        need = f"lower {size}"
                    advice = f": {need}, or give the server more disk space"
                raise OperatorError(
                    f"NATS refuses the stream {wanted.name}: {cause.description}{advice}"
                ) from error
            raise

    async def _publish(
        self, subject: str, message_id: str, wire: bytes, more: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        client = await self.live()
        if len(wire) > self.max_payload_bytes:
            raise TooLargeError(f"{len(wire)} bytes are above the server's {self.max_payload_bytes}")
        if client.pending_data_size > _UNSENT_BYTES:
            raise RetryError(f"NATS at {self._stream.address} does not read the sent data")
        async with mapped():
            acknowledged = await self._acknowledging(client)
            headers = {Header.MSG_ID.value: message_id, **more}
            try:
                await acknowledged.publish(subject, headers, wire, self._publish_timeout_s)
            except nats.js.errors.NoStreamResponseError as error:
                if self._role is NatsRole.SIDECAR and self._stream.credentials_file:
                    # Asking for a right that the key of a sidecar has not would only fill both logs.
                    raise RetryError(
                        f"NATS at {self._stream.address} has no stream for {subject.split('.', 2)[1]} messages yet:"
                        " `quantdrift setup nats --apply` creates it"
                    ) from error
                await self.ensure()
                if subject.startswith(f"{self._stream.name}.exemplar."):
                    await self.ensure_exemplars()
                await acknowledged.publish(subject, headers, wire, self._publish_timeout_s)

    async def _acknowledging(self, client: Client) -> Acknowledged:
        if self._acknowledged is None or self._acknowledged.client is not client:
            async with self._reopening:
                if self._acknowledged is None or self._acknowledged.client is not client:
                    self._acknowledged = await Acknowledged.open(client)
        return self._acknowledged


def _credentials(path: str) -> dict[str, Any]:
    """Return the library's option for a file with credentials (.creds), or with the bare key of a user (.nk)."""
    if not path:
        return {}
    try:
        with Path(path).open("rb") as file:
            is_key = file.read(len(_SEED)) == _SEED
    except OSError as error:
        raise OperatorError(f"stream.credentials_file {path}: {os_error_text(error)}") from error
    return {"nkeys_seed" if is_key else "user_credentials": path}
