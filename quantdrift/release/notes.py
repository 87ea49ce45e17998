"""Results as notes of the alert that they are about."""

from collections.abc import Mapping
from typing import Any

from quantdrift.core.errors import QuantdriftError
from quantdrift.release.blocking import wait_for
from quantdrift.release.progress import Watch
from quantdrift.release.setting import Setting
from quantdrift.storage.alerts.alerts import AlertFact, FindingKind, add_finding, find_alert


def alert_of(setting: Setting, number: int) -> AlertFact:
    """Return an alert by its number."""
    return wait_for(setting.in_transaction(lambda connection: find_alert(connection, number)))


def add_note(
    setting: Setting, watch: Watch, number: int, *, kind: FindingKind, text: str, details: Mapping[str, Any]
) -> None:
    """Write what was found about an alert as a note; where that is not possible, tell why."""
    try:
        wait_for(
            setting.in_transaction(lambda connection: add_finding(connection, number, kind, text, details))
        )
    except QuantdriftError as error:
        watch.note(f"Alert {number} has no note of this result: {error}")
