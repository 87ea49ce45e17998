"""Which requests are inference: the relay and the capture process must agree."""

from urllib.parse import unquote

import pytest

from quantdrift.core.records import Protocol
from quantdrift.sidecar.state.routes import Route, Routes, model_in

pytestmark = pytest.mark.unit

ALL = Routes(Protocol)


@pytest.mark.parametrize(
    ("path", "protocol", "model", "version"),
    [
        ("/v2/models/a/infer", Protocol.OIP_REST, "a", ""),
        ("/v2/models/a%2Fb%20c/versions/1.2/infer", Protocol.OIP_REST, "a%2Fb%20c", "1.2"),
        ("/inference.GRPCInferenceService/ModelInfer", Protocol.OIP_GRPC, "", ""),
        ("/inference.GRPCInferenceService/ModelStreamInfer", Protocol.OIP_GRPC_STREAM, "", ""),
        ("/v1/models/a:predict", Protocol.KSERVE_V1, "a", ""),
        ("/v1/models/a/versions/7:predict", Protocol.KSERVE_V1, "a", "7"),
        ("/predictions/a", Protocol.TORCHSERVE, "a", ""),
        ("/predictions/a/2.0", Protocol.TORCHSERVE, "a", "2.0"),
        ("/v1/chat/completions", Protocol.OPENAI_CHAT, "", ""),
        ("/v1/responses", Protocol.OPENAI_RESPONSES, "", ""),
        ("/v1/messages", Protocol.ANTHROPIC_MESSAGES, "", ""),
        ("/api/chat", Protocol.OLLAMA_CHAT, "", ""),
        ("/api/generate", Protocol.OLLAMA_GENERATE, "", ""),
        ("/v2/models/a/generate", Protocol.GENERATE, "a", ""),
        ("/v2/models/a/versions/2/generate_stream", Protocol.GENERATE, "a", "2"),
        ("/openai/v1/completions", Protocol.OPENAI_COMPLETIONS, "", ""),
        ("/v1/embeddings", Protocol.OPENAI_EMBEDDINGS, "", ""),
    ],
)
def test_an_inference_request_is_found_by_its_path(
    path: str, protocol: Protocol, model: str, version: str
) -> None:
    """Query and authority are no part of it; both readers find the same."""
    for target in (path, path + "?a=/v2/models/b/infer", "http://host:1" + path):
        assert ALL.find(b"POST", target.encode()) == path.encode()
    assert ALL.route("POST", path) == Route(protocol=protocol, model=model, version=version)


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/v2/models/a%2Fb/infer", "a/b"),
        ("/v2/models/a:b/infer", "a:b"),
        ("/v2/models/a/versions/7/infer", "a"),
        ("/v1/models/a:predict", "a"),
        ("/v1/models/a/versions/7:predict", "a"),
        ("/predictions/a:b/2.0", "a:b"),
        ("/v1/chat/completions", ""),
    ],
)
def test_the_relay_names_the_model_that_the_capture_process_names(path: str, model: str) -> None:
    """It counts by model what it takes: a name cut short would count for another."""
    assert model_in(path.encode()) == model
    route = ALL.route("POST", path)
    assert route is not None
    assert unquote(route.model) == model


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/models/a/infer"),
        ("POST", "/v2/models/a/generate/x"),
        ("POST", "/v2/models//infer"),
        ("POST", "/v1/models/a:explain"),
        ("POST", "/predictions/"),
        ("POST", "/predictions/a/1/2"),
        ("POST", "/v1/chat"),
        ("POST", "/"),
        ("PUT", "/v2/models/a/infer"),
        ("GET", "/predictions/a"),
    ],
)
def test_anything_else_is_not(method: str, path: str) -> None:
    """It passes, and neither reader looks at it."""
    assert ALL.find(method.encode(), path.encode()) is None
    assert ALL.route(method, path) is None


def test_a_file_is_put_to_torchserve() -> None:
    """As `curl -T` does, and TorchServe's own examples."""
    assert ALL.find(b"PUT", b"/predictions/a?b=c") == b"/predictions/a"
    assert ALL.route("PUT", "/predictions/a") == Route(protocol=Protocol.TORCHSERVE, model="a", version="")
    assert Routes([Protocol.OIP_REST]).find(b"PUT", b"/predictions/a") is None


def test_a_protocol_that_is_not_configured_is_not_found() -> None:
    """Where a server speaks one protocol, another one's path may mean anything."""
    one = Routes([Protocol.KSERVE_V1])
    assert one.find(b"POST", b"/v1/models/a:predict") == b"/v1/models/a:predict"
    assert one.find(b"POST", b"/v2/models/a/infer") is None
    assert one.route("POST", "/v2/models/a/infer") is None
    assert Routes([]).find(b"POST", b"") is None
