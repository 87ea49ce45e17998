"""Alerts to a webhook: one signed JSON document, or one message of a chat, for each change, at least once.

What waits is in the table `outbox`, written in the transaction of the change, so nothing is lost while the receiver or the
monitor is away. A failure delays that event alone: twice as long each time, up to `LONGEST_S`, without end. A document that
was accepted just before a monitor ended may come again: `id` is the same then.

The header `Quantdrift-Signature` is `t=SECONDS,kid=KEY,v1=HEX`: the time of sending, the id of the key in the key file, and the
HMAC-SHA256 of `SECONDS.BODY` with what that key derives for this purpose.

A message of a chat has one headline, the lines for whoever is woken, what to do first, and a way to the alert. Values of clients
stand in plain text, or with the signs replaced that would begin a link, a mention or a tag. Every address is an absolute one
below `web.url`; without it there is the command in place of the button.
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
from quantdrift.facts.words.happened import SINCE
from quantdrift.facts.words.incident import mitigated_sentence
from quantdrift.facts.words.text import AlertText
from quantdrift.monitor.notify.receiver import Failure, Reason, Receiver
from quantdrift.storage.alerts.alerts import (
    AlertDelivery,
    AlertFact,
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
_MOST_HEADER: Final = 150  # characters, Slack's limit
_MOST_LINE: Final = 2000
_FACTS: Final = ("How many", SINCE, "What changed")
_OPEN: Final = "Open the alert"
_CHANGES: Final = {
    "opened": "",
    "escalated": "Now a page: ",
    "worse": "Worse than when it was acknowledged: ",
    "ended": "",
    "mitigated": "Mitigated: ",
    "reopened": "Open again: ",
}


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

    async def _send(self, receiver: Receiver, delivery: AlertDelivery) -> Failure | None:
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


def document(delivery: AlertDelivery, config: Config) -> bytes:
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


def message(kind: WebhookFormat, delivery: AlertDelivery, config: Config, *, mitigated: str = "") -> bytes:
    """Return the body that the webhook of a chat takes.

    Parameters
    ----------
    kind
        Slack or Teams.
    mitigated
        Why nobody gets the answers of an alert that lasts; empty: they do.
    """
    words = delivery.text or delivery.alert.words
    headline = plain(f"{_CHANGES.get(delivery.change, '')}{mitigated or words.headline}")
    lines = [(label, plain(words.answer(label))) for label in _FACTS if words.answer(label)]
    lines += _first(words) if delivery.alert.is_open and not mitigated else []
    page = alert_page(config, delivery.alert.id)
    if not page:
        lines.append(("Look", f"quantdrift alerts show {delivery.alert.id}"))
    built = _slack(headline, lines, page) if kind is WebhookFormat.SLACK else _teams(headline, lines, page)
    return msgspec.json.encode(built)


def _first(words: AlertText) -> list[tuple[str, str]]:
    """Return what to do first."""
    return [("Do now", plain(str(words.do_now[0])))] if words.do_now else []


def _slack(headline: str, lines: list[tuple[str, str]], page: str) -> dict[str, Any]:
    """Return a message of Slack's Block Kit, in plain text: there is no markup in it."""
    blocks: list[dict[str, Any]] = [{"type": "header", "text": _text(headline, _MOST_HEADER)}]
    if len(headline) > _MOST_HEADER:
        blocks.append({"type": "section", "text": _text(headline, _MOST_LINE)})
    blocks += [{"type": "section", "text": _text(f"{label}: {text}", _MOST_LINE)} for label, text in lines]
    if page:
        button = {"type": "button", "text": _text(_OPEN, _MOST_HEADER), "url": page}
        blocks.append({"type": "actions", "elements": [button]})
    return {"text": unmarked(headline), "blocks": blocks}


def _text(text: str, most: int) -> dict[str, Any]:
    return {
        "type": "plain_text",
        "text": text if len(text) <= most else f"{text[: most - 1]}…",
        "emoji": False,
    }


def _teams(headline: str, lines: list[tuple[str, str]], page: str) -> dict[str, Any]:
    """Return a message with an Adaptive Card, whose texts may have Markdown."""
    head = {
        "type": "TextBlock",
        "text": unmarked(headline),
        "weight": "Bolder",
        "size": "Medium",
        "wrap": True,
    }
    facts = [{"title": label, "value": unmarked(text[:_MOST_LINE])} for label, text in lines]
    card: dict[str, Any] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [head, {"type": "FactSet", "facts": facts}],
    }
    if page:
        card["actions"] = [{"type": "Action.OpenUrl", "title": _OPEN, "url": page}]
    return {
        "type": "message",
        "attachments": [
            {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": card}
        ],
    }
