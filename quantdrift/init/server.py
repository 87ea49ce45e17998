"""What an inference server says of itself: its protocol and its models."""

import json
import socket
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

import msgspec

from quantdrift.core.config.address import read_address
from quantdrift.core.records import Protocol
from quantdrift.core.text import plain

_TIMEOUT_S: Final = 3.0
_MOST_BYTES: Final = 1 << 20
_MOST_MODELS: Final = 64
_OPENAI: Final = (
    Protocol.OPENAI_CHAT,
    Protocol.OPENAI_COMPLETIONS,
    Protocol.OPENAI_EMBEDDINGS,
    Protocol.OPENAI_RESPONSES,
    Protocol.ANTHROPIC_MESSAGES,  # vLLM, llama.cpp and SGLang have it beside OpenAI's
)
_OLLAMA: Final = (Protocol.OLLAMA_CHAT, Protocol.OLLAMA_GENERATE)


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a server has, with the outputs that it names, if it names any."""

    name: str
    outputs: tuple[str, ...] = ()


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """An inference server, as it describes itself.

    Parameters
    ----------
    name
        What it calls itself; may be empty.
    protocols
        The protocols that it speaks, as far as it answers.
    models
        Those that it lists.
    """

    name: str = ""
    protocols: tuple[Protocol, ...] = ()
    models: tuple[ServedModel, ...] = ()


def accepts(backend: str) -> bool:
    """Return whether anything accepts connections at an address HOST:PORT, in whatever protocol."""
    address = read_address(backend)
    try:
        socket.create_connection((address.host, address.port), _TIMEOUT_S).close()
    except OSError:
        return False
    return True


def ask_server(backend: str, expected: tuple[str, ...] = ()) -> Server | None:
    """Ask a server for its protocol and its models; None: nothing answers there.

    Parameters
    ----------
    backend
        HOST:PORT.
    expected
        Names of models to ask for where the server has no list.
    """
    url = f"http://{backend}"
    server = _document(f"{url}/v2")
    if isinstance(server, dict):
        names = _listed(_document(f"{url}/v2/repository/index", post=True))
        names = names or _listed(_document(f"{url}/v2/models"))  # of KServe's model server
        models = [_of_open_inference(url, name) for name in dict.fromkeys([*filter(None, names), *expected])]
        return Server(
            name=" ".join(filter(None, (_text(server, "name"), _text(server, "version")))),
            protocols=(Protocol.OIP_REST,),
            models=tuple(model for model in models[:_MOST_MODELS] if model is not None),
        )
    listed = _document(f"{url}/v1/models")
    if isinstance(listed, dict) and isinstance(listed.get("data"), list):
        more = _OLLAMA if isinstance(_document(f"{url}/api/tags"), dict) else ()
        return Server(protocols=(*_OPENAI, *more), models=_named(_listed(listed["data"])))
    if isinstance(listed, dict) and isinstance(listed.get("models"), list):
        return Server(protocols=(Protocol.KSERVE_V1,), models=_named(_listed(listed)))
    if _takes_posts(f"{url}/v1/chat/completions"):  # LitServe has no list
        return Server(protocols=_OPENAI)
    ping = _document(f"{url}/ping")
    if isinstance(ping, dict) and "status" in ping:
        return Server(name="TorchServe", protocols=(Protocol.TORCHSERVE,))
    return None if _document(f"{url}/") is _SILENT else Server()


_SILENT: Final = object()


def _listed(document: Any) -> list[str]:
    """Return the names of the models in a list, or in the list `models` of a document; of an entry its name or its id."""
    entries = document.get("models") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        return []
    return [
        plain(entry) if isinstance(entry, str) else _text(entry, "name") or _text(entry, "id")
        for entry in entries
    ]


def _takes_posts(url: str) -> bool:
    """Return whether a path is there for POST: asked by GET, which changes nothing, the server says so."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S):  # noqa: S310 - http
            return False
    except urllib.error.HTTPError as error:
        error.close()
        return error.code == HTTPStatus.METHOD_NOT_ALLOWED
    except OSError:
        return False


def _document(url: str, *, post: bool = False) -> Any:
    """Return a JSON document of the server, None if it gives another answer, `_SILENT` if nothing answers."""
    request = urllib.request.Request(url, b"{}" if post else None, {"Content-Type": "application/json"})  # noqa: S310 - http
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - http
            return json.loads(answer.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        error.close()
        return None
    except OSError:
        return _SILENT
    except ValueError:
        return None


def _of_open_inference(url: str, name: str) -> ServedModel | None:
    metadata = _document(f"{url}/v2/models/{quote(name, safe='')}")
    if not isinstance(metadata, dict):
        return None
    outputs = metadata.get("outputs")
    return ServedModel(
        name=plain(name),
        outputs=tuple(_text(output, "name") for output in outputs if isinstance(output, dict))
        if isinstance(outputs, list)
        else (),
    )


def _named(names: list[str]) -> tuple[ServedModel, ...]:
    return tuple(ServedModel(name=name) for name in dict.fromkeys(names[:_MOST_MODELS]) if name)


def _text(document: Any, name: str) -> str:
    value = document.get(name) if isinstance(document, dict) else None
    return plain(value) if isinstance(value, str) else ""
