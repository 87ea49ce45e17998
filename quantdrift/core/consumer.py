"""The durable consumer of a stream: messages are pulled from it, and those that are not acknowledged come again."""

import hashlib
from typing import TYPE_CHECKING

import nats.js.errors
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo

from quantdrift.core.delivery import REQUEST_S, Delivery, Inbox
from quantdrift.core.errors import RetryError
from quantdrift.core.nats_errors import mapped

if TYPE_CHECKING:
    from quantdrift.core.jetstream import Queue

_DURABLE = "shadow"
_NOT_UNIQUE = 10100  # JetStream's error code: another consumer of a work queue takes the same subject
_LONGEST_TOKEN = 200  # names of consumers are file names
_MAX_ACK_PENDING = 20_000  # exchanges that wait out a delay must not hold up the others


class Consumer:
    """Takes messages from one stream, together with all others of the same name.

    Use `Queue.consumer`. One task fetches at a time.

    Parameters
    ----------
    queue
        Its connection.
    stream
        Name of the stream.
    ack_wait_s
        Time a worker has to acknowledge.
    subject
        The one it takes; empty: all.
    kept_s
        How long the server keeps it while nobody fetches; None: for ever.
    """

    def __init__(
        self, queue: "Queue", stream: str, ack_wait_s: float, subject: str = "", kept_s: float | None = None
    ) -> None:
        self._queue = queue
        self._stream = stream
        self._ack_wait_s = ack_wait_s
        self._subject = subject
        self._kept_s = kept_s
        self._durable = _durable_name(subject)
        self._inbox: Inbox | None = None
        self._exists = False

    async def fetch(self, n: int, *, max_bytes: int, timeout_s: float) -> list[Delivery]:
        """Return messages: as many as `n` or `max_bytes` allow, or what came within `timeout_s`.

        Parameters
        ----------
        n
            Most messages, >= 1.
        max_bytes
            Most bytes that the server sends at once; a single message above it comes alone.
        timeout_s
            Longest wait; 0: what is there at once. Empty when nothing came.

        Raises
        ------
        RetryError
            The server is away, or lost the consumer, which is then created anew by the next call.
        """
        inbox = await self.bind()
        try:
            return await inbox.pull(n, max_bytes, timeout_s)
        except RetryError:
            self._exists = False  # perhaps: creating what is there changes nothing
            raise

    async def pending(self) -> int:
        """Return how many messages wait: not yet delivered, or delivered and not yet acknowledged.

        Raises
        ------
        RetryError
            The server is away.
        """
        info = await self._info()
        return int(info.num_pending or 0) + int(info.num_ack_pending or 0)

    async def unacknowledged(self) -> int:
        """Return how many messages were delivered, to whomever, and not yet acknowledged.

        Raises
        ------
        RetryError
            The server is away.
        """
        return int((await self._info()).num_ack_pending or 0)

    async def _info(self) -> ConsumerInfo:
        jetstream = (await self._queue.live()).jetstream(timeout=REQUEST_S)
        async with mapped():
            info: ConsumerInfo = await jetstream.consumer_info(self._stream, self._durable)
        return info

    async def bind(self) -> Inbox:
        """Make sure that the consumer exists, and return where its messages come to.

        Raises
        ------
        RetryError
            The server is away.
        """
        client = await self._queue.live()
        if self._inbox is None or self._inbox.client is not client:
            self._inbox = await Inbox.open(client, self._stream, self._durable)
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
            max_deliver=-1,  # the shadow quarantines what comes too often; the server must never drop it silently
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
            except nats.js.errors.APIError as error:
                if not self._subject or error.err_code != _NOT_UNIQUE:
                    raise
                # One for everything, of an earlier release: what it gave to a worker comes again.
                await jetstream.delete_consumer(self._stream, _DURABLE)
                await jetstream.add_consumer(self._stream, config)


def _durable_name(subject: str) -> str:
    """Return the name of the consumer of a subject; empty: of everything."""
    if not subject:
        return _DURABLE
    token = subject.rpartition(".")[2]
    if len(token) > _LONGEST_TOKEN:
        token = hashlib.sha256(token.encode()).hexdigest()
    return f"{_DURABLE}-{token}"
