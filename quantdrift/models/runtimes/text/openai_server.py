"""The client of an OpenAI-compatible server that serves a reference, and the classification of its failures."""

import hashlib
import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.text import misfit
from quantdrift.models.language.scoring import replay_error
from quantdrift.models.runtimes.protocol import Artefact, Provenance
from quantdrift.models.runtimes.registry import RuntimeRequest
from quantdrift.models.runtimes.remote.http_client import HttpServer, refuse
from quantdrift.models.runtimes.remote.protocol import UNVERIFIED, Refusal, RefusedError

_LOG = logging.getLogger(__name__)
_JSON: Final = {"Content-Type": "application/json"}

Response = TypeVar("Response")


class _ListedModel(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[_ListedModel]


class _Version(msgspec.Struct):
    version: str = ""


class OpenAIServer:
    """The client for one model at a server. The model's precision cannot be checked: it is `unverified`.

    Attributes
    ----------
    name
        The server's name of the model.
    """

    def __init__(self, request: RuntimeRequest) -> None:
        self._reference = request.reference
        self._where = request.reference.where(request.model.name)
        self._server = HttpServer(request)
        self.name = request.reference.model or request.model.name

    def opened(self, probe: Callable[[], Response]) -> tuple[Response, Artefact, Provenance, int | None]:
        """Return the result of `probe`, the descriptions of the model, and its longest context in tokens, None if unknown.

        Raises
        ------
        OperatorError
            The server does not know the model, or refuses access; or an error of `probe`.
        RetryError
            The server is unreachable, or does not answer.
        """
        reference = self._reference
        try:
            model = self._served_model()
            result = probe()
            version = self._version()
        except TimeoutError as error:
            raise RetryError(f"{self._where} does not answer within {reference.timeout_s:g} s") from error
        except RefusedError as error:
            raise OperatorError(
                f"the server of the reference {self._where} refuses: {error}. Check `url`, `model` and the token in "
                "[[models.references]]"
            ) from error
        # It stands in for the digest of an artefact that cannot be read.
        description = msgspec.json.encode([model.id, model.root, model.max_model_len])
        artefact = Artefact(
            path=self._where,
            digest=reference.digest.rpartition(":")[2] or hashlib.sha256(description).hexdigest(),
            precision="+".join([UNVERIFIED, *sorted(reference.allow_reduced_precision)]),
            opset=0,
            producer=model.root or model.id,
        )
        provenance = Provenance(
            runtime=reference.runtime.value, version=version, provider="remote", device=UNVERIFIED
        )
        _LOG.info("reference %s: at an OpenAI-compatible server, unverified", self._where)
        return result, artefact, provenance, model.max_model_len

    def ask(self, method: str, path: str, kind: type[Response], question: Any = None) -> Response:
        """Return the answer.

        Raises
        ------
        RefusedError
            The server refuses, fails, or its answer cannot be read.
        RetryError
            It is unreachable.
        TimeoutError
            It takes too long.
        """
        body = b"" if question is None else msgspec.json.encode(question)
        status, _, answer = self._server.ask(method, path, body, _JSON if body else None)
        refuse(status, answer)
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            raise unreadable(misfit(error)) from error

    def guarded(self, ask: Callable[[], Response]) -> Response:
        """Call `ask` for an exchange, and classify its errors.

        Raises
        ------
        QuarantineError
            Reason `replay`: the server refuses the exchange, fails on it although the model is ready, does not answer in
            time, or its answer cannot be read.
        RetryError
            The server is unreachable, does not have the model, or refuses access.
        """
        try:
            return ask()
        except TimeoutError as error:
            # A smaller batch may be quicker; if the server hangs altogether, SelfTestedRuntime finds out and waits.
            raise replay_error(f"no answer within {self._reference.timeout_s:g} s") from error
        except OperatorError as error:  # a token that cannot be read: nothing is wrong with the exchange
            raise RetryError(f"{self._where}: {error}") from error
        except RefusedError as error:
            # The server's message may quote users' texts, which must not get into logs or the database.
            if error.kind is Refusal.ACCESS or (error.kind is Refusal.FAILURE and not self.is_ready()):
                raise RetryError(f"{self._where}: {error.brief}") from error
            raise replay_error(f"{error.brief}; see the server's log for the cause") from error

    def close(self) -> None:
        """Close the connection."""
        self._server.close()

    def _served_model(self) -> _ListedModel:
        models = self.ask("GET", "/v1/models", _Models).data
        served = next((model for model in models if model.id == self.name), None)
        if served is None:
            raise OperatorError(
                f"the server of the reference {self._where} serves {[model.id for model in models]}: `{self.name}` is not "
                "among them. Set `model` in [[models.references]]"
            )
        return served

    def _version(self) -> str:
        try:
            return self.ask("GET", "/version", _Version).version  # vLLM's; not every server has it
        except RefusedError:
            return ""

    def is_ready(self) -> bool:
        """Return whether the server answers, and has the model."""
        try:
            self._served_model()
        except (RefusedError, TimeoutError, OperatorError):
            return False
        return True


def unreadable(detail: str) -> RefusedError:
    """Return the error for an answer that does not follow the protocol."""
    return RefusedError(f"the answer does not follow the protocol: {detail}", Refusal.INPUT)
