"""The example of references in every form, as a reader of its page runs it."""

import asyncio
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import msgspec
import numpy as np
import onnx
import pytest

from quantdrift.core.codec import encode
from quantdrift.core.config.load import Secrets, load
from quantdrift.core.config.schema import Config, Provider, Shadow, Stream
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Tensor
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.connection import Queue
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
from quantdrift.models.runtimes.registry import open_reference, runtime_request
from quantdrift.shadow.pipeline.classify import classify
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import References
from quantdrift.shadow.replay.replay import ReplayResult, compare_batch
from quantdrift.shadow.worker import serve
from tests.support.shadow.onnx_models import exchange_of, inputs_of, tensor
from tests.support.shadow.reference_examples import EXAMPLE, ROOT, called, commands, made, works

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CONFIGS = sorted(EXAMPLE.glob("*.toml"))
FORMS = ("exported-program", "factory", "torchscript", "mapped")
HTTP = "open-inference-http"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what `make.py` makes, with canaries of the ONNX file."""
    return made(tmp_path_factory)


def shown(form: str) -> list[str]:
    """Return the page's commands for one configuration."""
    return [command for command in commands() if f"/{form}.toml" in command]


def test_the_page_names_every_configuration_and_checks_each() -> None:
    """Both ways: nothing that is shown is missing, and nothing that is there is not shown."""
    page = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\]\(([\w-]+\.toml)\)", page)) == [path.name for path in CONFIGS]
    for path in CONFIGS:
        assert any("config check --references" in command for command in shown(path.stem)), path.name
        assert any(
            "reference check" in command or "reference record" in command for command in shown(path.stem)
        )


def test_only_the_directory_that_was_named_is_written_to(directory: Path) -> None:
    """Copies of the configurations lie there, with the digests of what lies beside them."""
    left = {path.name for path in EXAMPLE.rglob("*") if "__pycache__" not in path.parts and path.is_file()}
    assert left == {
        *("README.md", "make.py", "digits_reference.py", "config.pbtxt"),
        *(path.name for path in CONFIGS),
    }
    for path in CONFIGS:
        (reference,) = load(directory / path.name, {}).models[0].references
        assert not reference.path or Path(reference.path).is_file()
        assert "sha256:000" not in (directory / path.name).read_text()


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("exported-program", marks=pytest.mark.release),
        "factory",
        pytest.param("torchscript", marks=pytest.mark.release),
        "mapped",
    ],
)
def test_a_form_computes_what_the_onnx_file_gave(form: str, directory: Path) -> None:
    """It opens, is FP32, and reproduces the canaries."""
    for command in shown(form):
        works(command, directory)


@pytest.mark.parametrize("form", ["exported-program", pytest.param("torchscript", marks=pytest.mark.release)])
def test_what_is_code_and_not_pinned_rightly_is_not_loaded(form: str, directory: Path) -> None:
    """The configuration as it stands in the example has no digest yet: the message tells which one it is."""
    copied = directory / f"{form}-unmade.toml"
    copied.write_text((EXAMPLE / f"{form}.toml").read_text())
    done = called(f"quantdrift config check --references -c out/references/{copied.name}", directory)
    assert done.returncode == 2
    (reference,) = load(directory / f"{form}.toml", {}).models[0].references
    assert reference.digest in done.stderr


def test_a_server_is_checked_with_the_same_canaries(directory: Path, tmp_path: Path) -> None:
    """The server of the demo, in place of Triton; one that holds another model is told from it."""
    other = onnx.load(directory / "digits-fp32.onnx")
    for stored in other.graph.initializer:
        if stored.data_type == onnx.TensorProto.FLOAT:
            values = onnx.numpy_helper.to_array(stored).astype(np.float16).astype(np.float32)
            stored.CopyFrom(onnx.numpy_helper.from_array(values, stored.name))
    onnx.save(other, tmp_path / "halves.onnx")
    with _served(directory / "digits-fp32.onnx") as port:
        _at(directory, port)
        for command in shown(HTTP):
            works(command, directory)
    with _served(tmp_path / "halves.onnx", port):
        check = next(command for command in shown(HTTP) if "reference check" in command)
        done = called(check, directory)
    assert (done.returncode, "failed" in done.stdout) == (2, True), done.stdout + done.stderr


def test_integers_of_the_candidate_become_what_the_reference_takes(directory: Path) -> None:
    """As `mapped.toml` says: what is compared differs by what rounding to INT8 makes of it, and no more."""
    config = load(directory / "mapped.toml", {})
    references = References(
        config.models, lambda model, reference: open_reference(runtime_request(config, model, reference))
    )
    rng = np.random.default_rng(3)
    image = rng.integers(-128, 128, size=(40, 1, 8, 8), dtype=np.int8)
    scanner = rng.integers(0, 5, size=40, dtype=np.int64)
    plain = OnnxRuntime(directory / "digits-fp32.onnx")
    pixels = ((image.astype(np.float64) + 128) / 255).astype(np.float32)
    logits = plain.run({"pixels": pixels, "scanner": scanner.astype(np.int32)})["logits"]
    scores = np.clip(np.round(logits / 0.0625) + 7, -128, 127).astype(np.int8)
    exchange = msgspec.structs.replace(
        exchange_of(inputs_of(40), version="int8-1"),
        inputs=(
            Tensor(name="image", datatype="INT8", shape=image.shape, data=image.tobytes()),
            Tensor(name="scanner", datatype="INT64", shape=scanner.shape, data=scanner.tobytes()),
        ),
        outputs=(Tensor(name="scores", datatype="INT8", shape=scores.shape, data=scores.tobytes()),),
    )
    case = classify(encode(exchange), sequence=1, n_delivered=1, max_deliveries=5, references=references)
    assert isinstance(case, PreparedExchange), case
    (outcome,) = compare_batch([case], most_items=64)
    assert isinstance(outcome, ReplayResult), outcome
    # An INT8 step of 1/16 moves a logit by 1/32 at most, and KL by no more than the square of it.
    assert 0 < outcome.divergences.divergence.max() < (1 / 32) ** 2
    references.close()
    plain.close()


async def test_a_worker_replays_and_records_each_form(
    directory: Path, postgres_dsn: str, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the stream to the record, all in one worker, and two of them with a layer for learned slices."""
    monkeypatch.syspath_prepend(str(directory))  # as PYTHONPATH does, for the factory
    layers = {"exported-program": "hidden", "factory": "hidden"}
    forms = ("onnx", "exported-program", "factory", "torchscript", HTTP)
    plain, rng = OnnxRuntime(directory / "digits-fp32.onnx"), np.random.default_rng(4)
    with _served(directory / "digits-fp32.onnx") as port:
        _at(directory, port)
        models = {form: load(directory / f"{form}.toml", {}).models[0] for form in forms}
        config = Config(
            stream=Stream(url=nats_url, name=f"t{uuid.uuid4().hex[:8]}"),
            shadow=Shadow(provider=Provider.CPU, threads=1, batch_delay_s=0.05, admin="127.0.0.1:0"),
            models=tuple(
                msgspec.structs.replace(model, name=form, embedding=layers.get(form, ""))
                for form, model in models.items()
            ),
        )
        queue, stop = await Queue.connect(config.stream, client_name="test"), Stop()
        await queue.ensure()
        for form in forms:
            pixels = rng.random((4, 1, 8, 8), dtype=np.float32)
            scanner = rng.integers(0, 5, size=4, dtype=np.int32)
            logits = plain.run({"pixels": pixels, "scanner": scanner})["logits"]
            exchange = msgspec.structs.replace(
                exchange_of(inputs_of(4), logits, version="int8-1", model=form),
                inputs=(tensor("pixels", pixels), tensor("scanner", scanner, "INT32")),
            )
            await queue.publish_exchange(form, exchange.id, encode(exchange))
        worker = asyncio.create_task(serve(config, Secrets(dsn=postgres_dsn), stop))
        async with asyncio.timeout(60):
            while (await read_backlog(queue)).n_messages and not worker.done():
                await asyncio.sleep(0.05)
        stop.set()
        await queue.close()
        assert await worker == 0
    connection = await asyncpg.connect(postgres_dsn)
    rows = await connection.fetch(
        "select v.model, b.provenance, max(c.divergence) as most, count(*) as n from comparison c "
        "join model_version v on v.id = c.model_version_id join batch b on b.id = c.batch_id group by 1, 2"
    )
    await connection.close()
    found = {row["model"]: msgspec.json.decode(row["provenance"]) for row in rows}
    told = {form: (one["runtime"], one["precision"]) for form, one in found.items()}
    assert told == {
        "onnx": ("onnxruntime", "float32"),
        **dict.fromkeys(("exported-program", "factory", "torchscript"), ("torch", "float32")),
        HTTP: ("oip-http", "unverified"),
    }
    assert all(row["n"] == 4 and row["most"] < 1e-6 for row in rows)


@contextmanager
def _served(path: Path, port: int = 0) -> Iterator[int]:
    command = [sys.executable, "-m", "quantdrift.demo.oip_server", "--model", f"digits={path}"]
    with subprocess.Popen(
        [*command, "--listen", f"127.0.0.1:{port}"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline().rpartition(" ")[2])
        finally:
            server.terminate()


def _at(directory: Path, port: int) -> None:
    path = directory / f"{HTTP}.toml"
    path.write_text(re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", path.read_text()))
