"""Links that an alert carries: to its page and to the runbook."""

from quantdrift.core.config.schema import Config

RUNBOOK = "docs/how-to/alerts.md"


def page_link(config: Config, alert_id: int) -> str:
    """Return the address of an alert's page; empty if `web.url` is not set."""
    base = config.web.url.rstrip("/")
    return f"{base}/alert/{alert_id}" if base else ""


def runbook(config: Config) -> str:
    """Return the link to the runbook, or the name of its page in the documentation."""
    return config.notify.runbook_url or RUNBOOK
