"""A real inference server that runs: started in its own environment, and ended with all that it started."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from quantdrift.core.process.child import ending_with_parent
from tests.servers.environment import Environment, environ

_GUARD = Path(__file__).with_name("guard.py")
_START_S, _STOP_S = 120.0, 20.0
_VLLM_START_S = 600.0  # three processes that each load PyTorch, and compile all of it the first time


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server answers.

    Parameters
    ----------
    environment
        What it runs in.
    http_port
        Of HTTP/1.1.
    grpc_port
        Of gRPC, or 0.
    """

    environment: Environment
    http_port: int
    grpc_port: int = 0


@contextlib.contextmanager
def serving(
    server: Server,
    command: Sequence[str | Path],
    *,
    health: str,
    directory: Path,
    variables: Mapping[str, str] | None = None,
    start_s: float = _START_S,
) -> Iterator[Server]:
    """Run a server inside the block; it is there as soon as `health` answers 200.

    Parameters
    ----------
    server
        Where it will answer.
    command
        Its program and arguments.
    health
        Path that is asked.
    directory
        Where it runs and its log is written.
    variables
        Environment variables beside those of its environment.
    start_s
        How long it may take to start.

    Raises
    ------
    RuntimeError
        It does not start; its last words are in the message.
    """
    log = directory / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ending_with_parent([sys.executable, str(_GUARD), *map(str, command)]),
            env={**environ(server.environment), **(variables or {})},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(process, f"http://127.0.0.1:{server.http_port}{health}", log, start_s)
        yield server
    finally:
        _end(process)


def kserve_at(server: Server, directory: Path) -> contextlib.AbstractContextManager[Server]:
    """Run the models of `kserve/serve.py` inside the block, at the ports of `server`."""
    made = server.environment
    ports = (f"--http_port={server.http_port}", f"--grpc_port={server.grpc_port}")
    command: list[str | Path] = [made.python, made.script("serve.py"), *ports]
    return serving(server, command, health="/v2/health/ready", directory=directory)


def vllm_at(
    server: Server, directory: Path, model: Path, *options: str
) -> contextlib.AbstractContextManager[Server]:
    """Run vLLM on the CPU with a folder's model, named `small`, inside the block, at the port of `server`."""
    command: list[str | Path] = [
        server.environment.python,
        *(
            "-m",
            "vllm.entrypoints.openai.api_server",
        ),  # `vllm serve` looks for a distribution of another name
        *("--host", "127.0.0.1", "--port", str(server.http_port)),
        *("--model", model, "--served-model-name", "small", "--max-model-len", "256", "--enforce-eager"),
        *options,
    ]
    variables = {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(directory),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return serving(
        server,
        command,
        health="/health",
        directory=directory,
        variables=variables,
        start_s=_VLLM_START_S,
    )


def triton_at(server: Server, directory: Path, repository: Path) -> contextlib.AbstractContextManager[Server]:
    """Run Triton with a model repository inside the block, at the ports of `server`."""
    made = server.environment
    shipped = made.packages / "pytriton" / "tritonserver"
    command: list[str | Path] = [
        shipped / "bin" / "tritonserver",
        f"--model-repository={repository}",
        f"--backend-directory={_backends(shipped, directory / 'backends')}",
        *("--http-address=127.0.0.1", f"--http-port={server.http_port}"),
        *("--grpc-address=127.0.0.1", f"--grpc-port={server.grpc_port}"),
        *("--grpc-infer-response-compression-level=high", "--allow-metrics=false", "--exit-timeout-secs=2"),
    ]
    libraries = f"{made.packages / 'nvidia_pytriton.libs'}:{sysconfig.get_config_var('LIBDIR')}"
    return serving(
        server,
        command,
        health="/v2/health/ready",
        directory=directory,
        variables={"LD_LIBRARY_PATH": libraries},
    )


def _backends(shipped: Path, path: Path) -> Path:
    """Put the Python backend together: the wheel has its stubs, one for each Python, in a directory apart."""
    shutil.copytree(shipped / "backends" / "python", path / "python")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(shipped / "python_backend_stubs" / version / "triton_python_backend_stub", path / "python")
    return path


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while not _answers(url):
        if process.poll() is not None or time.monotonic() > deadline:
            words = log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise RuntimeError(f"{process.args!r} does not start:\n{words}")
        time.sleep(0.05)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it in its own time; the guard sees to whatever it leaves behind."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
