"""The messages that were generated are those of the .proto files beside them."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "sidecar").glob("**/*.proto"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_what_is_generated_is_what_is_written(source: Path, tmp_path: Path) -> None:
    """To mend it: python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. FILE, at the root."""
    name = source.relative_to(ROOT)
    out = tmp_path / "set"
    options = ["-I.", f"--descriptor_set_out={out}", f"--pyi_out={tmp_path}", str(name)]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options], cwd=ROOT, check=True)
    (written,) = FileDescriptorSet.FromString(out.read_bytes()).file
    # Imported as the product does: a second copy under another name would clash in the pool of descriptors.
    module = importlib.import_module(".".join(name.with_name(f"{name.stem}_pb2").parts))
    for message in written.message_type:
        for field in [*message.field, *(field for nested in message.nested_type for field in nested.field)]:
            field.ClearField("json_name")
    assert module.DESCRIPTOR.serialized_pb == written.SerializeToString()
    stub = name.with_name(f"{name.stem}_pb2.pyi")
    assert (ROOT / stub).read_text() == (tmp_path / stub).read_text()
