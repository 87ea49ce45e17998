"""The deliveries that a worker has in hand: kept alive on the stream while work on them goes on."""

import contextlib
from collections.abc import Iterable, Sequence

from quantdrift.core.errors import RetryError
from quantdrift.core.stream.connection import Delivery


class InFlight:
    """Knows what is in hand. All of it belongs to one event loop."""

    def __init__(self) -> None:
        self._held: set[Delivery] = set()  # not by sequence: a stream that is made anew counts from 1 again

    def take(self, delivery: Delivery) -> None:
        """Keep a delivery alive from now on."""
        self._held.add(delivery)

    def release(self, deliveries: Iterable[Delivery]) -> None:
        """Care for them no more: what was not acknowledged comes again."""
        self._held.difference_update(deliveries)

    async def beat(self) -> None:
        """Ask the stream for more time for everything in hand."""
        for delivery in list(self._held):
            with contextlib.suppress(RetryError):  # away: it will be delivered again, and stored once
                await delivery.in_progress()


async def acknowledge(deliveries: Sequence[Delivery]) -> None:
    """Mark deliveries as done; what the stream does not know of comes again and is stored once.

    Only the last one is confirmed: the server reads what a client sends in order, and has heard of the others then.
    """
    with contextlib.suppress(RetryError):
        for delivery in deliveries[:-1]:
            await delivery.done()
        for delivery in deliveries[-1:]:
            await delivery.ack()


async def give_back(deliveries: Iterable[Delivery]) -> None:
    """Have deliveries given to another worker at once."""
    for delivery in deliveries:
        with contextlib.suppress(RetryError):  # away: they come again after `ack_wait_s`
            await delivery.nak(0.0)
