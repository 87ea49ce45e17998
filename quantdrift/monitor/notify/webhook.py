"""Alerts to a webhook: one signed JSON document, or one message of a chat, for each change, at least once.

What waits is in the table `outbox`, written in the transaction of the change, so nothing is lost while the receiver or the
monitor is away. A failure delays that event alone: twice as long each time, up to `LONGEST_S`, without end. A document that
was accepted just before a monitor ended may come again: `id` is the same then.

The header `Quantdrift-Signature` is `t=SECONDS,kid=KEY,v1=HEX`: the time of sending, the id of the key in the key file, and the
HMAC-SHA256 of `SECONDS.BODY` with what that key derives for this purpose.
"""

import hmac
import logging
from functools import partial
from typing import Any, Final

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import Config
from quantdrift.core.config.watching import WebhookFormat
from quantdrift.core.errors import RetryError
from quantdrift.core.keys import Key, KeyFile
from quantdrift.core.links import alert_link, alert_page
from quantdrift.core.process.backoff import Backoff
from quantdrift.core.telemetry import NOTIFIED, NOTIFY_FAILED, Telemetry
from quantdrift.core.text import plain, unmarked
from quantdrift.core.tls import Tls
from quantdrift.facts.events import event_of
from quantdrift.facts.words.incident import mitigated_sentence
from quantdrift.monitor.notify.chat import message
from quantdrift.monitor.notify.receiver import Failure, Reason, Receiver
from quantdrift.storage.alerts.alerts import (
    AlertFact,
    Delivery,
    delay_delivery,
    due_deliveries,
    end_delivery,
)
from quantdrift.storage.database import Database
from quantdrift.storage.figures.figures import frozen
from quantdrift.storage.leader import Fence

SIGNATURE: Final = "Quantdrift-Signature"
PURPOSE: Final = b"quantdrift webhook"
FIRST_S: Final = 2.0
LONGEST_S: Final = 600.0
_AT_ONCE: Final = 16
_LOG = logging.getLogger(__name__)


class WebhookSender:
    """Sends what is due to the webhook, while this process leads."""

    def __init__(
        self, *, config: Config, database: Database, fence: Fence, telemetry: Telemetry, clock: Clock
    ) -> None:
        self._config = config
        self._database = database
        self._fence = fence
        self._clock = clock
        self._accepted = telemetry.counter(NOTIFIED)
        self._failed = telemetry.counter(NOTIFY_FAILED)
        notify = config.notify
        self._receiver = (
            Receiver(
                "notify.webhook_url", notify.webhook_url, Tls.of_notify(notify), notify.webhook_headers_file
            )
            if notify.webhook_url
            else None
        )
        self._keys = KeyFile.of(notify.webhook_key_file, "notify.webhook_key_file", clock)

    async def send_due(self) -> None:
        """Send what is due, until the first failure.

        Raises
        ------
        RetryError
            The webhook did not accept an event, which is sent again later; or as `Database.begin`, or this monitor does not
            lead any more.
        """
        if self._receiver is None:
            return
        async with self._database.begin() as connection:
            await self._fence(connection)
            due = await due_deliveries(connection, _AT_ONCE)
        for delivery in due:
            async with self._database.begin() as connection:
                await self._fence(connection)
            failure = await self._send(self._receiver, delivery)
            async with self._database.begin() as connection:
                if failure is None:
                    await end_delivery(connection, delivery.id)
                else:
                    await delay_delivery(connection, delivery.id, pause_s(delivery.attempts), failure.text)
            if failure is not None:
                self._failed.add(1, {"receiver": "webhook", "reason": failure.reason.value})
                raise RetryError(f"{self._receiver.name} did not accept event {delivery.id}: {failure.text}")
            self._accepted.add(1, {"receiver": "webhook"})

    def close(self) -> None:
        """Start no other request."""
        if self._receiver is not None:
            self._receiver.close()

    async def _send(self, receiver: Receiver, delivery: Delivery) -> Failure | None:
        key = self._keys.current if self._keys is not None else None
        kind = self._config.notify.webhook_format
        if key is None and (kind is WebhookFormat.JSON or self._keys is not None):
            return Failure(
                reason=Reason.SETUP, text="notify.webhook_key_file cannot be read, so nothing is signed"
            )
        if kind is WebhookFormat.JSON:
            body = document(delivery, self._config)
        else:
            why = mitigated(delivery.alert) if delivery.alert.mitigation else ""
            body = message(kind, delivery, self._config, mitigated=why)
        at_s = int(self._clock.now().timestamp())
        return await receiver.post("", body, {} if key is None else {SIGNATURE: signature(key, at_s, body)})


def pause_s(attempts: int) -> float:
    """Return how long an event waits after its failure number `attempts` + 1, seconds, with jitter."""
    nominal_s: float = min(FIRST_S * 2.0 ** min(attempts, 30), LONGEST_S)
    return Backoff(nominal_s, nominal_s).next_s()


def signature(key: Key, at_s: int, body: bytes) -> str:
    """Return the value of the header `Quantdrift-Signature`."""
    digest = hmac.digest(key.derived(PURPOSE), b"%d." % at_s + body, "sha256")
    return f"t={at_s},kid={key.id},v1={digest.hex()}"


def mitigated(alert: AlertFact) -> str:
    """Return why nobody gets the answers of an alert that lasts, with model, version and slice before it."""
    said = mitigated_sentence(alert.version, alert.slice, alert.mitigation or "", alert.mitigated_by)
    return plain(f"{alert.model} {alert.version}, {alert.slice}: {said}")


def document(delivery: Delivery, config: Config) -> bytes:
    """Return the JSON document of one change of an alert."""
    alert = delivery.alert
    related = alert.related(partial(alert_link, config)) if alert.is_open and not alert.mitigation else ()
    text = (delivery.text or alert.words).plain(related=related)
    if alert.mitigation:
        text = f"{mitigated(alert)}\n{text}"
    text = unmarked(text, config.web.url)
    facts: dict[str, Any] = {
        "version": 1,
        "id": str(delivery.id),
        "change": delivery.change,
        "at": delivery.at,
        "alert": {
            name: getattr(alert, name)
            for name in alert.__struct_fields__
            if name not in {"details", "text", "metric", "slice_id"}
        },
        "summary": text.partition("\n")[0],
        "text": text,
        "do_now": [
            msgspec.structs.replace(step, text=unmarked(step.text, config.web.url))
            for step in (delivery.text or alert.words).do_now
        ],
        "runbook": config.notify.runbook_url,
        "page": alert_page(config, alert.id),
        "details": delivery.details,
        "figures": frozen(event_of(delivery.details), delivery.at),
    }
    return msgspec.json.encode(facts)
