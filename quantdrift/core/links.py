"""Links that alerts, events and reports carry to the live page.

They consist of the configured address and of numbers, so that no name from the wire is part of a link.
"""

from quantdrift.core.config.schema import Config


def alert_page(config: Config, alert_id: int) -> str:
    """Return the address of an alert's page; empty if `web.url` is not set."""
    return _page(config, f"alert/{alert_id}")


def alert_link(config: Config, alert_id: int) -> str:
    """Return where an alert can be looked at: its page, or the command that shows it."""
    return alert_page(config, alert_id) or f"quantdrift alerts show {alert_id}"


def incident_page(config: Config, number: int) -> str:
    """Return the address of an incident's page; empty if `web.url` is not set."""
    return _page(config, f"incident/{number}")


def slice_page(config: Config, model_version_id: int, slice_id: int) -> str:
    """Return the address of the page of a slice in a version of a model; empty if `web.url` is not set."""
    return _page(config, f"slice/{model_version_id}/{slice_id}")


def _page(config: Config, path: str) -> str:
    base = config.web.url.rstrip("/")
    return f"{base}/{path}" if base else ""
