"""The deliveries in flight: messages that a worker has fetched and not yet acknowledged, kept alive on the stream."""

import contextlib
from collections.abc import Iterable, Sequence

from quantdrift.core.errors import RetryError
from quantdrift.core.stream.consume import Delivery, acknowledge_all


class InFlight:
    """The set of deliveries in flight. One event loop uses it."""

    def __init__(self) -> None:
        self._deliveries: set[Delivery] = set()  # not by sequence: a recreated stream counts from 1 again

    def add(self, delivery: Delivery) -> None:
        """Keep this delivery alive from now on."""
        self._deliveries.add(delivery)

    def release(self, deliveries: Iterable[Delivery]) -> None:
        """Stop keeping these deliveries alive; those that were not acknowledged are delivered again."""
        self._deliveries.difference_update(deliveries)

    async def keep_alive(self) -> None:
        """Ask the stream for more time for every delivery in flight."""
        for delivery in list(self._deliveries):
            with contextlib.suppress(RetryError):  # unreachable: it is delivered again, and stored once
                await delivery.in_progress()


async def acknowledge(deliveries: Sequence[Delivery]) -> None:
    """Acknowledge deliveries; one whose acknowledgement is lost is delivered again and stored once."""
    with contextlib.suppress(RetryError):
        await acknowledge_all(deliveries)


async def give_back(deliveries: Iterable[Delivery]) -> None:
    """Return deliveries to the stream, which delivers them to another worker at once."""
    for delivery in deliveries:
        with contextlib.suppress(RetryError):  # unreachable: they are delivered again after `ack_wait_s`
            await delivery.nak(0.0)
