"""`quantdrift diagnose` on recorded inputs, as typed, with a real quantised network."""

import asyncio
import json
import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file

import quantdrift
from benchmarks.repair.faults import Fault, Kind, Patient
from benchmarks.repair.network import OUTPUT, Images, drawn, pages, quantise, write
from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Stream
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Exchange, Exemplar, ExemplarItem, ExemplarKind
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.connection import Queue
from quantdrift.facts.diagnosis import Diagnosis
from quantdrift.release.diagnose.damaged import Damaged, damaged
from quantdrift.release.progress import Watch
from quantdrift.release.setting import Setting
from quantdrift.release.sites import SwitchableCopy
from tests.quantised.layers import damage, exported, pages_unlike, quantised, saved, written
from tests.support.commands import invoked
from tests.support.notebooks import html_of
from tests.support.shadow.onnx_models import exchange_of, tensor

pytestmark = pytest.mark.integration

CONFIG = f"""
[shadow]
provider = "cpu"
[capture]
headers = ["x-scanner"]
[[models]]
name = "digits"
output = "{OUTPUT}"
output_kind = "logits"
[[models.references]]
path = "fp32.onnx"
[[slices]]
name = "scanner"
header = "x-scanner"
values = ["office", "archive"]
"""
N = 600


PYTORCH = """
[shadow]
provider = "cpu"
threads = 1
[capture]
headers = ["x-scanner"]
[[models]]
name = "digits"
output = "logits"
output_kind = "logits"
[[models.inputs]]
name = "image"
datatype = "FP32"
shape = [-1, 1, 8, 8]
[[models.outputs]]
name = "logits"
datatype = "FP32"
[[models.references]]
runtime = "torch"
factory = "tests.quantised.layers:layers"
path = "fp32.safetensors"
[[slices]]
name = "scanner"
header = "x-scanner"
values = ["office", "archive"]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Fault]:
    """Make a folder with a configuration, a reference, a sound and a faulty candidate, and a recording; return the fault, too."""
    folder = tmp_path_factory.mktemp("diagnose")
    write(folder / "fp32.onnx", pages(), 1)
    quantise(folder / "fp32.onnx", folder / "sound.onnx", pages().learnable)
    images = drawn(pages().held_out, 2 * N, np.random.default_rng(2))
    patient = Patient(folder / "fp32.onnx", folder / "sound.onnx", images, folder)
    fault = patient.draw(np.random.default_rng(0))
    shutil.copy(patient.write([fault]), folder / "int8.onnx")
    scanners = np.where(np.arange(2 * N) < N, "archive", "office")
    np.savez(folder / "rec.npz", image=images, scanner=scanners)
    np.savez(folder / "few.npz", image=images[:20], scanner=scanners[:20])
    np.savez(folder / "plain.npz", image=images)
    (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
    return folder, fault


def _diagnose(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return invoked("diagnose", *arguments, directory=folder, **variables)


@pytest.fixture(scope="module")
def printed(made: tuple[Path, Fault]) -> str:
    """Return what the command prints of the faulty candidate; it has drawn `cause.svg`."""
    words = ("--slice=scanner=archive", "--candidate=int8.onnx", "--inputs=rec.npz", "--picture=cause.svg")
    done = _diagnose(made[0], *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_names_the_faulty_site_and_draws_it(made: tuple[Path, Fault], printed: str) -> None:
    """Exit code 0; the text has the cause, the site with what it restores, and what to do; the picture is there."""
    folder, fault = made
    assert "digits, scanner=archive:" in printed
    assert "Cause: " in printed
    table = printed.partition("\nsite ")[2].splitlines()
    assert table[1].startswith(f"{fault.site} ")
    assert "What to do: " in printed
    assert fault.site in (folder / "cause.svg").read_text()


def test_python_says_what_the_command_prints(
    made: tuple[Path, Fault], printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text; a share is told for each step of the search."""
    monkeypatch.chdir(made[0])
    told: list[quantdrift.Progress] = []
    result = quantdrift.diagnose(
        slice="scanner=archive", candidate="int8.onnx", inputs="rec.npz", progress=told.append
    )
    assert f"{result}\nPicture: cause.svg\n" == printed
    assert isinstance(result.diagnosis, Diagnosis)
    assert result.diagnosis.blamed[0].site == made[1].site
    assert {"reading inputs", "switching sites"} <= {now.text for now in told}
    assert '<th scope="col">heals</th>' in html_of(result)
    with pytest.raises(quantdrift.OperatorError, match="pictures are"):
        quantdrift.diagnose(slice="scanner=archive", candidate="int8.onnx", picture="cause.pdf")


def test_nobody_is_blamed_where_the_slice_is_within_its_budget(made: tuple[Path, Fault]) -> None:
    """Exit code 3, and a sentence that says why."""
    done = _diagnose(made[0], "--slice", "scanner=office", "--candidate", "sound.onnx", "--inputs", "rec.npz")
    assert done.returncode == 3, done.stderr
    assert "within its budget" in done.stdout


def test_too_few_inputs_are_told_with_their_number(made: tuple[Path, Fault]) -> None:
    """Exit code 4."""
    done = _diagnose(made[0], "--slice", "scanner=archive", "--candidate", "int8.onnx", "--inputs", "few.npz")
    assert done.returncode == 4, done.stderr
    assert "there are 20 of this slice, and 32 are needed: 12 more" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--slice=scanner=archve", "--candidate=int8.onnx", "--inputs=rec.npz"), "no such slice; known are"),
        (("--candidate=int8.onnx", "--inputs=rec.npz"), "give either ALERT"),
        (
            ("--slice=scanner=archive", "--candidate=fp32.onnx", "--inputs=rec.npz"),
            "nothing that is quantised",
        ),
        (("--slice=scanner=archive", "--candidate=rec.npz", "--inputs=rec.npz"), "is not an ONNX model"),
        (
            ("--slice=scanner=archive", "--candidate=int8.onnx", "--inputs=plain.npz"),
            "give it an array `x-scanner`",
        ),
        (
            ("--slice=scanner=archive", "--candidate=int8.onnx", "--inputs=rec.npz", "--picture=a.gif"),
            "pictures are .svg or .png",
        ),
    ],
)
def test_what_cannot_be_diagnosed_is_an_error_that_says_why(
    made: tuple[Path, Fault], arguments: tuple[str, ...], message: str
) -> None:
    """Exit code 2, which is no verdict."""
    done = _diagnose(made[0], *arguments)
    assert done.returncode == 2
    assert message in done.stderr


async def _alert(record: asyncpg.Connection) -> int:
    alert: int = await record.fetchval("""
        with v as (
            insert into model_version (model, candidate_version, reference_digest) values ('digits', 'int8', 'abc') returning id
        ), s as (
            insert into slice (model, predicate, name, definition)
            values ('digits', 'header.x-scanner = "archive"', 'scanner=archive',
                '{"where": [{"key": "header.x-scanner", "equals": "archive"}]}') returning id
        )
        insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)
        select v.id, s.id, 'firing', 'flip', now(), now(), '{}' from v cross join s returning id
    """)
    return alert


async def test_an_alert_has_the_model_and_the_slice(
    made: tuple[Path, Fault], postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """Its number is enough."""
    alert = await _alert(record)
    done = await asyncio.to_thread(
        _diagnose,
        made[0],
        str(alert),
        "--candidate=int8.onnx",
        "--inputs=rec.npz",
        "--json",
        QUANTDRIFT_DSN=postgres_dsn,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["alert"], found["slice"]) == (alert, "scanner=archive")
    assert found["verdict"] == "named"
    assert found["blamed"][0]["site"] == made[1].site
    assert found["candidate"].startswith("sha256:")
    note = await record.fetchrow("select reason, finding from alert_action where alert_id = $1", alert)
    assert note["reason"].startswith("Cause: ")
    assert made[1].site in note["reason"]
    assert json.loads(note["finding"])["sites"][0]["site"] == made[1].site
    assert json.loads(note["finding"])["candidate"] == found["candidate"]
    words = (str(alert), "--candidate=int8.onnx", "--inputs=rec.npz", "--no-note")
    again = await asyncio.to_thread(_diagnose, made[0], *words, QUANTDRIFT_DSN=postgres_dsn)
    assert again.returncode == 0, again.stderr
    assert await record.fetchval("select count(*) from alert_action") == 1


@pytest.mark.release
async def test_ranges_that_are_too_narrow_together_are_named_in_text_json_and_note(
    tmp_path: Path, postgres_dsn: str, record: asyncpg.Connection
) -> None:
    """No site alone restores more than chance, but the values lie outside the ranges: that is said, and calibrating again is advised."""
    folder = tmp_path
    write(folder / "fp32.onnx", pages(), 1)
    quantise(folder / "fp32.onnx", folder / "sound.onnx", pages().learnable, reduced=True)
    images = drawn(pages().held_out, 2 * N, np.random.default_rng(2))
    patient = Patient(folder / "fp32.onnx", folder / "sound.onnx", images, folder)
    ranges = [name for name in patient.sites if name.startswith("A:") and name != "A:image"]
    patient.write([Fault(site=name, kind=Kind.NARROW, strength=7) for name in ranges])
    scanners = np.where(np.arange(2 * N) < N, "archive", "office")
    images[N:] *= 0.15
    np.savez(folder / "rec.npz", image=images, scanner=scanners)
    (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
    alert = await _alert(record)
    words = (str(alert), "--candidate=faulty.onnx", "--inputs=rec.npz")
    done = await asyncio.to_thread(_diagnose, folder, *words, QUANTDRIFT_DSN=postgres_dsn)
    assert done.returncode == 0, done.stderr
    cause = f"Cause: saturation of {len(ranges)} of {len(ranges) + 1} activation ranges together"
    for expected in (
        f"{cause}.",
        f"{len(ranges)} of {len(ranges) + 1} activation ranges cut values off. The worst, A:",
        "range that clips",
        "What to do: Calibrate again, with inputs of this slice among the others",
    ):
        assert expected in done.stdout
    assert "margin" not in done.stdout
    note = await record.fetchrow("select reason, finding from alert_action where alert_id = $1", alert)
    assert note["reason"].startswith(cause)
    assert "of the values of inputs whose answer changes" in note["reason"]
    assert "Calibrate again" in note["reason"]
    done = await asyncio.to_thread(
        _diagnose, folder, *words, "--json", "--no-note", QUANTDRIFT_DSN=postgres_dsn
    )
    found = json.loads(done.stdout)
    assert (found["verdict"], found["causes"], found["blamed"]) == ("named", ["saturation"], [])
    assert len(found["clipping"]["ranges"]) == len(ranges)
    assert json.loads(note["finding"])["clipping"] == found["clipping"]


@pytest.mark.parametrize("name", ["cluster=7", "cluster=(other)", "novel=input"])
def test_a_learned_slice_is_told_by_exemplars_and_not_by_recorded_inputs(name: str, tmp_path: Path) -> None:
    """By its name; a cluster of a model without an embedding is unknown."""
    config = tmp_path / "config.toml"
    config.write_text(
        CONFIG.replace('name = "digits"', 'name = "digits"\nembedding = "pool"'), encoding="utf-8"
    )

    def of(*, is_recorded: bool) -> Damaged:
        return damaged(
            Setting.of(config, None),
            Watch(None),
            alert=None,
            model="",
            slice_name=name,
            number=None,
            is_recorded=is_recorded,
        )

    assert of(is_recorded=False).slice.name == name
    with pytest.raises(OperatorError, match="Leave --inputs out"):
        of(is_recorded=True)
    config.write_text(CONFIG, encoding="utf-8")
    with pytest.raises(OperatorError, match="has no such slice"):
        of(is_recorded=False)


def _exchange(image: Images, logits: Images, scanner: str) -> Exchange:
    """Return an exchange of one page with its answer, as a sidecar captures it."""
    made = exchange_of(np.zeros((1, 4), np.float32), attributes={"header.x-scanner": scanner})
    return msgspec.structs.replace(
        made, inputs=(tensor("image", image[None]),), outputs=(tensor(OUTPUT, logits[None]),)
    )


async def _publish(
    folder: Path,
    queue: Queue,
    *,
    exemplars: bool,
    slices: tuple[str, str] = ("scanner=archive", "scanner=office"),
) -> None:
    """Put pages of both scanners with the answers of the faulty candidate into the stream, or among the exemplars of two slices, the bad ones first."""
    copy = SwitchableCopy(folder / "int8.onnx", folder / "fp32.onnx")
    images = np.load(folder / "rec.npz")["image"]
    served, expected = (side({"image": images})[OUTPUT] for side in (copy.served, copy.expected))
    flips = served.argmax(axis=1) != expected.argmax(axis=1)
    chosen = [(row, "archive", ExemplarKind.RANDOM) for row in range(64)]
    chosen += [(N + row, "office", ExemplarKind.RANDOM) for row in range(64)]
    damaged = [row for row in range(64, N) if flips[row]][:40]
    chosen += [(row, "archive", ExemplarKind.DAMAGED) for row in damaged]
    for row, scanner, kind in chosen:
        exchange = _exchange(images[row], served[row], scanner)
        if not exemplars:
            await queue.publish_exchange("digits", exchange.id, encode(exchange))
            continue
        exemplar = Exemplar(
            kind=kind,
            slice=slices[0] if scanner == "archive" else slices[1],
            exchange=exchange,
            items=(ExemplarItem(index=0, flip=bool(flips[row])),),
            reference=(tensor(OUTPUT, expected[row][None]),),
            reference_digest="abc",
            probability=1.0 if kind is ExemplarKind.RANDOM else None,
            compared_at=exchange.captured_at,
        )
        await queue.publish_exemplar(
            "digits", exemplar.slice, kind.value, f"{kind.value}{row}", encode(exemplar)
        )


@pytest.fixture
async def stream(made: tuple[Path, Fault], nats_url: str) -> AsyncIterator[Queue]:
    """Return a stream of its own, which `stream.toml` names."""
    name = f"t-{secrets.token_hex(6)}"
    (made[0] / "stream.toml").write_text(f'[stream]\nurl = "{nats_url}"\nname = "{name}"\n{CONFIG}')
    queue = await Queue.connect(Stream(url=nats_url, name=name), client_name="test")
    await queue.ensure()
    yield queue
    await queue.close()


@pytest.mark.release
@pytest.mark.parametrize("slices", [("scanner=archive", "scanner=office"), ("cluster=7", "cluster=3")])
async def test_without_inputs_it_works_on_exemplars(
    made: tuple[Path, Fault], stream: Queue, slices: tuple[str, str]
) -> None:
    """Damaged ones rank and do not count: the share of changed answers is that of the 64 that were drawn. They know a learned slice, too."""
    config = made[0] / "stream.toml"
    config.write_text(config.read_text().replace('name = "digits"', 'name = "digits"\nembedding = "pool"'))
    await stream.ensure_exemplars()
    await _publish(made[0], stream, exemplars=True, slices=slices)
    words = (f"--slice={slices[0]}", "--config=stream.toml", "--json")
    done = await asyncio.to_thread(_diagnose, made[0], *words, "--candidate=int8.onnx")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["blamed"][0]["site"] == made[1].site
    assert found["n_items"] == 64
    assert found["n_damaged"] == 37  # all of them, since fewer than 64
    copy = SwitchableCopy(made[0] / "int8.onnx", made[0] / "fp32.onnx")
    inputs = {"image": np.load(made[0] / "rec.npz")["image"][:64]}
    truth = copy.expected(inputs)[OUTPUT].argmax(axis=1) != copy.run(inputs)[OUTPUT].argmax(axis=1)
    assert found["flips"] == truth.mean()
    other = await asyncio.to_thread(_diagnose, made[0], *words, "--candidate=sound.onnx")
    assert other.returncode == 2
    assert "it is not the file that serves" in other.stderr


@pytest.mark.release
async def test_without_exemplars_it_works_on_what_waits_in_the_stream(
    made: tuple[Path, Fault], stream: Queue
) -> None:
    """Nothing is taken from it; where nothing waits either, the message says what to do."""
    words = ("--slice=scanner=archive", "--config=stream.toml", "--candidate=int8.onnx", "--json")
    empty = await asyncio.to_thread(_diagnose, made[0], *words)
    assert empty.returncode == 2
    assert "models.exemplars = true" in empty.stderr
    await _publish(made[0], stream, exemplars=False)
    before = (await read_backlog(stream)).n_messages
    done = await asyncio.to_thread(_diagnose, made[0], *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["blamed"][0]["site"] == made[1].site
    assert (await read_backlog(stream)).n_messages == before > 0


def _in_pytorch(folder: Path, network: Any) -> Path:
    """Fill a folder with a configuration, a reference in PyTorch, a quantised candidate and a recording, and return it."""
    written(folder / "fp32.safetensors")
    saved(network, folder / "int8.safetensors")
    scanners = np.where(np.arange(2 * N) < N, "archive", "office")
    np.savez(folder / "rec.npz", image=pages_unlike(2 * N, 2), scanner=scanners)
    (folder / "config.toml").write_text(PYTORCH, encoding="utf-8")
    return folder


@pytest.mark.release
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_faulty_layer_of_a_candidate_in_pytorch_is_named(tmp_path: Path) -> None:
    """Its factory is named beside the file of its weights; where only weights are quantised that is said."""
    folder = _in_pytorch(tmp_path, damage(quantised("Int8WeightOnlyConfig"), "blocks.1.a", "coarse"))
    words = ("--slice=scanner=archive", "--candidate=int8.safetensors", "--inputs=rec.npz")
    done = _diagnose(folder, *words, "--factory=tests.quantised.layers:layers", "--picture=cause.svg")
    assert done.returncode == 0, done.stderr
    assert "Cause: weights" in done.stdout
    assert done.stdout.partition("site ")[2].splitlines()[1].startswith("W:blocks.1.a ")
    assert "no activation range that can be switched" in done.stdout
    assert "W:blocks.1.a" in (folder / "cause.svg").read_text()
    other = _diagnose(folder, *words)
    assert other.returncode == 2
    assert "give the function that makes the candidate" in other.stderr
    named = ("--factory=tests.quantised.layers:layers", "--out=repaired")
    repaired = invoked("repair", *words, *named, directory=folder)
    assert repaired.returncode in {0, 4}, repaired.stdout + repaired.stderr
    assert "in FP32: W:blocks.1.a" in repaired.stdout
    assert (
        "the ranges of a module are set by the function" in repaired.stdout
        or "the damage is in weights" in repaired.stdout
    )
    file = next((folder / "repaired").glob("*-fp32-sites.safetensors"))
    assert "blocks.1.a.weight" in load_file(file)


@pytest.mark.release
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_range_of_an_exported_program_is_named(tmp_path: Path) -> None:
    """A program is code: without its digest it is not loaded."""
    folder = _in_pytorch(tmp_path, quantised("Int8WeightOnlyConfig"))
    digest = exported(folder / "int8.pt2", scales={"relu_1": 0.05})
    words = ("--slice=scanner=archive", "--candidate=int8.pt2", "--inputs=rec.npz")
    done = _diagnose(folder, *words, "--json", f"--digest={digest}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["blamed"][0]["site"], found["causes"][0]) == ("A:blocks.0.a", "saturation")
    assert found["candidate"] == digest
    other = _diagnose(folder, *words)
    assert other.returncode == 2
    assert f"--digest {digest}" in other.stderr
