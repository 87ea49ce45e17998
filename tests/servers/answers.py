"""What a server's own clients get from it through the relay."""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantdrift.core.records import Exchange
from tests.servers.environment import HERE
from tests.servers.passage import MARK, Passage
from tests.servers.server import Server
from tests.servers.tensors import texts

Asked = Mapping[str, tuple[str, dict[str, Any]]]


class Held:
    """An exchange by the names of its tensors."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.inputs = {tensor.name: tensor for tensor in exchange.inputs}
        self.outputs = {tensor.name: tensor for tensor in exchange.outputs}

    def document(self, name: str) -> Any:
        """Return the JSON document in an input of one text."""
        (text,) = texts(self.inputs[name])
        return json.loads(text)

    def heard(self) -> list[str]:
        """Return the text of each choice."""
        return texts(self.outputs["text"])


class Answers:
    """The answers by name; no byte has changed on the way.

    Parameters
    ----------
    server
        Its environment holds the client.
    way
        The relay before it.
    asked
        To each name the kind (`chat`, `completions`, `embeddings`, or as the script says) and the client's arguments.
    script
        It asks.
    """

    def __init__(
        self, server: Server, way: Passage, asked: Asked, script: Path = HERE / "openai_ask.py"
    ) -> None:
        self._way = way
        self._mark = secrets.token_hex(8)
        self.got = server.environment.run(script, str(way.port), MARK, self._mark, json.dumps(asked))
        assert way.check()

    def captured(self, name: str) -> Held:
        """Return what the stream holds of this request."""
        (exchange,) = self._way.captured(f"{self._mark}-{name}")
        return Held(exchange)

    def deltas(self, name: str, index: int = 0) -> list[dict[str, Any]]:
        """Return the pieces of one choice of a streamed chat."""
        choices = [choice for chunk in self.got[name] for choice in chunk["choices"]]
        return [choice["delta"] for choice in choices if choice["index"] == index]

    def said(self, name: str, index: int = 0) -> str:
        """Return what one choice of a chat says, streamed or not."""
        answer = self.got[name]
        if isinstance(answer, list):
            return "".join(delta.get("content") or "" for delta in self.deltas(name, index))
        text: str = answer["choices"][index]["message"]["content"]
        return text
