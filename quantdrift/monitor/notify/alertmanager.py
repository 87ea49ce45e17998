"""The state of all alerts at Alertmanager (API v2), posted again and again.

Every alert whose incident is not mitigated is posted when it changes and every `RESYNC_S`, to each address, with an end that lies
`LASTS` ahead. So Alertmanager learns the state again after its restart, and a change of the leading monitor is not noticed: labels and
start of an alert come from the database. An alert that was resolved, or whose incident is mitigated, is posted with its end for longer
than `LASTS`. If Alertmanager misses even that, it has resolved the alert by itself. So nothing has to be remembered of what was sent.

An alert that escalates gets another label set, because Alertmanager notifies at once of what is new: a page has another
`alertname` and `severity` than a ticket, and `escalation` counts how often an acknowledged alert became worse. The label set
before is posted as ended.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import Config
from quantdrift.core.links import alert_link, alert_page
from quantdrift.core.process.backoff import Backoff
from quantdrift.core.telemetry import NOTIFIED, NOTIFY_FAILED, Telemetry
from quantdrift.core.text import plain, unmarked
from quantdrift.core.tls import Tls
from quantdrift.monitor.notify.receiver import Receiver
from quantdrift.monitor.notify.webhook import mitigated
from quantdrift.storage.alerts.alerts import AlertFact, Ended, alert_mark, current_alerts
from quantdrift.storage.database import Database
from quantdrift.storage.leader import Fence

RESYNC_S: Final = 30.0
"""Time between two posts of the same state; Alertmanager's resolve_timeout is five minutes unless it is configured."""
LASTS: Final = timedelta(hours=1)
"""An alert that no monitor posts any more ends after this: longer than an outage of all monitors should last."""
ENDED_FOR: Final = LASTS + timedelta(minutes=15)
_PATH: Final = "/api/v2/alerts"
_NAMES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {"firing": ("QuantdriftSliceFiring", "page"), "warning": ("QuantdriftSliceWarning", "ticket")}
)
_LONGEST_PAUSE_S: Final = 10.0
_LOG = logging.getLogger(__name__)


class _Address:
    """One Alertmanager: when it gets the state next."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.backoff = Backoff(1.0, _LONGEST_PAUSE_S)
        self.next_s = 0.0
        self.mark: tuple[int, int, int] | None = None
        self.fails = False


class AlertmanagerNotifier:
    """Posts the state to every address, while this process leads."""

    def __init__(
        self, *, config: Config, database: Database, fence: Fence, telemetry: Telemetry, clock: Clock
    ) -> None:
        self._config = config
        self._database = database
        self._fence = fence
        self._clock = clock
        self._accepted = telemetry.counter(NOTIFIED)
        self._failed = telemetry.counter(NOTIFY_FAILED)
        notify, tls = config.notify, Tls.of_notify(config.notify)
        self._addresses = [
            _Address(Receiver("notify.alertmanager", url, tls, notify.alertmanager_headers_file))
            for url in notify.alertmanager
        ]

    async def post_due(self) -> None:
        """Post the state to each address that has not got it, or got it `RESYNC_S` ago.

        Raises
        ------
        RetryError, OperatorError
            Postgres is not available, or this monitor does not lead any more.
        """
        if not self._addresses:
            return
        now_s = self._clock.monotonic_s()
        async with self._database.begin() as connection:
            await self._fence(connection)
            mark = await alert_mark(connection)
            due = [
                address
                for address in self._addresses
                if now_s >= address.next_s or (address.mark != mark and not address.fails)
            ]
            if not due:
                return
            current, ended = await current_alerts(connection, ENDED_FOR)
        body = encode(current, ended, self._config, self._clock.now())
        await asyncio.gather(*(self._post(address, body, mark) for address in due))

    def close(self) -> None:
        """Start no other request."""
        for address in self._addresses:
            address.receiver.close()

    async def _post(self, one: _Address, body: bytes, mark: tuple[int, int, int]) -> None:
        failure = await one.receiver.post(_PATH, body)
        now_s = self._clock.monotonic_s()
        if failure is None:
            if one.fails:
                _LOG.info("%s accepts alerts again", one.receiver.name)
            one.fails, one.mark, one.next_s = False, mark, now_s + RESYNC_S
            one.backoff.reset()
            self._accepted.add(1, {"receiver": "alertmanager"})
            return
        if not one.fails:
            _LOG.error("%s did not accept the alerts: %s; retrying", one.receiver.name, failure.text)
        one.fails, one.next_s = True, now_s + one.backoff.next_s()
        self._failed.add(1, {"receiver": "alertmanager", "reason": failure.reason.value})


def encode(
    current: Sequence[AlertFact], ended: Sequence[tuple[AlertFact, Ended]], config: Config, now: datetime
) -> bytes:
    """Return the body for Alertmanager: the alerts that are open, and the label sets that ended lately."""
    lasting = [
        Ended(alert_id=alert.id, severity=alert.severity, escalations=alert.escalations, ended_at=now + LASTS)
        for alert in current
    ]
    states = [*zip(current, lasting, strict=True), *ended]
    return msgspec.json.encode([_row(alert, state, config, now) for alert, state in states])


def _row(alert: AlertFact, state: Ended, config: Config, now: datetime) -> dict[str, Any]:
    name, kind = _NAMES[state.severity]
    text = alert.plain(partial(alert_link, config))
    if alert.mitigation:
        text = f"{mitigated(alert)}\n{text}"
    text = unmarked(text, config.web.url)
    summary, _, rest = text.partition("\n")
    acknowledgement, link = alert.acknowledged, alert_page(config, alert.id)
    labels = {
        "alertname": name,
        "severity": kind,
        "model": plain(alert.model),
        "version": plain(alert.version),
        "slice": plain(alert.slice),
        "alert": str(alert.id),
        **({"escalation": str(state.escalations)} if state.escalations else {}),
    }
    annotations = {
        "summary": summary,
        "description": rest.lstrip("\n"),
        **({"runbook_url": config.notify.runbook_url} if config.notify.runbook_url else {}),
        **({"page": link} if link else {}),
        **(
            {"acknowledged": unmarked(plain(f"{acknowledgement.by}: {acknowledgement.reason}"))}
            if acknowledgement
            else {}
        ),
        **({"ended": alert.ending} if alert.ending else {}),
        **({"incident": str(alert.incident)} if alert.incident is not None else {}),
    }
    return {
        "labels": {key: value for key, value in labels.items() if value},
        "annotations": annotations,
        "startsAt": min(alert.opened_at, state.ended_at, now).astimezone(UTC).isoformat(),
        "endsAt": state.ended_at.astimezone(UTC).isoformat(),
        "generatorURL": link,
    }
