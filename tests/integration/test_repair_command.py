"""`quantdrift repair` on recorded inputs, as typed, with real quantised networks."""

import asyncio
import hashlib
import json
import re
import secrets
import shlex
import subprocess
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import numpy as np
import pytest

import quantdrift
from benchmarks.repair.faults import Fault, Kind, Patient
from benchmarks.repair.network import INPUT, OUTPUT, drawn, pages, quantise, write
from quantdrift import aio
from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Stream
from quantdrift.core.records import Exemplar, ExemplarItem, ExemplarKind
from quantdrift.core.stream.connection import Queue
from quantdrift.release.sites import SwitchableCopy, outputs_of, session_of
from tests.support.commands import invoked
from tests.support.notebooks import html_of
from tests.support.shadow.onnx_models import exchange_of, tensor

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # minutes on a busy machine

CONFIG = f"""
[shadow]
provider = "cpu"
[capture]
headers = ["x-scanner"]
[[models]]
name = "digits"
output = "{OUTPUT}"
output_kind = "logits"
[models.budget]
flip = 0.03
[[models.references]]
path = "fp32.onnx"
[[slices]]
name = "scanner"
header = "x-scanner"
values = ["office", "bright"]
"""
N = {"office": 4_000, "bright": 2_000}
GAIN = {"office": 1, "bright": 8}
OFFICE = ("--inputs=office.npz", "--config=office.toml")
NARROW = Fault(site="A:image", kind=Kind.NARROW, strength=5)
WEIGHT = Fault(site="W:node_side1_conv", kind=Kind.ROUNDING, strength=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a configuration, a reference, candidates, and recordings of office pages and bright ones."""
    folder = tmp_path_factory.mktemp("repair")
    write(folder / "fp32.onnx", pages(), 1)
    quantise(folder / "fp32.onnx", folder / "sound.onnx", pages().learnable)
    rng = np.random.default_rng(3)
    images = {name: GAIN[name] * drawn(pages().held_out, n, rng) for name, n in N.items()}
    scanners = {name: np.full(n, name) for name, n in N.items()}
    patient = Patient(folder / "fp32.onnx", folder / "sound.onnx", images["office"][:500], folder)
    for name, fault in (("narrow", NARROW), ("weight", WEIGHT)):
        patient.write([fault]).rename(folder / f"{name}.onnx")
    np.savez(
        folder / "rec.npz",
        image=np.concatenate([*images.values()]),
        scanner=np.concatenate([*scanners.values()]),
    )
    np.savez(folder / "office.npz", image=images["office"], scanner=scanners["office"])
    few = images["office"][:300]
    np.savez(folder / "few.npz", image=few, scanner=scanners["office"][:300])
    (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
    (folder / "office.toml").write_text(CONFIG.replace(', "bright"', ""), encoding="utf-8")
    return folder


def _repair(folder: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return invoked("repair", f"--out={out}", *arguments, directory=folder)


def _record(out: Path) -> dict[str, dict[str, object]]:
    """Return the repairs by their kind; of those with sites in FP32 the one with most."""
    record = json.loads((out / "repairs.json").read_bytes())
    found: dict[str, dict[str, object]] = {}
    for one in sorted(record["repairs"], key=lambda one: len(one["sites"])):
        found[one["kind"]] = one
    return found


def _brightened(folder: Path, path: Path, rows: Any, gain: float) -> None:
    """Write the recording with some of its pages brighter."""
    with np.load(folder / "rec.npz") as recorded:
        image, scanner = recorded["image"], recorded["scanner"]
    image[rows] *= gain
    np.savez(path, image=image, scanner=scanner)


def test_the_faulty_site_in_fp32_passes_the_gate(folder: Path, tmp_path: Path) -> None:
    """Exit code 0; the file is there, has its digest, and decides as the reference does where the candidate does not."""
    out = tmp_path / "out"
    done = _repair(folder, out, "--slice=scanner=office", "--candidate=narrow.onnx", *OFFICE)
    assert done.returncode == 0, done.stderr
    assert "Cause: saturation" in done.stdout
    assert "in FP32: A:image" in done.stdout
    diagnosed = invoked(
        "diagnose", "--slice=scanner=office", "--candidate=narrow.onnx", *OFFICE, directory=folder
    )
    heading, damage, *_ = diagnosed.stdout.splitlines()
    assert heading.startswith("Inputs: ")
    assert damage.partition(";")[0] == done.stdout.partition(";")[0], "one recording has one share"
    assert "quantdrift gate " in done.stdout
    one = _record(out)["fp32-sites"]
    assert (one["result"], one["sites"][0]) == ("passes", "A:image")  # type: ignore[index]
    file = out / str(one["file"])
    assert one["digest"] == f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    copy = SwitchableCopy(folder / "narrow.onnx", folder / "fp32.onnx")
    inputs = {INPUT: np.load(folder / "office.npz")["image"]}
    truth = copy.expected(inputs)[OUTPUT].argmax(axis=1)
    repaired = outputs_of(session_of(str(file), str(file), 1), [OUTPUT], inputs)[OUTPUT].argmax(axis=1)
    assert (copy.served(inputs)[OUTPUT].argmax(axis=1) != truth).mean() > 0.03
    assert (repaired != truth).mean() < 0.02


@pytest.mark.release
async def test_python_says_what_the_command_prints(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Awaited, too; the times that are measured differ between two runs."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("QUANTDRIFT_DSN", raising=False)
    only = ("--only=fp32-sites", "--only=reference")
    printed = await asyncio.to_thread(
        _repair, folder, tmp_path / "a", "--slice=scanner=office", "--candidate=narrow.onnx", *OFFICE, *only
    )
    result = await aio.repair(
        slice="scanner=office",
        candidate="narrow.onnx",
        inputs="office.npz",
        config="office.toml",
        out=tmp_path / "b",
        only=("fp32-sites", "reference"),
    )
    assert result.passed
    assert result.files
    assert all(file.is_file() for file in result.files)

    def untimed(text: str) -> list[str]:
        return re.sub(
            r" +\d+\.\d\d x +", " ", text.replace(str(tmp_path / "a"), str(tmp_path / "b"))
        ).splitlines()

    assert untimed(printed.stdout)[:3] == untimed(str(result))[:3]
    assert {*untimed(printed.stdout)} >= {line for line in untimed(str(result)) if "in FP32" in line}
    assert '<th scope="col">worst other slice</th>' in html_of(result)
    with pytest.raises(quantdrift.OperatorError, match="--only retrain: there is no such repair"):
        await aio.repair(
            slice="scanner=office", candidate="narrow.onnx", out=tmp_path / "c", only=["retrain"]
        )


@pytest.mark.release
async def test_the_gate_command_that_is_printed_writes_its_verdict_to_the_alert(
    folder: Path, tmp_path: Path, record: asyncpg.Connection, postgres_dsn: str
) -> None:
    """It is run as printed, but for the traffic, in place of which there is a recording."""
    version = await record.fetchval(
        "insert into model_version (model, candidate_version, reference_digest) values ('digits', 'int8', 'r') returning id"
    )
    slice_ = await record.fetchval(
        "insert into slice (model, name, predicate, definition) values ('digits', 'scanner=office', 'office', $1) returning id",
        '{"where": [{"key": "header.x-scanner", "equals": "office"}]}',
    )
    alert = await record.fetchval(
        "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)"
        " values ($1, $2, 'firing', 'flip', now(), now(), '{}') returning id",
        version,
        slice_,
    )
    out = tmp_path / "an out"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return invoked(*words, directory=folder, QUANTDRIFT_DSN=postgres_dsn)

    done = await asyncio.to_thread(
        run, "repair", str(alert), f"--out={out}", "--candidate=narrow.onnx", "--only=fp32-sites", *OFFICE
    )
    assert done.returncode == 0, done.stderr
    printed = re.search(r"judge it on live traffic: (.+)$", done.stdout, re.MULTILINE)
    assert printed is not None
    command = shlex.split(printed[1])
    assert command[0] == "quantdrift"
    assert {"--live", f"--note={alert}", "--config=office.toml"} <= {*command}
    command.remove("--live")
    judged = await asyncio.to_thread(run, *command[1:], "--inputs=office.npz")
    assert judged.returncode == 0, judged.stderr
    notes = await record.fetch("select reason from alert_action where alert_id = $1 order by id", alert)
    assert [note["reason"].partition(":")[0] for note in notes] == ["Cause", "Repair", "Gate"]
    assert notes[-1]["reason"].startswith("Gate: pass: digits may be replaced by sha256:")


@pytest.mark.release
def test_a_repair_that_moves_the_damage_fails_and_names_the_other_slice(folder: Path, tmp_path: Path) -> None:
    """Ranges for bright pages are too wide for those of the office; a copy for the bright ones alone leaves the office as it is."""
    _brightened(folder, tmp_path / "rec.npz", slice(N["office"], None), 1.5)
    out, inputs = tmp_path / "out", tmp_path / "rec.npz"
    done = _repair(folder, out, "--slice=scanner=bright", "--candidate=sound.onnx", f"--inputs={inputs}")
    assert done.returncode in {0, 4}, done.stderr
    found = _record(out)
    moved, own = found["recalibrate"], found["own-copy"]
    assert (moved["result"], moved["file"]) == ("moves the damage", None)
    assert "scanner=office" in moved["worse"]  # type: ignore[operator]
    assert "fail: damages " in done.stdout
    assert own["result"] in {"passes", "more items needed"}
    assert own["route"] == "scanner=bright"
    office = own["flips"]["scanner=office"]  # type: ignore[index]
    assert office["before"] == office["after"]
    assert own["flips"]["scanner=bright"]["after"] < 0.03  # type: ignore[index]
    assert len(own["calibrated_on"]) == 64  # type: ignore[arg-type]
    route = next(out.glob("*-own-copy.route.yaml")).read_text()
    assert '"x-scanner": {exact: "bright"}' in route


@pytest.mark.release
def test_ranges_are_chosen_on_inputs_that_built_none(folder: Path, tmp_path: Path) -> None:
    """A few bright pages are glaring: ranges that hold them leave no levels to the others, so some of the values are cut off."""
    glaring = N["office"] + np.random.default_rng(11).choice(N["bright"], 60, replace=False)
    _brightened(folder, tmp_path / "glaring.npz", glaring, 60)
    out = tmp_path / "out"
    done = _repair(
        folder,
        out,
        "--slice=scanner=bright",
        "--candidate=sound.onnx",
        f"--inputs={tmp_path / 'glaring.npz'}",
        "--only=own-copy",
    )
    own = _record(out)["own-copy"]
    tried = dict(own["ranges"]["tried"])  # type: ignore[index]
    assert own["ranges"]["hold"] == min(tried, key=tried.get) < 1.0  # type: ignore[index,arg-type]
    assert tried[1.0] > 2 * min(tried.values())
    assert "% of the values" in done.stdout


@pytest.mark.release
def test_nothing_that_calibrates_is_judged_by(folder: Path, tmp_path: Path) -> None:
    """The slice is cut into halves: what one calibrates on and what one judges by are no more than all of it."""
    out = tmp_path / "out"
    done = _repair(
        folder,
        out,
        "--slice=scanner=bright",
        "--candidate=sound.onnx",
        "--inputs=rec.npz",
        "--only=own-copy",
        "--json",
    )
    record = json.loads(done.stdout)
    (own,) = record["repairs"]
    judged = next(one for one in own["gate"]["slices"] if one["slice"] == "scanner=bright")
    assert judged["n"] + record["diagnosis"]["n_items"] == N["bright"]
    assert json.loads((out / "repairs.json").read_bytes())["repairs"][0]["digest"] == own["digest"]


@pytest.mark.release
def test_calibration_is_not_tried_on_a_damaged_weight(folder: Path, tmp_path: Path) -> None:
    """The text says why; the weight in FP32 helps."""
    out = tmp_path / "out"
    done = _repair(folder, out, "--slice=scanner=office", "--candidate=weight.onnx", *OFFICE)
    assert done.returncode == 0, done.stderr
    assert "recalibrate: not built, the damage is in weights" in done.stdout
    assert "W:node_side1_conv" in done.stdout


async def _keep_exemplars(folder: Path, queue: Queue) -> list[str]:
    """Keep exemplars of both scanners and of all traffic, which has a fifth of bright pages; return the ids of the damaged ones."""
    copy = SwitchableCopy(folder / "sound.onnx", folder / "fp32.onnx")
    with np.load(folder / "rec.npz") as recorded:
        images = recorded["image"]
    served, expected = (side({INPUT: images})[OUTPUT] for side in (copy.served, copy.expected))
    flips = served.argmax(axis=1) != expected.argmax(axis=1)
    bright = N["office"]
    damaged = [bright + row for row in range(200, N["bright"]) if flips[bright + row]][:40]
    kept = [(bright + row, "scanner=bright", 1.0) for row in range(64)]
    kept += [(row, "scanner=office", 1.0) for row in range(64)]
    kept += [(bright + 64 + row, "all", 1.0) for row in range(32)]
    kept += [(64 + row, "all", 0.25) for row in range(32)]
    kept += [(row, "scanner=bright", 0.0) for row in damaged]
    ids = []
    await queue.ensure_exemplars()
    for row, name, probability in kept:
        scanner = "office" if row < bright else "bright"
        exchange = msgspec.structs.replace(
            exchange_of(np.zeros((1, 4), np.float32), attributes={"header.x-scanner": scanner}),
            inputs=(tensor(INPUT, images[row][None]),),
            outputs=(tensor(OUTPUT, served[row][None]),),
        )
        exemplar = Exemplar(
            kind=ExemplarKind.RANDOM if probability else ExemplarKind.DAMAGED,
            slice=name,
            exchange=exchange,
            items=(ExemplarItem(index=0, flip=bool(flips[row])),),
            reference=(tensor(OUTPUT, expected[row][None]),),
            reference_digest="abc",
            probability=probability or None,
            compared_at=exchange.captured_at,
        )
        await queue.publish_exemplar(
            "digits", name, exemplar.kind.value, f"{name}{row}{probability}", encode(exemplar)
        )
        ids += [] if probability else [exchange.id]
    return ids


@pytest.mark.release
async def test_without_inputs_it_works_on_exemplars_and_measures_by_random_ones_alone(
    folder: Path, tmp_path: Path, nats_url: str
) -> None:
    """Damaged ones are calibrated on and never judge; each slice is judged by its own; it says that they are too few for a pass."""
    name = f"t-{secrets.token_hex(6)}"
    (folder / "stream.toml").write_text(f'[stream]\nurl = "{nats_url}"\nname = "{name}"\n{CONFIG}')
    queue = await Queue.connect(Stream(url=nats_url, name=name), client_name="test")
    words = ("--slice=scanner=bright", "--candidate=sound.onnx", "--config=stream.toml")
    try:
        await queue.ensure()
        empty = await asyncio.to_thread(_repair, folder, tmp_path / "none", *words)
        assert (empty.returncode, "models.exemplars = true" in empty.stderr) == (2, True)
        damaged = await _keep_exemplars(folder, queue)
        out = tmp_path / "out"
        done = await asyncio.to_thread(_repair, folder, out, *words)
        other = await asyncio.to_thread(
            _repair, folder, tmp_path / "other", *words[:1], "--candidate=weight.onnx", *words[2:]
        )
    finally:
        await queue.close()
    assert done.returncode == 4, done.stderr
    assert "40 of them are kept because they are damaged: they measure nothing." in done.stdout
    assert "Exemplars are too few to decide it." in done.stdout
    found, own = json.loads((out / "repairs.json").read_bytes()), _record(out)["own-copy"]
    assert found["inputs"] == "exemplars"
    judged = {one["slice"]: one for one in own["gate"]["slices"]}  # type: ignore[index]
    assert found["diagnosis"]["n_items"] >= 32
    assert found["diagnosis"]["n_items"] + judged["scanner=bright"]["n"] == 64
    assert 0 < judged["scanner=office"]["n"] < 64 > judged["all"]["n"] > 0
    assert own["result"] == "more items needed"
    calibrated = {text.partition(":")[0] for text in own["calibrated_on"]}  # type: ignore[attr-defined]
    assert calibrated & {*damaged}
    flips = own["flips"]
    assert flips["scanner=bright"]["before"] > 0.3  # type: ignore[index]
    # A fifth of all traffic, though half of the exemplars: it is routed, whatever they were drawn for.
    assert flips["all"]["before"] < 0.5 * flips["scanner=bright"]["before"]  # type: ignore[index]
    assert flips["all"]["after"] < flips["all"]["before"]  # type: ignore[index]
    assert (other.returncode, "it is not the file that serves" in other.stderr) == (2, True)


@pytest.mark.release
def test_too_few_inputs_are_told_with_their_number(folder: Path, tmp_path: Path) -> None:
    """Exit code 4: the repair may be good, but this cannot be told from 150 pages."""
    out = tmp_path / "out"
    done = _repair(
        folder,
        out,
        "--slice=scanner=office",
        "--candidate=narrow.onnx",
        "--inputs=few.npz",
        "--config=office.toml",
        "--only=fp32-sites",
    )
    assert done.returncode == 4, done.stderr
    assert "more inputs of " in done.stdout
    assert list(out.glob("*-fp32-sites.onnx"))


def test_a_sound_slice_gets_no_repair(folder: Path, tmp_path: Path) -> None:
    """Exit code 3, and nothing is written."""
    out = tmp_path / "out"
    done = _repair(folder, out, "--slice=scanner=office", "--candidate=sound.onnx", "--inputs=office.npz")
    assert done.returncode == 3, done.stderr
    assert "within its budget" in done.stdout
    assert not out.exists()


def test_a_folder_that_has_something_is_refused_before_anything_runs(folder: Path, tmp_path: Path) -> None:
    """Exit code 2; the file in it stays as it is."""
    (tmp_path / "1-own-copy.onnx").write_text("mine")
    done = _repair(folder, tmp_path, "--slice=scanner=bright", "--candidate=sound.onnx", "--inputs=rec.npz")
    assert done.returncode == 2
    assert "is not empty, and nothing is overwritten" in done.stderr
    assert (tmp_path / "1-own-copy.onnx").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--slice=scanner=brigt", "--candidate=sound.onnx", "--inputs=rec.npz"), "no such slice; known are"),
        (
            ("--slice=scanner=bright", "--candidate=sound.onnx", "--inputs=office.npz"),
            "no item is in the slice",
        ),
        (("--candidate=sound.onnx", "--inputs=rec.npz"), "give either ALERT"),
        (
            ("--slice=scanner=bright", "--candidate=fp32.onnx", "--inputs=rec.npz"),
            "nothing that is quantised",
        ),
    ],
    ids=["typing error", "none recorded", "nothing named", "not quantised"],
)
def test_what_cannot_be_repaired_is_an_error_that_says_why(
    folder: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    """Exit code 2, which is no verdict; nothing is written."""
    done = _repair(folder, tmp_path / "out", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "out").exists()
