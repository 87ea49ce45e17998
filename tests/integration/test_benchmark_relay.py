"""The ways that `python -m benchmarks.relay` compares: real servers, driven by the real load generators."""

import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks import load, ways
from benchmarks.payload import Size, Wire, request, response, write_script
from benchmarks.ways import Way

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(ways.missing()), reason=f"needs the packages {', '.join(ways.missing())}"),
]


@pytest.mark.release
def test_every_compared_proxy_gives_the_same_answers(tmp_path: Path) -> None:
    """nginx, its mirror and aiohttp's proxy hand on the backend's answer; wrk counts no failure."""
    with ExitStack() as stack:
        backend = stack.enter_context(ways.backend(tmp_path / "backend"))["http"]
        open_ways: list[Way] = [
            backend,
            stack.enter_context(ways.nginx(tmp_path / "nginx", backend.port)),
            stack.enter_context(ways.nginx(tmp_path / "mirror", backend.port, mirror=True)),
            stack.enter_context(ways.aiohttp_proxy(backend.port)),
        ]
        script = write_script(request(Size.SMALL, Wire.BINARY), tmp_path, "small")
        for way in open_ways:
            for wire in (Wire.JSON, Wire.BINARY):
                payload = request(Size.LARGE, wire)
                sent = urllib.request.Request(way.url(wire), payload.body, payload.headers)
                with urllib.request.urlopen(sent, timeout=20) as answer:
                    assert answer.read() == response(wire).body
                    told = {name.lower(): value for name, value in answer.headers.items()}
                    assert response(wire).headers.items() <= told.items()
            before = ways.cpu_s(way.serving)
            seen = load.wrk(script, way.url(Wire.BINARY), connections=2, seconds=1.0)
            assert seen.requests > 0
            assert seen.failed == 0
            assert 0 < seen.p50_ms <= seen.p99_ms
            assert ways.cpu_s(way.serving) > before


def test_grpc_passes_nginx_and_is_counted(tmp_path: Path) -> None:
    """h2load's text and log are those that are read; every answer has status 200."""
    with ExitStack() as stack:
        backend = stack.enter_context(ways.backend(tmp_path / "backend"))["grpc"]
        nginx = stack.enter_context(ways.nginx(tmp_path / "nginx", backend.port, grpc=True))
        payload = request(Size.SMALL, Wire.GRPC)
        seen = load.h2load(payload, nginx.url(Wire.GRPC), connections=2, streams=2, seconds=1.0)
    assert seen.requests > 0
    assert seen.failed == 0
    assert 0 < seen.p50_ms <= seen.p99_ms


@pytest.mark.release
def test_all_processes_of_the_relay_are_measured(tmp_path: Path, nats_url: str) -> None:
    """Its counts are read, and requests that it told to be inference are those that were sent."""
    with ExitStack() as stack:
        backend = stack.enter_context(ways.backend(tmp_path / "backend"))["http"]
        relay = stack.enter_context(
            ways.sidecar(tmp_path / "sidecar", backend.port, rate=0.0, capped=True, nats_url=nats_url)
        )
        script = write_script(request(Size.SMALL, Wire.JSON), tmp_path, "small")
        seen = load.wrk(script, relay.url(Wire.JSON), connections=2, seconds=1.0)
        assert seen.failed == 0
        # wrk ends in the middle of a request on each connection.
        assert seen.requests <= relay.counts()[ways.OFFERED] <= seen.requests + 2
        assert ways.cpu_s(relay.serving) > 0.0
        assert ways.rss_mb((*relay.serving, *relay.capturing)) > 10.0
