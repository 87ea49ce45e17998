"""Generated files: pages of the reference, made from the code, and Python modules, made from .proto files."""

import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate import pages

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.release
def test_generated_files_are_what_the_code_says() -> None:
    """`make docs` would change nothing."""
    for path, text in pages().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path} is stale: run `make docs`"


def test_every_decision_has_a_status_and_is_in_the_index() -> None:
    """Who reads an old decision learns whether it still holds."""
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    for path in folder.glob("0*.md"):
        title, _, rest = path.read_text(encoding="utf-8").partition("\n\n")
        assert title.startswith(f"# {path.name[:4]}: "), path
        assert rest.startswith("Status: "), path
        assert f"]({path.name}) |" in index, path


def test_generated_code_is_what_its_proto_says(tmp_path: Path) -> None:
    """`python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. FILE` would change nothing."""
    protos = [
        path.relative_to(ROOT)
        for floor in ("quantdrift", "sidecar")
        for path in ROOT.glob(f"{floor}/**/*.proto")
    ]
    assert protos
    written = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *written, *map(str, protos)],
        cwd=ROOT,
        check=True,
    )
    for proto in protos:
        for suffix in ("_pb2.py", "_pb2.pyi"):
            path = proto.with_name(proto.stem + suffix)
            kept, made = ((root / path).read_text(encoding="utf-8") for root in (ROOT, tmp_path))
            assert kept == made, f"{path} is stale"
