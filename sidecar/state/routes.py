"""Routes: which requests are inference, and in which protocol, by method and path alone.

The relay checks every request and decodes nothing; the capture process finds the route of sampled requests
again.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from urllib.parse import unquote_to_bytes

import msgspec

from quantdrift.core.errors import OperatorError
from quantdrift.core.plugins import plugin_record
from quantdrift.core.records import Protocol

_LOG = logging.getLogger(__name__)


class ProtocolRoute(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests a protocol of a plug-in takes.

    Parameters
    ----------
    path
        Path of its POST requests, without the query. `{model}` and `{version}` stand for one part of the path each, as in
        `/v1/models/{model}/score`; without `{model}` the body names the model.
    """

    path: str


# The named groups are model and version, if the path has them. No part can backtrack far, since paths are
# hostile.
_PATHS = {
    Protocol.OIP_REST: r"/v2/models/(?P<model>[^/?]+)(?:/versions/(?P<version>[^/?]+))?/infer",
    Protocol.OIP_GRPC: r"/inference\.GRPCInferenceService/ModelInfer",
    Protocol.OIP_GRPC_STREAM: r"/inference\.GRPCInferenceService/ModelStreamInfer",
    Protocol.KSERVE_V1: r"/v1/models/(?P<model>[^/?:]+)(?:/versions/(?P<version>[^/?:]+))?:predict",
    Protocol.TORCHSERVE: r"/predictions/(?P<model>[^/?]+)(?:/(?P<version>[^/?]+))?",
    Protocol.OPENAI_CHAT: r"(?:/openai)?/v1/chat/completions",
    Protocol.OPENAI_COMPLETIONS: r"(?:/openai)?/v1/completions",
    Protocol.OPENAI_EMBEDDINGS: r"(?:/openai)?/v1/embeddings",
    Protocol.OPENAI_RESPONSES: r"(?:/openai)?/v1/responses",
    Protocol.ANTHROPIC_MESSAGES: r"/v1/messages",
    Protocol.OLLAMA_CHAT: r"/api/chat",
    Protocol.OLLAMA_GENERATE: r"/api/generate",
    Protocol.GENERATE: r"/v2/models/(?P<model>[^/?]+)(?:/versions/(?P<version>[^/?]+))?/generate(?:_stream)?",
}
_DISPLAY = {
    Protocol.OIP_REST: "/v2/models/NAME/infer",
    Protocol.OIP_GRPC: "gRPC ModelInfer",
    Protocol.OIP_GRPC_STREAM: "gRPC ModelStreamInfer",
    Protocol.KSERVE_V1: "/v1/models/NAME:predict",
    Protocol.TORCHSERVE: "/predictions/NAME",
    Protocol.OPENAI_CHAT: "/v1/chat/completions",
    Protocol.OPENAI_COMPLETIONS: "/v1/completions",
    Protocol.OPENAI_EMBEDDINGS: "/v1/embeddings",
    Protocol.OPENAI_RESPONSES: "/v1/responses",
    Protocol.ANTHROPIC_MESSAGES: "/v1/messages",
    Protocol.OLLAMA_CHAT: "/api/chat",
    Protocol.OLLAMA_GENERATE: "/api/generate",
    Protocol.GENERATE: "/v2/models/NAME/generate",
}
# TorchServe accepts any method, and its own examples send files with PUT.
_PUT_PROTOCOLS = frozenset({Protocol.TORCHSERVE})
_NONE: Mapping[Protocol, str] = MappingProxyType({})
_MODEL = re.compile(rb"/(?:v1/models/([^/:]+)|(?:v2/models|predictions)/([^/]+))")


def plugin_paths(protocols: Iterable[Protocol]) -> dict[Protocol, str]:
    """Return the paths of those protocols that plug-ins add, whose records are imported for that.

    One that cannot be imported is logged and left out: its requests are relayed and not captured, and the serving path goes on.
    """
    paths = {}
    for protocol in protocols:
        if protocol in _PATHS:
            continue
        try:
            paths[protocol] = plugin_record(protocol, ProtocolRoute).path
        except OperatorError as error:
            _LOG.error("requests of the protocol %s are relayed and not captured: %s", protocol, error)
    return paths


def pattern_of(path: str) -> str:
    """Return a regular expression for the path of a `ProtocolRoute`. It cannot backtrack far, whatever a client sends."""
    parts = re.split(r"(\{model\}|\{version\})", path)
    return "".join(f"(?P<{part[1:-1]}>[^/?]+)" if part[:1] == "{" else re.escape(part) for part in parts)


def known_requests(protocols: Iterable[Protocol], paths: Mapping[Protocol, str] = _NONE) -> list[str]:
    """Return for log messages which requests are inference in these protocols; `paths` as of `Routes`."""
    return [shown for protocol in protocols if (shown := _DISPLAY.get(protocol) or paths.get(protocol))]


def model_in(path: bytes) -> str:
    """Return the model that a path names, or an empty string if only the body may name it."""
    match = _MODEL.match(path)
    return unquote_to_bytes(match[1] or match[2]).decode(errors="replace") if match else ""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The route of a request: what its method and path say.

    Parameters
    ----------
    protocol
        The protocol of its body.
    model, version
        Percent-encoded; empty if the path does not name them.
    """

    protocol: Protocol
    model: str
    version: str


class Routes:
    """The routes of the configured protocols.

    Parameters
    ----------
    protocols
        The protocols of the servers behind this sidecar. Requests in others are not counted.
    paths
        What `plugin_paths` returns of them: a process that serves imports nothing of a plug-in.
    """

    def __init__(self, protocols: Iterable[Protocol], paths: Mapping[Protocol, str] = _NONE) -> None:
        added = {protocol: pattern_of(path) for protocol, path in paths.items()}
        paths = {protocol: _PATHS.get(protocol) or added.get(protocol, "") for protocol in protocols}
        self._patterns = {protocol: re.compile(path) for protocol, path in paths.items() if path}
        self._post_pattern = _pattern(paths.values())
        self._put_pattern = _pattern(path for protocol, path in paths.items() if protocol in _PUT_PROTOCOLS)

    def find(self, method: bytes, target: bytes) -> bytes | None:
        """Return the path of an inference request without authority and query, else None."""
        if method == b"POST":
            match = self._post_pattern.fullmatch(target)
        elif method == b"PUT":
            match = self._put_pattern.fullmatch(target)
        else:
            return None
        return None if match is None else match[1]

    def route(self, method: str, path: str) -> Route | None:
        """Return the route of a request for `path`, as `find` returns it, or None if it is not inference."""
        for protocol, pattern in self._patterns.items():
            if method != "POST" and not (method == "PUT" and protocol in _PUT_PROTOCOLS):
                continue
            match = pattern.fullmatch(path)
            if match is not None:
                parts = match.groupdict()
                return Route(
                    protocol=protocol, model=parts.get("model") or "", version=parts.get("version") or ""
                )
        return None


def _pattern(paths: Iterable[str]) -> re.Pattern[bytes]:
    """Return the pattern that finds any of these paths in a request's target."""
    unnamed = (re.sub(r"\?P<[a-z]+>", "?:", path) for path in paths if path)
    joined = "|".join(f"(?:{path})" for path in unnamed) or r"(?!)"
    return re.compile(rf"(?:https?://[^/?]*)?({joined})(?:\?.*)?".encode(), re.DOTALL)
