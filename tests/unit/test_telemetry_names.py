"""The Prometheus names that the documentation speaks of are those that /metrics shows."""

import re
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, generate_latest

from quantdrift.core import telemetry
from quantdrift.core.telemetry import Instrument, InstrumentKind, Telemetry

pytestmark = pytest.mark.unit

DOCS = Path(__file__).parents[2] / "docs"
_NAME = re.compile(r"\bquantdrift_(?:sidecar|shadow|monitor|slice|stream|progress)_\w+")


def test_every_metric_named_in_the_docs_is_exposed_under_that_name() -> None:
    """Each declared instrument is fed once and scraped; a rule copied from the docs matches something."""
    meter = Telemetry("test")
    try:
        for one in vars(telemetry).values():
            if not isinstance(one, Instrument):
                continue
            if one.kind is InstrumentKind.COUNTER:
                meter.counter(one).add(1)
            elif one.kind is InstrumentKind.HISTOGRAM:
                meter.histogram(one).record(1.0)
            else:
                meter.observe(one, lambda: [(1.0, {})])
        exposed = set(
            re.findall(r"^(quantdrift_\w+)", generate_latest(REGISTRY).decode(), flags=re.MULTILINE)
        )
    finally:
        meter.close()
    named = {
        name: page.relative_to(DOCS)
        for page in DOCS.rglob("*.md")
        for name in _NAME.findall(page.read_text())
    }
    assert len(named) >= 5
    assert not {name: str(page) for name, page in named.items() if name not in exposed}


def test_resource_attributes_come_from_the_variable_of_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No option of ours repeats `OTEL_RESOURCE_ATTRIBUTES`; the name of the service stays ours."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=prod,service.name=other")
    meter = Telemetry("quantdrift-monitor")
    meter.close()
    assert meter.resource.attributes["deployment.environment.name"] == "prod"
    assert meter.resource.attributes["service.name"] == "quantdrift-monitor"
