"""An OpenAI-compatible server that holds a reference: which model it serves, and whose fault its failures are."""

import hashlib
import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.shadow.language.scoring import replay_error
from quantdrift.shadow.runtimes.protocol import Artefact, Provenance
from quantdrift.shadow.runtimes.registry import RuntimeRequest
from quantdrift.shadow.runtimes.remote.http_client import HttpServer, refuse
from quantdrift.shadow.runtimes.remote.protocol import UNVERIFIED, Refusal, RefusedError

_LOG = logging.getLogger(__name__)
_JSON: Final = {"Content-Type": "application/json"}

Found = TypeVar("Found")


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str = ""


class OpenAIServer:
    """Asks a server of one model. Nothing can be proven of it: it is `unverified`.

    Parameters
    ----------
    opening
        What is configured.

    Attributes
    ----------
    name
        Of the model, there.
    """

    def __init__(self, request: RuntimeRequest) -> None:
        self._reference = request.reference
        self._where = request.reference.where(request.model.name)
        self._server = HttpServer(request)
        self.name = request.reference.model or request.model.name

    def opened(self, probe: Callable[[], Found]) -> tuple[Found, Artefact, Provenance, int | None]:
        """Return what a first question brings, who answers, and the most tokens that the model takes, if told.

        Raises
        ------
        OperatorError
            The server does not know the model, or us, or what `probe` raises.
        RetryError
            The server is away, or does not answer.
        """
        reference = self._reference
        try:
            model = self._found()
            found = probe()
            version = self._version()
        except TimeoutError as error:
            raise RetryError(f"{self._where} does not answer within {reference.timeout_s:g} s") from error
        except RefusedError as error:
            raise OperatorError(
                f"the server of the reference {self._where} refuses: {error}. Check `url`, `model` and the token in "
                "[[models.references]]"
            ) from error
        told = msgspec.json.encode([model.id, model.root, model.max_model_len])
        artefact = Artefact(
            path=self._where,
            digest=reference.digest.rpartition(":")[2] or hashlib.sha256(told).hexdigest(),
            precision="+".join([UNVERIFIED, *sorted(reference.allow_reduced_precision)]),
            opset=0,
            producer=model.root or model.id,
        )
        provenance = Provenance(
            runtime=reference.runtime.value, version=version, provider="remote", device=UNVERIFIED
        )
        _LOG.info("reference %s: at an OpenAI-compatible server, unverified", self._where)
        return found, artefact, provenance, model.max_model_len

    def ask(self, method: str, path: str, kind: type[Found], question: Any = None) -> Found:
        """Return the answer.

        Raises
        ------
        RefusedError
            The server refuses, fails, or answers what cannot be read.
        RetryError
            It is away.
        TimeoutError
            It takes too long.
        """
        body = b"" if question is None else msgspec.json.encode(question)
        status, _, answer = self._server.ask(method, path, body, _JSON if body else None)
        refuse(status, answer)
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            raise unreadable(str(error)) from error

    def guarded(self, ask: Callable[[], Found]) -> Found:
        """Ask about an exchange, and say of a failure whose it is.

        Raises
        ------
        QuarantineError
            Reason `replay`: the server refuses, fails on it though it has the model, does not answer in time, or
            answers what cannot be read.
        RetryError
            The server is away, has not the model, or does not let us in.
        """
        try:
            return ask()
        except TimeoutError as error:
            # A smaller batch may be quicker; where the server hangs altogether, ProvenRuntime finds that out and waits.
            raise replay_error(f"no answer within {self._reference.timeout_s:g} s") from error
        except OperatorError as error:  # a token that cannot be read: nothing is wrong with the exchange
            raise RetryError(f"{self._where}: {error}") from error
        except RefusedError as error:
            # Of people's text nothing may get into logs or the record's details: the server's words may quote it.
            if error.kind is Refusal.ACCESS or (error.kind is Refusal.FAILURE and not self.is_ready()):
                raise RetryError(f"{self._where}: {error.brief}") from error
            raise replay_error(f"{error.brief}; the server's own log tells why") from error

    def close(self) -> None:
        """Let go of the connection."""
        self._server.close()

    def _found(self) -> _Model:
        models = self.ask("GET", "/v1/models", _Models).data
        found = next((model for model in models if model.id == self.name), None)
        if found is None:
            raise OperatorError(
                f"the server of the reference {self._where} serves {[model.id for model in models]}: `{self.name}` is not "
                "among them. Set `model` in [[models.references]]"
            )
        return found

    def _version(self) -> str:
        try:
            return self.ask("GET", "/version", _Version).version  # vLLM's; not every server has it
        except RefusedError:
            return ""

    def is_ready(self) -> bool:
        """Return whether the server answers, and has the model."""
        try:
            self._found()
        except (RefusedError, TimeoutError, OperatorError):
            return False
        return True


def unreadable(detail: str) -> RefusedError:
    """Return the error that says that an answer is not what it should be."""
    return RefusedError(f"an answer that is not the protocol: {detail}", Refusal.INPUT)
