"""References at a server, called through the Open Inference Protocol v2.

The precision of such a reference cannot be checked: it is recorded as `unverified`. Its tensors are checked against those of
the exchange. An unreachable server is waited for; if a server refuses an input, or fails on it although the model is ready,
the input is at fault.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

import msgspec

from quantdrift.core.config.address import ServerUrl, read_server_url
from quantdrift.core.config.schema import ModelTensor, Reference
from quantdrift.core.errors import (
    OperatorError,
    QuantdriftError,
    QuarantineError,
    QuarantineReason,
    RetryError,
)
from quantdrift.core.records import Tensor
from quantdrift.core.tensors import DTYPES
from quantdrift.models.runtimes.embedding import check_spec, unknown_embedding
from quantdrift.models.runtimes.protocol import Artefact, Provenance, check_inputs
from quantdrift.models.runtimes.registry import RuntimeRequest
from quantdrift.models.tensors.arrays import Array
from quantdrift.models.tensors.codec import decode, encode, specs_of

_LOG = logging.getLogger(__name__)
UNVERIFIED: Final = "unverified"
_REDUCED: Final[Mapping[str, str]] = MappingProxyType({"FP16": "float16", "BF16": "bfloat16"})


class ServerTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A server's description of a tensor; unknown fields are ignored."""

    name: str
    datatype: str
    shape: tuple[int, ...] = ()


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """A server's description of a model, as in the protocol."""

    name: str = ""
    versions: tuple[str, ...] | None = None
    platform: str = ""
    inputs: tuple[ServerTensor, ...] | None = None
    outputs: tuple[ServerTensor, ...] | None = None


class ServerMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """A server's name and version."""

    name: str = ""
    version: str = ""


class Refusal(Enum):
    """The kind of a server's refusal."""

    INPUT = auto()  # the request is invalid
    ACCESS = auto()  # the model is unknown, or access is denied
    FAILURE = auto()  # the server failed: because of the input if the model is ready


class RefusedError(QuantdriftError):
    """A server refused or failed.

    Parameters
    ----------
    detail
        The server's message.
    brief
        The same without the server's own words, which may quote the request; empty: as `detail`.

    Attributes
    ----------
    kind, brief
        As above.
    """

    def __init__(self, detail: str, kind: Refusal, brief: str = "") -> None:
        super().__init__(detail)
        self.kind = kind
        self.brief = brief or detail


NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class Transport(Protocol):
    """The transport of requests about one model.

    Every method raises `RetryError` if the server is unreachable, `RefusedError` if it refuses, and `TimeoutError` if it takes
    too long.
    """

    def server(self) -> ServerMetadata:
        """Return the server's name and version."""
        ...

    def ready(self) -> bool:
        """Return whether the model is ready."""
        ...

    def metadata(self) -> Metadata:
        """Return the description of the model."""
        ...

    def infer(
        self, inputs: Sequence[Tensor], outputs: Sequence[str], headers: Mapping[str, str] = NO_HEADERS
    ) -> list[Tensor]:
        """Return the named outputs; all of them if none is named.

        Parameters
        ----------
        headers
            Further headers of this request, in lower case.
        """
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


def server_of(request: RuntimeRequest) -> ServerUrl:
    """Return the address of a reference's server.

    Raises
    ------
    OperatorError
        It is plaintext over a network, and does not say so.
    """
    server = read_server_url(request.reference.url, "https", "http", "grpcs", "grpc")
    if problem := server.problem("models.references.url"):
        raise OperatorError(problem)
    return server


class RequestHeaders:
    """The headers of every request, with the bearer token. A token file is read for each request: mounted tokens change."""

    def __init__(self, request: RuntimeRequest) -> None:
        self._file = request.reference.token_file
        server = server_of(request)
        # The token from the environment goes to every server, so that one in plaintext would show it to the network.
        is_shown = not (server.is_encrypted or server.is_loopback)
        self._token = "" if is_shown else request.token

    def headers(self) -> dict[str, str]:
        """Return the headers of a request, in lower case.

        Raises
        ------
        OperatorError
            The file cannot be read.
        """
        try:
            token = Path(self._file).read_text(encoding="utf-8").strip() if self._file else self._token
        except OSError as error:
            raise OperatorError(
                f"models.references.token_file {self._file} cannot be read: {error.strerror}"
            ) from error
        return {"authorization": f"Bearer {token}"} if token else {}


class RemoteRuntime:
    """A reference at a server.

    Raises
    ------
    OperatorError
        The server does not know the model, or refuses access; the model's tensors are unknown, of an unsupported type, or of a
        reduced precision that is not declared; `models.embedding` is not one of its outputs.
    RetryError
        The server is unreachable, or the model is not ready.
    """

    def __init__(self, request: RuntimeRequest, transport: Transport) -> None:
        reference = request.reference
        self._where = reference.where(request.model.name)
        self._transport = transport
        self._timeout_s = reference.timeout_s
        try:
            server, metadata = self._connect()
        except TimeoutError as error:
            raise RetryError(f"{self._where} does not answer within {self._timeout_s:g} s") from error
        except RefusedError as error:
            raise OperatorError(
                f"the server of the reference {self._where} refuses: {error}. Check `url`, `model`, `model_version` and "
                "the token in [[models.references]]"
            ) from error
        inputs = self._known(metadata.inputs, "inputs") or request.model.inputs
        if not inputs:
            raise OperatorError(
                f"the server of {self._where} does not describe its inputs: list them in [[models.inputs]]"
            )
        for tensor in inputs:
            if tensor.datatype == "BF16":
                raise OperatorError(
                    f"the reference {self._where} takes `{tensor.name}` as BF16, which is not supported: serve it with FP32 "
                    "inputs"
                )
        self._check_declared(reference, metadata)
        self._datatypes = {tensor.name: tensor.datatype for tensor in inputs}
        self.inputs = specs_of(inputs)
        self.outputs = specs_of(self._known(metadata.outputs, "outputs") or request.model.outputs)
        if not self.outputs:
            raise OperatorError(
                f"the server of {self._where} does not describe its outputs: list them in [[models.outputs]]"
            )
        self.embedding = request.embedding
        if self.embedding:
            self._check_embedding()
        self.artefact = Artefact(
            path=self._where,
            digest=reference.digest.rpartition(":")[2] or _digest(metadata),
            precision="+".join([UNVERIFIED, *sorted(reference.allow_reduced_precision)]),
            opset=0,
            producer=metadata.platform,
        )
        self.provenance = Provenance(
            runtime=reference.runtime.value,
            version=f"{server.name} {server.version}".strip(),
            provider="remote",
            device=UNVERIFIED,
        )
        _LOG.log(
            logging.INFO if reference.canaries else logging.WARNING,
            "reference %s: at %s, unverified, %s",
            self._where,
            self.provenance.version or "a server without a name",
            "checked against its canaries"
            if reference.canaries
            else "and without canaries: another model would not be noticed. Set models.references.canaries",
        )

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return every output by name.

        Raises
        ------
        QuarantineError
            Reason `replay`: an input is not what the reference takes; the server refuses it, fails on it although the model
            is ready, or does not answer in time; or its answer cannot be read.
        RetryError
            The server is unreachable or refuses access, or the model is not ready.
        """
        check_inputs(inputs, self.inputs)
        names = [spec.name for spec in self.outputs]
        tensors = [encode(spec.name, self._datatypes[spec.name], inputs[spec.name]) for spec in self.inputs]
        try:
            answer = self._transport.infer(tensors, names)
        except TimeoutError as error:
            # A smaller batch may be quicker; if the server hangs altogether, SelfTestedRuntime finds out and waits.
            raise _replay(f"no answer within {self._timeout_s:g} s") from error
        except OperatorError as error:  # a token that cannot be read: nothing is wrong with the exchange
            raise RetryError(f"{self._where}: {error}") from error
        except RefusedError as error:
            if error.kind is Refusal.ACCESS or (error.kind is Refusal.FAILURE and not self._is_ready()):
                raise RetryError(f"{self._where}: {error.brief}") from error
            # The server's words may quote the request, which must not get into logs or the database.
            what = f"the server answers {error.brief} to the inputs {_shapes(tensors)}"
            raise _replay(f"{what}; see its log for the cause") from error
        try:
            outputs = {tensor.name: decode(tensor) for tensor in answer}
        except QuarantineError as error:
            raise _replay(f"the server's answer: {error.detail}") from error
        if missing := [name for name in names if name not in outputs]:
            raise _replay(f"the server answers {len(outputs)} outputs, without {missing}")
        return {name: outputs[name] for name in names}

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def _connect(self) -> tuple[ServerMetadata, Metadata]:
        metadata = self._transport.metadata()
        if not self._transport.ready():
            raise RetryError(f"{self._where} is not ready")
        try:
            return self._transport.server(), metadata
        except RefusedError:
            return ServerMetadata(), metadata  # not every server has this call

    def _is_ready(self) -> bool:
        try:
            return self._transport.ready()
        except (RefusedError, TimeoutError):
            return False

    def _known(self, tensors: Sequence[ServerTensor] | None, what: str) -> tuple[ModelTensor, ...]:
        tensors = tensors or ()
        for tensor in tensors:
            if tensor.datatype not in {"BF16", "BYTES", *DTYPES}:
                raise OperatorError(
                    f"the reference {self._where} has `{tensor.name}` among its {what}, of the unknown datatype "
                    f"{tensor.datatype!r}"
                )
        return tuple(
            ModelTensor(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape) for tensor in tensors
        )

    def _check_declared(self, reference: Reference, metadata: Metadata) -> None:
        """Check that reduced precisions in the server's description are declared."""
        for tensor in (*(metadata.inputs or ()), *(metadata.outputs or ())):
            precision = _REDUCED.get(tensor.datatype)
            if precision and precision not in reference.allow_reduced_precision:
                raise OperatorError(
                    f"the reference {self._where} has `{tensor.name}` as {tensor.datatype}: serve it in FP32, or declare that "
                    f'it is of reduced precision: allow_reduced_precision = ["{precision}"]'
                )

    def _check_embedding(self) -> None:
        for spec in self.outputs:
            if spec.name == self.embedding:
                check_spec(spec)
                return
        raise OperatorError(
            f"{unknown_embedding(self.embedding, [spec.name for spec in self.outputs])}. A server shows its outputs alone"
        )


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"`{tensor.name}` {tensor.datatype}{list(tensor.shape)}" for tensor in tensors)


def _replay(detail: str) -> QuarantineError:
    return QuarantineError(QuarantineReason.REPLAY, detail[:300])


def _digest(metadata: Metadata) -> str:
    """Return the digest of the server's description, in place of that of the artefact, which cannot be read."""
    return hashlib.sha256(msgspec.json.encode(metadata)).hexdigest()
