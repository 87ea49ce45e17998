"""The functions of `quantdrift`: what they return reads as what the commands print, in a script, a notebook and an event loop."""

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantdrift
from quantdrift import aio
from quantdrift.core.records import Verdict
from tests.support.commands import invoked
from tests.support.notebooks import html_of
from tests.support.shadow.onnx_models import WEIGHT, inputs_of, linear_model, saved
from tests.support.storage.release_rows import NEW, OLD, write_release_week

pytestmark = pytest.mark.integration

CONFIG = """
[shadow]
provider = "cpu"
[capture]
headers = ["x-scanner", "x-user"]
[[models]]
name = "digits"
[[models.references]]
path = "fp32.onnx"
[[slices]]
name = "scanner"
header = "x-scanner"
values = ["office", "archive"]
"""
N = 800


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a configuration, a reference, candidates and a recording; it is the working directory."""
    (tmp_path / "config.toml").write_text(CONFIG, encoding="utf-8")
    saved(linear_model(), tmp_path / "fp32.onnx")
    saved(linear_model(weight=WEIGHT + np.float32(1e-4)), tmp_path / "good.onnx")
    worse = WEIGHT.copy()
    worse[0] *= np.float32(1.6)
    saved(linear_model(weight=worse), tmp_path / "worse.onnx")
    scanner = np.where(np.arange(N) % 2, "archive", "office")
    np.savez(tmp_path / "rec.npz", x=inputs_of(N, seed=0), scanner=scanner)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("candidate", ["good.onnx", "worse.onnx"])
def test_a_result_of_the_gate_reads_as_the_command_prints_it(directory: Path, candidate: str) -> None:
    """Text, JSON and JUnit."""
    printed = invoked("gate", candidate, "--inputs", "rec.npz", "--junit", "gate.xml", directory=directory)
    result = quantdrift.gate(candidate, inputs="rec.npz")
    assert f"{result}\n" == printed.stdout
    assert result.passed is (printed.returncode == 0)
    assert result.junit().count(b"<testcase") == (directory / "gate.xml").read_bytes().count(b"<testcase")
    assert result.to_dict()["slices"][0]["slice"] == "all"


def test_what_is_noticed_on_the_way_is_told_and_kept(directory: Path) -> None:
    """The command prints the same sentence to its standard error."""
    scanner = np.array(["office", "archve"] * (N // 2))
    np.savez(directory / "rec.npz", x=inputs_of(N, seed=0), scanner=scanner)
    told: list[quantdrift.Progress] = []
    result = quantdrift.gate("good.onnx", inputs="rec.npz", progress=told.append)
    (note,) = result.notes
    assert "archve" in note
    assert [now.text for now in told if now.is_note] == [note]
    printed = invoked("gate", "good.onnx", "--inputs", "rec.npz", directory=directory)
    assert f"quantdrift: {note}" in printed.stderr


@pytest.mark.usefixtures("directory")
def test_progress_counts_up_to_the_end() -> None:
    """Each share is at least the one before, and the last is all of it."""
    told: list[quantdrift.Progress] = []
    quantdrift.gate("good.onnx", inputs="rec.npz", progress=told.append)
    shares = [now.done / now.total for now in told if now.text == "comparing"]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.usefixtures("directory")
async def test_a_call_works_where_an_event_loop_runs() -> None:
    """As in the cell of a notebook, where the database is asked, too."""
    result = quantdrift.gate("good.onnx", inputs="rec.npz", slices=["scanner"])
    assert result.passed, str(result)
    assert result.colour is Verdict.OK


@pytest.mark.usefixtures("directory")
async def test_a_call_can_be_awaited_and_tells_its_progress_in_the_event_loop() -> None:
    """So its callback may touch what lives in the loop."""
    threads = []
    result = await aio.gate(
        "good.onnx", inputs="rec.npz", progress=lambda _: threads.append(threading.current_thread())
    )
    await asyncio.sleep(0)
    assert result.passed
    assert set(threads) == {threading.current_thread()}


@pytest.mark.usefixtures("directory")
async def test_a_cancelled_call_ends() -> None:
    """It does not compare what nobody waits for."""
    begun = asyncio.Event()
    task = asyncio.create_task(aio.gate("good.onnx", inputs="rec.npz", progress=lambda _: begun.set()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_an_error_has_the_sentence_that_the_command_prints(directory: Path) -> None:
    """It is an exception, and no exit."""
    with pytest.raises(quantdrift.OperatorError) as raised:
        quantdrift.gate("good.onnx", inputs="rec.npz", slices=["scaner"])
    printed = invoked("gate", "good.onnx", "--inputs", "rec.npz", "--slice", "scaner", directory=directory)
    assert printed.stderr == f"quantdrift: {raised.value}\n"


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantdrift.gate("absent.onnx", inputs="rec.npz"), "CANDIDATE: there is no file absent.onnx"),
        (lambda: quantdrift.gate("good.onnx", inputs="absent"), "--inputs: there is no file absent"),
        (lambda: quantdrift.gate("good.onnx"), "give either --inputs, recorded inputs, or --live"),
        (lambda: quantdrift.gate("good.onnx", inputs="rec.npz", config="no.toml"), "no.toml"),
        (lambda: quantdrift.compare("int8-1"), "give two versions"),
        (lambda: quantdrift.compare("a", "b", timezone="Mars"), "--timezone `Mars` is not a time zone"),
        (lambda: quantdrift.plan(rps=1, from_record=True), "give the traffic by --rps"),
        (lambda: quantdrift.plan(rps=1, slices={"scanner=office": 1.5}), "1.5 is not a share from 0 to 1"),
        (lambda: quantdrift.connect("mysql://somewhere"), "postgresql://"),
    ],
)
def test_a_wrong_argument_is_a_clear_error(call: Callable[[], Any], words: str) -> None:
    """Before anything runs."""
    with pytest.raises(quantdrift.OperatorError, match=words):
        call()


@pytest.mark.usefixtures("directory")
def test_a_notebook_shows_the_same_as_html() -> None:
    """With the components of page and report."""
    result = quantdrift.gate("worse.onnx", inputs="rec.npz")
    html = html_of(result)
    assert 'class="card model firing"' in html
    assert "<td>scanner=archive</td>" in html
    assert "fail: above the limit in " in html
    planned = html_of(quantdrift.plan(rps=10, slices={"scanner=office": 0.2}))
    assert '<th scope="col">samples/h</th>' in planned
    assert re.search(r"(?<!\w)body \{|:root", html) is None  # the notebook around it keeps its own style


def test_a_plan_reads_as_the_command_prints_it(directory: Path) -> None:
    """The simulation has a fixed seed."""
    asked = ("--rps", "300", "--slice", "scanner=office=20%")
    printed = invoked("plan", *asked, directory=directory)
    result = quantdrift.plan(rps=300, slices={"scanner=office": 0.2})
    assert f"{result}\n" == printed.stdout
    assert result.forecast.model == "digits"


async def test_a_comparison_reads_as_the_command_prints_it(
    directory: Path, postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two versions, and two periods."""
    await write_release_week(postgres_dsn, per_hour=20, seed=9)
    monkeypatch.setenv("QUANTDRIFT_DSN", postgres_dsn)
    printed = await asyncio.to_thread(invoked, "compare", "--from", OLD, "--to", NEW, directory=directory)
    result = await aio.compare(OLD, NEW)
    assert f"{result}\n" == printed.stdout
    assert str(quantdrift.compare(OLD, NEW)) == str(result)
    assert "<table>" in html_of(result)


async def test_a_connection_has_figures_incidents_and_items(postgres_dsn: str) -> None:
    """The figures of a slice are those of its items."""
    await write_release_week(postgres_dsn, per_hour=20, seed=9)
    drift = quantdrift.connect(postgres_dsn, library="arrow")
    figures = drift.figures("digits")
    assert (figures.version, next(iter(figures.slices))) == (NEW, "all")
    share = figures.slices["all"].changed_share
    assert share is not None
    window = figures.window
    items = drift.items("digits", version=NEW, start=window.begin, end=window.end)
    weight, flip = items["weight"].to_numpy(), items["flip"].to_numpy().astype(float)
    assert share.value == pytest.approx((weight * flip).sum() / weight.sum(), rel=0.02)
    assert "all" in str(figures)
    assert "<td>all</td>" in html_of(figures)
    assert str(drift.incidents()) == "No incidents."
    awaited = await aio.connect(postgres_dsn).figures("digits", version=OLD)
    assert awaited.version == OLD
    with pytest.raises(quantdrift.OperatorError, match="nothing of model `absent` was captured"):
        drift.figures("absent")
    with pytest.raises(quantdrift.OperatorError, match=f"its versions are: {OLD}, {NEW}"):
        drift.figures("digits", version="absent")
    with pytest.raises(quantdrift.OperatorError, match="give both, or none"):
        drift.figures("digits", begin=datetime.now(UTC))


def test_importing_the_package_loads_nothing_else() -> None:
    """A sidecar with a tap pays for no library that it does not use."""
    code = "import sys, quantdrift; print(sorted({name.split('.')[0] for name in sys.modules} & {'numpy', 'msgspec', 'onnx', 'sqlalchemy'}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"
