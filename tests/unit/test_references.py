"""Which reference answers for a version, and which models share one."""

import pytest

from quantdrift.core.config.schema import Model, Reference, Runtime
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.shadow.replay.references import References
from tests.support.shadow.onnx_models import BIAS, WEIGHT

pytestmark = pytest.mark.unit

FILE = Reference(path="fp32.onnx", versions=("int8-*",))
SERVER = Reference(runtime=Runtime.OIP_HTTP, url="http://127.0.0.1:1", versions=("*",))


def _load(_model: Model, _reference: Reference) -> ReferenceRuntime:
    return LinearRuntime(WEIGHT, BIAS)


def _runtime(references: References, model: str, version: str) -> ReferenceRuntime:
    version_reference = references.find(model, version)
    assert version_reference is not None
    return version_reference.runtime


def test_models_of_one_file_share_it_but_not_across_threads() -> None:
    """A model with a server among its references is replayed in a thread of its own, and has a file for itself."""
    models = (
        Model(name="one", references=(FILE,)),
        Model(name="two", references=(FILE,)),
        Model(name="apart", references=(FILE, SERVER)),
    )
    references = References(models, _load)
    assert _runtime(references, "one", "int8-1") is _runtime(references, "two", "int8-1")
    assert _runtime(references, "apart", "int8-1") is not _runtime(references, "one", "int8-1")
    assert references.find("one", "fp16") is None
    assert _runtime(references, "apart", "fp16") is not _runtime(references, "apart", "int8-1")
