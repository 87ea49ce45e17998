"""The examples of comparators, made into a directory and ready to be replayed."""

import importlib
import shutil
from pathlib import Path

import msgspec

from quantdrift.core.config.load import load
from quantdrift.core.config.schema import Config, Provider
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.runtimes.registry import open_reference, runtime_request
from quantdrift.models.tensors.arrays import Array
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import VersionReference
from tests.support.shadow.onnx_models import exchange_of, tensor

ROOT = Path(__file__).resolve().parents[3] / "examples"
NAMES = ("classification", "multilabel", "regression", "embedding", "ranking", "tensor")


def made(name: str, directory: Path) -> Path:
    """Return the configuration of an example, beside the reference that it made."""
    importlib.import_module(f"examples.{name}.make").make(directory)
    return Path(shutil.copy(ROOT / name / "config.toml", directory))


def judge_of(path: Path) -> tuple[Config, VersionReference]:
    """Return the configuration, and what its one model is measured with."""
    config = load(path, {})
    (model,) = config.models
    (reference,) = model.references
    opening = msgspec.structs.replace(
        runtime_request(config, model, reference, ""), provider=Provider.CPU, threads=1
    )
    return config, VersionReference(
        model=model, runtime=open_reference(opening), comparator=comparator_of(model)
    )


def answers(version_reference: VersionReference, x: Array) -> dict[str, Array]:
    """Return what the reference gives."""
    (spec,) = version_reference.runtime.inputs
    return version_reference.runtime.run({spec.name: x})


def prepared(
    version_reference: VersionReference, x: Array, outputs: dict[str, Array], sequence: int = 1
) -> PreparedExchange:
    """Return an exchange whose candidate answered `outputs`."""
    exchange = msgspec.structs.replace(
        exchange_of(x, x, model=version_reference.model.name),
        outputs=tuple(tensor(name, output) for name, output in outputs.items()),
    )
    (spec,) = version_reference.runtime.inputs
    return PreparedExchange(
        stream_sequence=sequence,
        payload=b"",
        exchange=exchange,
        version_reference=version_reference,
        inputs={spec.name: x},
    )
