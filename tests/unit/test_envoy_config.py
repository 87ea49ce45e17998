"""What is there to be copied into an Envoy says what the pages say, by itself and in a mesh."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.unit

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def read(path: str) -> Any:
    """Return a YAML file's content."""
    return yaml.safe_load((DEPLOY / path).read_text(encoding="utf-8"))


def by_itself() -> tuple[Any, Any]:
    """Return filter and cluster of the whole configuration."""
    resources = read("envoy/envoy.yaml")["static_resources"]
    filters = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    clusters = {cluster["name"]: cluster for cluster in resources["clusters"]}
    assert [each["name"] for each in filters] == ["quantdrift", "envoy.filters.http.router"]
    return filters[0], clusters["quantdrift"]


def in_a_mesh() -> tuple[Any, Any]:
    """Return what Istio is told to add."""
    patches = {
        patch["applyTo"]: patch["patch"]
        for patch in read("kubernetes/envoy/envoyfilter.yaml")["spec"]["configPatches"]
    }
    assert patches["HTTP_FILTER"]["operation"] == "INSERT_BEFORE"
    return patches["HTTP_FILTER"]["value"], patches["CLUSTER"]["value"]


@pytest.mark.parametrize("configuration", [by_itself, in_a_mesh])
def test_envoy_sends_everything_and_waits_for_no_answer(configuration: Any) -> None:
    """Whole exchanges, in observability mode, whatever becomes of the processor."""
    options = configuration()[0]["typed_config"]
    assert options["observability_mode"] is options["failure_mode_allow"] is True
    modes = options["processing_mode"]
    assert {name: mode for name, mode in modes.items() if "body" in name} == {
        "request_body_mode": "STREAMED",
        "response_body_mode": "STREAMED",
    }
    assert {mode for name, mode in modes.items() if "body" not in name} == {"SEND"}
    assert len(modes) == 6


def test_the_mesh_configuration_is_the_same() -> None:
    """Filter and cluster differ in nothing but that the address needs no look-up."""
    assert in_a_mesh()[0] == by_itself()[0]
    assert in_a_mesh()[1] == by_itself()[1] | {"type": "STATIC"}


def test_envoy_finds_the_port_that_the_sidecar_opens() -> None:
    """And the sidecar opens no other for traffic."""
    config = tomllib.loads((DEPLOY / "envoy" / "config.toml").read_text(encoding="utf-8"))
    (endpoint,) = by_itself()[1]["load_assignment"]["endpoints"][0]["lb_endpoints"]
    address = endpoint["endpoint"]["address"]["socket_address"]
    assert config["intake"]["ext_proc"] == f"{address['address']}:{address['port_value']}"
    assert config["sidecar"]["listen"] == ""
