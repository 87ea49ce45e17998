"""References that are no ONNX files: an exported program of PyTorch, or a model at a server, opened to see what it takes and gives."""

import contextlib
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import msgspec
import numpy as np

from quantdrift.core.config.schema import Config, Model, Provider, Reference, Runtime, Shadow
from quantdrift.core.errors import OperatorError, QuantdriftError
from quantdrift.core.records import GENERATED
from quantdrift.core.text import plain
from quantdrift.init.files import ModelFile
from quantdrift.init.server import ask_server
from quantdrift.models.runtimes.protocol import ReferenceRuntime, digest_of
from quantdrift.models.runtimes.registry import opened_reference
from quantdrift.models.tensors.arrays import Array, TensorSpec

_ROWS: Final = 16
_OF_MODEL: Final = "/v2/models/"


class OpenedReference(msgspec.Struct, frozen=True, kw_only=True):
    """A reference as it stands in the configuration, and what was seen of it.

    Parameters
    ----------
    reference
        Its options.
    name
        Of the model, as the file or the server calls it.
    file
        Its inputs and outputs; None: it generates text.
    rows
        What it gives for rows of random numbers, by output : (items, ...); empty: it takes none.
    """

    reference: Reference
    name: str
    file: ModelFile | None = None
    rows: dict[str, Array] = {}


def program_reference(path: Path) -> OpenedReference:
    """Open an exported program of PyTorch. It is code: whoever names the file lets it run, and the configuration is pinned to its digest.

    Raises
    ------
    OperatorError
        It cannot be loaded, or is not in full precision.
    """
    reference = Reference(runtime=Runtime.TORCH, path=str(path), digest=f"sha256:{digest_of(path)}")
    return _opened(reference, path.stem)


def served_reference(url: str, name: str) -> OpenedReference:
    """Open a model at a server.

    Parameters
    ----------
    url
        Of the server, or of the model there: `http://HOST:PORT/v2/models/NAME`.
    name
        Of the watched model, which the reference's server may call so, too.

    Raises
    ------
    OperatorError
        Nothing answers there, or it does not say which model is meant.
    RetryError
        The server does not answer.
    """
    parts = urlsplit(url)
    path, _, named = parts.path.partition(_OF_MODEL)
    base = f"{parts.scheme}://{parts.netloc}{path.rstrip('/')}"
    wanted = unquote(named)
    if parts.scheme.startswith("grpc"):
        chosen, runtime = wanted or name, Runtime.OIP_GRPC
    else:
        server = None if parts.scheme == "https" else ask_server(parts.netloc, (wanted or name,))
        if server is None and parts.scheme != "https":
            raise OperatorError(f"{plain(url)}: nothing answers there")
        served = [model.name for model in server.models] if server is not None else []
        is_language = server is not None and bool(GENERATED & {*server.protocols})
        runtime = Runtime.OPENAI if is_language else Runtime.OIP_HTTP
        chosen = wanted or (name if name in served or not served else "")
        chosen = chosen or (served[0] if len(served) == 1 else "")
        if served and not chosen:
            raise OperatorError(
                f"{plain(url)} has the models {', '.join(map(plain, served))}: name one, {base}{_OF_MODEL}NAME"
            )
    if not chosen:
        raise OperatorError(f"{plain(url)} does not list its models: name one, {base}{_OF_MODEL}NAME")
    reference = Reference(runtime=runtime, url=base, model=chosen)
    if runtime is Runtime.OPENAI:
        return OpenedReference(reference=reference, name=chosen)
    return _opened(reference, chosen)


def _opened(reference: Reference, name: str) -> OpenedReference:
    model = Model(name=name, references=(reference,))
    config = Config(models=(model,), shadow=Shadow(provider=Provider.CPU))
    with contextlib.closing(opened_reference(config, model, reference)) as runtime:
        file = ModelFile(
            path=Path(reference.path or reference.url),
            inputs=runtime.inputs,
            outputs=runtime.outputs,
            maps=(),
            kinds={},
            unit_vectors=frozenset(),
            precision=runtime.artefact.precision,
            is_full_precision=True,
            is_trees=False,
            has_sites=False,
        )
        return OpenedReference(reference=reference, name=name, file=file, rows=_rows(runtime))


def _rows(runtime: ReferenceRuntime) -> dict[str, Array]:
    """Return what a reference gives for random numbers, seeded; empty where it takes other inputs."""
    rng = np.random.default_rng(1)
    inputs = {spec.name: _drawn(spec, rng) for spec in runtime.inputs}
    try:
        return runtime.run(inputs)
    except QuantdriftError:  # a model of tokens, or one whose shapes are not free: captured rows tell more
        return {}


def _drawn(spec: TensorSpec, rng: np.random.Generator) -> Array:
    shape = [1 if length is None else length for length in spec.shape]
    if spec.shape and spec.shape[0] is None:
        shape[0] = _ROWS
    if spec.dtype.kind == "f":
        return rng.normal(size=shape).astype(spec.dtype)
    return np.full(shape, "" if spec.dtype == np.dtype(object) else 0, dtype=spec.dtype)
