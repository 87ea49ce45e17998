"""Which requests are inference, and in which protocol: told by method and path alone.

The relay asks for every request and decodes nothing; the capture process asks again for those that were taken.
"""

import re
from collections.abc import Iterable

import msgspec

from quantdrift.core.records import Protocol

# Named parts: the model and its version, where the path tells them. No part can backtrack far: paths are hostile.
_PATHS = {
    Protocol.OIP_REST: r"/v2/models/(?P<model>[^/?]+)(?:/versions/(?P<version>[^/?]+))?/infer",
    Protocol.OIP_GRPC: r"/inference\.GRPCInferenceService/ModelInfer",
    Protocol.OIP_GRPC_STREAM: r"/inference\.GRPCInferenceService/ModelStreamInfer",
    Protocol.KSERVE_V1: r"/v1/models/(?P<model>[^/?:]+):predict",
    Protocol.TORCHSERVE: r"/predictions/(?P<model>[^/?]+)(?:/(?P<version>[^/?]+))?",
    Protocol.OPENAI_CHAT: r"(?:/openai)?/v1/chat/completions",
    Protocol.OPENAI_COMPLETIONS: r"(?:/openai)?/v1/completions",
    Protocol.OPENAI_EMBEDDINGS: r"(?:/openai)?/v1/embeddings",
}
_NAMED = {protocol: re.compile(path) for protocol, path in _PATHS.items()}


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
        unnamed = (re.sub(r"\?P<[a-z]+>", "?:", _PATHS[protocol]) for protocol in self._protocols)
        paths = "|".join(f"(?:{path})" for path in unnamed) or r"(?!)"
        self._any = re.compile(rf"(?:https?://[^/?]*)?({paths})(?:\?.*)?".encode(), re.DOTALL)

    def find(self, method: bytes, target: bytes) -> bytes | None:
        """Return the path of an inference request, without authority and query, or None where it is none."""
        match = self._any.fullmatch(target) if method == b"POST" else None
        return None if match is None else match[1]

    def named(self, method: str, path: str) -> Route | None:
        """Return what a request tells by its path, which `find` has returned, or None where it is no inference."""
        if method != "POST":
            return None
        for protocol in self._protocols:
            match = _NAMED[protocol].fullmatch(path)
            if match is not None:
                told = match.groupdict()
                return Route(
                    protocol=protocol, model=told.get("model") or "", version=told.get("version") or ""
                )
        return None
