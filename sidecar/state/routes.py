"""Which requests are inference, and in which protocol: told by method and path alone.

The relay asks for every request and decodes nothing; the capture process asks again for those that were taken.
"""

import re
from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

import msgspec

from quantdrift.core.records import Protocol

# Named parts: the model and its version, where the path tells them. No part can backtrack far: paths are hostile.
_PATHS = {
    Protocol.OIP_REST: r"/v2/models/(?P<model>[^/?]+)(?:/versions/(?P<version>[^/?]+))?/infer",
    Protocol.OIP_GRPC: r"/inference\.GRPCInferenceService/ModelInfer",
    Protocol.OIP_GRPC_STREAM: r"/inference\.GRPCInferenceService/ModelStreamInfer",
    Protocol.KSERVE_V1: r"/v1/models/(?P<model>[^/?:]+)(?:/versions/(?P<version>[^/?:]+))?:predict",
    Protocol.TORCHSERVE: r"/predictions/(?P<model>[^/?]+)(?:/(?P<version>[^/?]+))?",
    Protocol.OPENAI_CHAT: r"(?:/openai)?/v1/chat/completions",
    Protocol.OPENAI_COMPLETIONS: r"(?:/openai)?/v1/completions",
    Protocol.OPENAI_EMBEDDINGS: r"(?:/openai)?/v1/embeddings",
}
_SHOWN = {
    Protocol.OIP_REST: "/v2/models/NAME/infer",
    Protocol.OIP_GRPC: "gRPC ModelInfer",
    Protocol.OIP_GRPC_STREAM: "gRPC ModelStreamInfer",
    Protocol.KSERVE_V1: "/v1/models/NAME:predict",
    Protocol.TORCHSERVE: "/predictions/NAME",
    Protocol.OPENAI_CHAT: "/v1/chat/completions",
    Protocol.OPENAI_COMPLETIONS: "/v1/completions",
    Protocol.OPENAI_EMBEDDINGS: "/v1/embeddings",
}
# TorchServe takes any method, and its own examples send files with PUT.
_BY_PUT = frozenset({Protocol.TORCHSERVE})
_NAMED = {protocol: re.compile(path) for protocol, path in _PATHS.items()}


_MODEL = re.compile(rb"/(?:v1/models/([^/:]+)|(?:v2/models|predictions)/([^/]+))")


def known_requests(protocols: Iterable[Protocol]) -> list[str]:
    """Return for people which requests are inference in these protocols."""
    return [_SHOWN[protocol] for protocol in protocols]


def model_in(path: bytes) -> str:
    """Return the model that a path names, or an empty string: then the body may."""
    match = _MODEL.match(path)
    return unquote_to_bytes(match[1] or match[2]).decode(errors="replace") if match else ""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """What method and path of a request tell.

    Parameters
    ----------
    protocol
        How its body is to be read.
    model, version
        Still percent-encoded; empty where they are told elsewhere.
    """

    protocol: Protocol
    model: str
    version: str


class Routes:
    """The requests that are looked at.

    Parameters
    ----------
    protocols
        Those that the servers behind this sidecar speak. All others pass uncounted.
    """

    def __init__(self, protocols: Iterable[Protocol]) -> None:
        self._protocols = tuple(protocols)
        self._by_post = _pattern(self._protocols)
        self._by_put = _pattern(protocol for protocol in self._protocols if protocol in _BY_PUT)

    def find(self, method: bytes, target: bytes) -> bytes | None:
        """Return the path of an inference request, without authority and query, or None where it is none."""
        if method == b"POST":
            match = self._by_post.fullmatch(target)
        elif method == b"PUT":
            match = self._by_put.fullmatch(target)
        else:
            return None
        return None if match is None else match[1]

    def named(self, method: str, path: str) -> Route | None:
        """Return what a request tells by its path, which `find` has returned, or None where it is no inference."""
        for protocol in self._protocols:
            if method != "POST" and not (method == "PUT" and protocol in _BY_PUT):
                continue
            match = _NAMED[protocol].fullmatch(path)
            if match is not None:
                told = match.groupdict()
                return Route(
                    protocol=protocol, model=told.get("model") or "", version=told.get("version") or ""
                )
        return None


def _pattern(protocols: Iterable[Protocol]) -> re.Pattern[bytes]:
    """Return what finds the path of any of these protocols in a request's target."""
    unnamed = (re.sub(r"\?P<[a-z]+>", "?:", _PATHS[protocol]) for protocol in protocols)
    paths = "|".join(f"(?:{path})" for path in unnamed) or r"(?!)"
    return re.compile(rf"(?:https?://[^/?]*)?({paths})(?:\?.*)?".encode(), re.DOTALL)
