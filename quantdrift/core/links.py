"""Links that alerts, events and reports carry to the live page.

They consist of the configured address and of numbers, so that no name from the wire is part of a link.
"""

import re
from urllib.parse import urlsplit

from quantdrift.core.config.schema import Config

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


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


def trace_link(template: str, traceparent: str) -> str:
    """Return the address of a production trace; empty where there is none, or none that is safe to show.

    Parameters
    ----------
    template
        `telemetry.trace_url`, with `{trace_id}`.
    traceparent
        As the client sent it, so not trusted.
    """
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or urlsplit(template).scheme not in {"http", "https"}:
        return ""
    return template.replace("{trace_id}", match[1])


def _page(config: Config, path: str) -> str:
    base = config.web.url.rstrip("/")
    return f"{base}/{path}" if base else ""
