"""The example of a reference at a server, against Triton with the tensors that its model repository names."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.servers.environment import environment
from tests.servers.server import Server, triton_at
from tests.support.shadow.reference_examples import commands, made, works
from tests.support.sidecar.relay_process import free_port

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

_FORMS = ("open-inference-http", "open-inference-grpc")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return what `make.py` makes, while Triton serves it: its wheel has the Python backend, and not that for ONNX."""
    directory = made(tmp_path_factory)
    server = Server(environment=environment("triton"), http_port=free_port(), grpc_port=free_port())
    model = directory / "model-repository" / "digits"
    (model / "1" / "model.onnx").unlink()
    (model / "1" / "model.py").write_bytes(server.environment.script("digits.py").read_bytes())
    np.savez(
        model / "1" / "weights.npz", allow_pickle=False, **load_file(directory / "digits-fp32.safetensors")
    )
    described = (model / "config.pbtxt").read_text()
    (model / "config.pbtxt").write_text(
        described.replace('"onnxruntime"', '"python"') + "instance_group [{ kind: KIND_CPU }]"
    )
    ports = (("8020", server.http_port), ("8021", server.grpc_port))
    for path in (directory / f"{form}.toml" for form in _FORMS):
        text = path.read_text()
        for shown, port in ports:
            text = text.replace(f"127.0.0.1:{shown}", f"127.0.0.1:{port}")
        path.write_text(text)
    with triton_at(server, tmp_path_factory.mktemp("triton"), directory / "model-repository"):
        yield directory


@pytest.mark.parametrize("form", _FORMS)
def test_the_server_gives_what_the_file_gave(form: str, served: Path) -> None:
    """Each command that the page shows, over HTTP and over gRPC."""
    run = [command for command in commands() if f"/{form}.toml" in command]
    assert len(run) == 2
    for command in run:
        works(command, served)
