"""The buckets for policy and pause: a JetStream key-value store with one value per key, a time to live and size limits.

It is a stream with the names and settings of the NATS key-value store (ADR-8 of nats-architecture-and-design), so
`nats kv get NAME-policy directive` can read it too.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import DiscardPolicy, Header, RetentionPolicy, StorageType, StreamConfig

from quantdrift.core.config.schema import MIB, Stream
from quantdrift.core.errors import RetryError
from quantdrift.core.sampling.policy_message import MAX_BYTES
from quantdrift.core.stream.config import create_or_update
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.consume import REQUEST_S
from quantdrift.core.stream.errors import mapped

_BUCKET_BYTES = MIB
_HEADER_BYTES = 1024  # headers count towards the largest message
_OPERATION = "KV-Operation"  # a value with this header means that the key was deleted
_LOOK_S = 30.0
_LOOK_AGAIN_S = 1.0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a key.

    Parameters
    ----------
    revision
        Rises with every `put`; it restarts if the bucket is created again.
    """

    value: bytes
    revision: int


class KeyValue:
    """The bucket `NAME-PURPOSE`.

    Parameters
    ----------
    ttl_s
        Values expire after so long; 0: never. Only processes that call `put` need it.
    purpose
        Last part of the bucket's name.
    """

    def __init__(self, queue: Queue, stream: Stream, ttl_s: float = 0.0, purpose: str = "policy") -> None:
        self._queue = queue
        self.name = f"{stream.name}-{purpose}"
        self._replicas = stream.replicas
        self._ttl_s = ttl_s

    async def put(self, key: str, value: bytes, *, after: int | None = None) -> int:
        """Store the value of a key and return its revision; a missing bucket is created.

        Parameters
        ----------
        after
            The `revision` that is replaced; None: whatever there is.

        Raises
        ------
        ChangedError
            The value was changed after `after`; nothing is stored.
        RetryError
            The server is away, has no room, or refuses.
        """
        # Create it first: watchers subscribe to the same subject, so the server reports no error if no stream has it.
        await self.ensure()
        jetstream = (await self._queue.live()).jetstream(timeout=REQUEST_S)
        async with mapped():
            headers = None if after is None else {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(after)}
            stored = await jetstream.publish(self._subject(key), value, headers=headers)
        return int(stored.seq)

    async def ensure(self) -> None:
        """Create the bucket, or update its limits. Idempotent.

        Raises
        ------
        RetryError
            The server is away, has no room, or refuses.
        """
        jetstream = (await self._queue.live()).jetstream(timeout=REQUEST_S)
        async with mapped():
            await create_or_update(jetstream, self._config())

    async def revision(self, key: str) -> int:
        """Return the revision of the last change of a key, a deletion included; 0 if there is none.

        Raises
        ------
        RetryError
            The server is unavailable.
        """
        jetstream = (await self._queue.live()).jetstream(timeout=REQUEST_S)
        async with mapped():
            try:
                message = await jetstream.get_last_msg(self._stream, self._subject(key), direct=True)
            except (nats.js.errors.NotFoundError, nats.errors.NoRespondersError):
                return 0
        return int(message.seq or 0)

    async def get(self, key: str) -> Entry | None:
        """Return the value of a key; None if there is none, it was deleted or expired, or there is no bucket.

        Raises
        ------
        RetryError
            The server is unavailable.
        """
        jetstream = (await self._queue.live()).jetstream(timeout=REQUEST_S)
        async with mapped():
            try:
                message = await jetstream.get_msg(self._stream, subject=self._subject(key), direct=True)
            except (nats.js.errors.NotFoundError, nats.errors.NoRespondersError):
                return None
        if (message.headers or {}).get(_OPERATION) or (message.headers or {}).get(Header.STATUS):
            return None
        return Entry(value=bytes(message.data or b""), revision=int(message.seq or 0))

    async def watch(self, key: str) -> AsyncGenerator[Entry | None, None]:
        """Yield the value of a key now and after each change, until the caller stops.

        A message about a new value makes the watcher read it. It also reads after each reconnect, and every half
        minute, in case a message was lost, the value has expired, or the client may not subscribe. While the server is
        unavailable nothing is yielded. Of changes in quick succession only the last one may be yielded.
        """
        changed = asyncio.Event()
        client: Client | None = None
        subscription: Subscription | None = None
        last: Entry | None = None
        is_first = True

        async def on_message(_: Msg) -> None:
            changed.set()

        with self._queue.setting_on_connect(changed):
            try:
                while True:
                    await self._queue.wait_connected()
                    wait_s, is_announced = _LOOK_S, changed.is_set()
                    changed.clear()
                    try:
                        live = await self._queue.live()
                        if live is not client:
                            async with mapped():
                                subscription = await live.subscribe(self._subject(key), cb=on_message)
                            client = live
                        entry = await self.get(key)
                    except RetryError:
                        wait_s = _LOOK_AGAIN_S
                    else:
                        if is_announced and (entry is None or entry == last):
                            wait_s = _LOOK_AGAIN_S  # the server may not have stored, or loaded, the value yet
                        if is_first or entry != last:
                            yield entry
                        last, is_first = entry, False
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await changed.wait()
            finally:
                if subscription is not None:
                    with contextlib.suppress(nats.errors.Error):
                        await subscription.unsubscribe()

    def _config(self) -> StreamConfig:
        return StreamConfig(
            name=self._stream,
            description="Sampling policy and pauses, which the sidecars watch.",
            subjects=[f"$KV.{self.name}.>"],
            storage=StorageType.FILE,
            retention=RetentionPolicy.LIMITS,
            discard=DiscardPolicy.NEW,
            max_msgs_per_subject=1,
            max_msg_size=MAX_BYTES + _HEADER_BYTES,
            max_age=self._ttl_s,
            max_bytes=_BUCKET_BYTES,
            duplicate_window=min(120.0, self._ttl_s) if self._ttl_s else 120.0,
            num_replicas=self._replicas,
            allow_direct=True,
            allow_rollup_hdrs=True,
            deny_delete=True,
        )

    @property
    def _stream(self) -> str:
        return f"KV_{self.name}"

    def _subject(self, key: str) -> str:
        return f"$KV.{self.name}.{key}"
