"""The demo's configuration names the demo's files."""

from pathlib import Path

import pytest

import quantdrift.demo
from quantdrift.core.config.load import load
from quantdrift.demo.model import NAME, REFERENCE
from quantdrift.demo.scans import Scanner
from quantdrift.demo.services import SCANNER_HEADER, VERSION, Ports
from quantdrift.demo.traffic import READER_HEADER

_CONFIG = Path(quantdrift.demo.__file__).parent / "config.toml"


@pytest.mark.unit
def test_the_demos_configuration_has_the_model_and_headers_that_the_demo_sends() -> None:
    """Names on the wire, in the files and in the configuration are the same."""
    config = load(_CONFIG, environment={})
    model = config.model(NAME)
    assert model is not None
    (reference,) = model.references
    assert Path(reference.path) == _CONFIG.parent / "models" / REFERENCE
    assert VERSION.startswith(reference.versions[0].removesuffix("*"))
    (rule,) = config.slices
    assert rule.header == SCANNER_HEADER
    assert set(rule.values) == set(Scanner)
    (stratum,) = config.sampling.header_strata
    assert stratum.headers == {SCANNER_HEADER: Scanner.ARCHIVE}
    assert stratum.rate == 1.0
    assert config.sampling.sticky_header == READER_HEADER
    assert READER_HEADER in config.capture.headers


@pytest.mark.integration
def test_the_ports_reach_the_configuration_by_the_environment() -> None:
    """Each listener has a free port of its own, and the template stays as it is."""
    ports = Ports.free()
    assert len({ports.model, ports.sidecar, *ports.admin()}) == 5
    config = load(_CONFIG, environment=ports.overrides("http://127.0.0.1:4317"))
    assert config.sidecar.listen == f"127.0.0.1:{ports.sidecar}"
    assert config.sidecar.backend == f"127.0.0.1:{ports.model}"
    assert config.sidecar.admin == f"127.0.0.1:{ports.sidecar_admin}"
    assert config.shadow.admin == f"127.0.0.1:{ports.shadow_admin}"
    assert config.monitor.admin == f"127.0.0.1:{ports.monitor_admin}"
    assert config.telemetry.otlp_endpoint == "http://127.0.0.1:4317"
