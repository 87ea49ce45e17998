"""The real servers, each started once for all tests of this process."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.environment import Environment, environ, environment
from tests.servers.server import Server, kserve_at, serving, triton_at, vllm_at
from tests.support.sidecar.relay_process import free_port

_MODELS = ("linear", "words", "steps", "story", "reference")


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a running Triton with the models of `triton/`."""
    made = environment("triton")
    directory = tmp_path_factory.mktemp("triton")
    server = Server(environment=made, http_port=free_port(), grpc_port=free_port())
    with triton_at(server, directory, _repository(made, directory / "models")):
        yield server


@pytest.fixture(scope="session")
def kserve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a running model server of KServe's SDK with the models of `kserve/serve.py`."""
    made = environment("kserve")
    server = Server(environment=made, http_port=free_port(), grpc_port=free_port())
    with kserve_at(server, tmp_path_factory.mktemp("kserve")):
        yield server


@pytest.fixture(scope="session")
def litserve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a running LitServe with what `litserve/serve.py` says."""
    made = environment("litserve")
    server = Server(environment=made, http_port=free_port())
    command: list[str | Path] = [made.python, made.script("serve.py"), str(server.http_port)]
    with serving(server, command, health="/health", directory=tmp_path_factory.mktemp("litserve")):
        yield server


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return the running server of `chats/serve.py`."""
    made = environment("chats")
    server = Server(environment=made, http_port=free_port())
    command: list[str | Path] = [made.python, made.script("serve.py"), str(server.http_port)]
    with serving(server, command, health="/", directory=tmp_path_factory.mktemp("chats")):
        yield server


@pytest.fixture(scope="session")
def mlserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a running MLServer with the models of `mlserver/serve.py`."""
    made = environment("mlserver")
    directory = tmp_path_factory.mktemp("mlserver")
    server = Server(environment=made, http_port=free_port(), grpc_port=free_port())
    settings = {
        "host": "127.0.0.1",
        "http_port": server.http_port,
        "grpc_port": server.grpc_port,
        "metrics_port": free_port(),
        "parallel_workers": 0,
    }
    (directory / "settings.json").write_text(json.dumps(settings))
    for name in ("linear", "words"):
        (directory / name).mkdir()
        shutil.copy(made.script("serve.py"), directory / name)
        model = {
            "name": name,
            "implementation": f"serve.{name.capitalize()}",
            "parameters": {"version": "v4"},
        }
        (directory / name / "model-settings.json").write_text(json.dumps(model))
    command: list[str | Path] = [made.programs / "mlserver", "start", directory]
    with serving(server, command, health="/v2/health/ready", directory=directory):
        yield server


@pytest.fixture(scope="session")
def torchserve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a running TorchServe with the model of `torchserve/serve.py`; Java must be there."""
    made = environment("torchserve", closed=False)
    directory = tmp_path_factory.mktemp("torchserve")
    server = Server(environment=made, http_port=free_port())
    archive = ["--model-name", "linear", "--version", "1.0", "--export-path", str(directory)]
    subprocess.run(
        [made.programs / "torch-model-archiver", *archive, "--handler", made.script("serve.py")],
        env=environ(made),
        check=True,
    )
    (directory / "config.properties").write_text(
        f"inference_address=http://127.0.0.1:{server.http_port}\n"
        f"management_address=http://127.0.0.1:{free_port()}\n"
        f"metrics_address=http://127.0.0.1:{free_port()}\n"
        f"grpc_inference_port={free_port()}\n"
        f"grpc_management_port={free_port()}\n"
        "default_workers_per_model=1\n"
        "disable_token_authorization=true\n"
    )
    start: list[str | Path] = [
        "--start",
        "--foreground",
        "--no-config-snapshots",
        "--ts-config",
        "config.properties",
    ]
    models: list[str | Path] = [
        "--model-store",
        directory,
        "--models",
        "blobs=linear.mar",
        "numbers=linear.mar",
    ]
    command: list[str | Path] = [made.programs / "torchserve", *start, *models]
    with serving(server, command, health="/ping", directory=directory):
        yield server


@pytest.fixture(scope="session")
def transformers(tmp_path_factory: pytest.TempPathFactory, language_folder: Path) -> Iterator[Server]:
    """Return a running `transformers serve` with a small model."""
    made = environment("transformers", closed=False)
    directory = tmp_path_factory.mktemp("transformers")
    shutil.copytree(language_folder, directory / "small")
    server = Server(environment=made, http_port=free_port())
    # The server knows the model by the path it was told, and requests must name it so: here a relative one.
    options: list[str | Path] = ["--host", "127.0.0.1", "--port", str(server.http_port), "--device", "cpu"]
    command: list[str | Path] = [made.programs / "transformers", "serve", "small", *options]
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "home")}
    with serving(server, command, health="/health", directory=directory, variables=variables):
        yield server


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory, language_folder: Path) -> Iterator[Server]:
    """Return a running vLLM with a small model in FP32."""
    server = Server(environment=environment("vllm"), http_port=free_port())
    options = ("--dtype", "float32", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with vllm_at(server, tmp_path_factory.mktemp("vllm"), language_folder, *options):
        yield server


def _repository(made: Environment, path: Path) -> Path:
    for name in _MODELS:
        (path / name / "1").mkdir(parents=True)
        shutil.copy(made.script(f"{name}.py"), path / name / "1" / "model.py")
        shutil.copy(made.script(f"{name}.pbtxt"), path / name / "config.pbtxt")
    shutil.copy(made.script("labels.txt"), path / "linear" / "labels.txt")
    return path
