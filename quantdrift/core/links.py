"""Links that alerts, events and reports carry: to the live page, and to the runbook of alerts.

They consist of the configured address and of numbers, so that no name from the wire is part of a link.
"""

from quantdrift.core.config.schema import Config

RUNBOOK = "docs/how-to/alerts.md"


def alert_page(config: Config, alert_id: int) -> str:
    """Return the address of an alert's page; empty if `web.url` is not set."""
    return _page(config, f"alert/{alert_id}")


def slice_page(config: Config, model_version_id: int, slice_id: int) -> str:
    """Return the address of the page of a slice in a version of a model; empty if `web.url` is not set."""
    return _page(config, f"slice/{model_version_id}/{slice_id}")


def runbook(config: Config) -> str:
    """Return the link to the runbook, or the name of its page in the documentation."""
    return config.notify.runbook_url or RUNBOOK


def _page(config: Config, path: str) -> str:
    base = config.web.url.rstrip("/")
    return f"{base}/{path}" if base else ""
