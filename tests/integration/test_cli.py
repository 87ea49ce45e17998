"""`quantdrift report`, `db` and `config check`, as typed."""

import asyncio
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import asyncpg
import msgspec
import numpy as np
import pytest

from tests.support.commands import invoked, started
from tests.support.monitor.alert_cases import event_with
from tests.support.shadow.onnx_models import WEIGHT, linear_model, saved
from tests.support.sidecar.relay_process import free_port
from tests.support.storage.report_rows import write_short_story

pytestmark = pytest.mark.integration


Run = Callable[..., subprocess.CompletedProcess[str]]


def _quantdrift(
    dsn: str, directory: Path, *arguments: str, run: Run = invoked
) -> subprocess.CompletedProcess[str]:
    (directory / "config.toml").write_text("")
    return run(*arguments, directory=directory, QUANTDRIFT_DSN=dsn)


def test_a_report_is_written_where_it_was_asked_for(postgres_dsn: str, tmp_path: Path) -> None:
    """As text and as JSON; an empty database makes an honest page."""
    done = _quantdrift(postgres_dsn, tmp_path, "report", "--week", "--out", "page.html", run=started)
    assert done.returncode == 0, done.stderr
    assert "<html" in (tmp_path / "page.html").read_text()
    done = _quantdrift(
        postgres_dsn, tmp_path, "report", "--from", "2026-01-01", "--to", "2026-02-01", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert list((tmp_path / "reports").glob("*.html"))
    assert _quantdrift(postgres_dsn, tmp_path, "report", "--week", "--day").returncode == 2
    assert "check its name" in _quantdrift(postgres_dsn, tmp_path, "report", "--model", "typo").stderr


def test_the_schema_is_upgraded_once_and_then_left_alone(postgres_dsn: str, tmp_path: Path) -> None:
    """Running it again is safe; machines read what was done."""
    done = _quantdrift(postgres_dsn, tmp_path, "db", "upgrade", "--json", run=started)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["applied"] == []
    printed = _quantdrift(postgres_dsn, tmp_path, "setup", "postgres").stdout
    assert "create role quantdrift_operator" in printed


@pytest.mark.release
def test_a_wrong_password_is_reported_without_a_traceback(postgres_dsn: str, tmp_path: Path) -> None:
    """Exit code 2, a sentence, and no password in it. Shadow and monitor wait instead: see `tests/fault/test_secrets.py`."""
    wrong = postgres_dsn.replace("@", "-wrong@")
    for command in (["db", "upgrade"], ["report", "--week"]):
        done = _quantdrift(wrong, tmp_path, *command, run=started)
        assert done.returncode == 2, (command, done.stderr)
        assert "Traceback" not in done.stderr
        assert "-wrong" not in done.stderr


@pytest.mark.parametrize("command", [["report", "--week"], ["slices", "list"], ["policy", "show"], ["pause"]])
def test_a_stopped_data_directory_says_to_start_up(tmp_path: Path, command: list[str]) -> None:
    """The message names the directory, its file and the address, and has no password."""
    data, port = tmp_path / "data", free_port()
    (tmp_path / "config.toml").touch()
    advice = f"start `quantdrift up --data {data}`"
    empty = invoked(*command, "--data", str(data), directory=tmp_path)
    assert (empty.returncode, advice in empty.stderr) == (2, True), empty.stderr
    data.mkdir()
    (data / "dsn").write_text(f"postgresql://quantdrift:secret@127.0.0.1:{port}/quantdrift\n")
    (data / "nats.url").write_text(f"nats://secret@127.0.0.1:{port}\n")
    stopped = invoked(*command, "--data", str(data), directory=tmp_path)
    assert stopped.returncode == 2, stopped.stderr
    assert f"no server answers at 127.0.0.1:{port}" in stopped.stderr
    assert advice in stopped.stderr
    assert "secret" not in stopped.stderr


def test_config_check_opens_the_references(tmp_path: Path) -> None:
    """It says what each one is, and refuses one that is itself reduced, before anything is deployed."""
    text = '[[models]]\nname = "m"\n[[models.references]]\npath = "model.onnx"\n'
    command = ("config", "check", "--references")
    for weight, code, said in (
        (WEIGHT, 0, "float32, opset"),
        (WEIGHT.astype(np.float16), 2, "not full precision"),
    ):
        saved(linear_model(weight=weight), tmp_path / "model.onnx")
        (tmp_path / "config.toml").write_text(text)
        done = invoked(*command, directory=tmp_path)
        assert done.returncode == code, done.stderr
        assert said in done.stdout + done.stderr
    saved(linear_model(), tmp_path / "model.onnx")
    for layer, code in (("product", 0), ("produkt", 2)):
        (tmp_path / "config.toml").write_text(text.replace('"m"', f'"m"\nembedding = "{layer}"', 1))
        done = invoked(*command, directory=tmp_path)
        assert done.returncode == code, done.stderr
        assert ("did you mean `product`" in done.stderr) is (code == 2)
    (tmp_path / "config.toml").write_text(text.replace('"m"', '"m"\noutput = "logitz"', 1))
    done = invoked(*command, directory=tmp_path)
    assert done.returncode == 2
    assert "models `m`: the output `logitz` is not one of the reference" in done.stderr
    assert "did you mean `logits`?" in done.stderr


@pytest.mark.parametrize(
    "command", [("config", "check"), ("report",), ("up",), ("sidecar",), ("shadow",)], ids=lambda one: one[0]
)
def test_every_command_prints_all_mistakes_of_a_configuration(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    """One line each, with the file, the option and what is allowed; exit code 2 and no traceback."""
    path = tmp_path / "config.toml"
    path.write_text('[sampling]\nrate = 5\n[sidecar]\nlisten = "8000"\nworkerz = 2\n')
    done = invoked(*command, directory=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "quantdrift: the configuration is wrong:",
        "  - config.toml: sampling.rate = 5: it must be a number from 0 to 1",
        "  - config.toml: unknown option `sidecar.workerz`: did you mean `workers`?",
        '  - config.toml: sidecar.listen is `8000`: it must be HOST:PORT: write listen = "127.0.0.1:8000"',
    ]


@pytest.mark.parametrize(
    "command",
    [("config", "check"), ("up",), ("sidecar",), ("shadow",), ("monitor",), ("db", "upgrade")],
    ids=lambda one: one[0],
)
def test_no_command_starts_with_an_address_in_plaintext_to_another_machine(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    """Neither in the configuration nor in the address of Postgres; exit code 2, and no password in the message."""
    address = "nats://u:hunter2@nats.example:4222"
    said = (
        "QUANTDRIFT__STREAM__URL: stream.url is `nats://nats.example:4222`, which is plaintext over a network"
    )
    dsn = "postgresql://u:hunter2@db.example/q"
    (tmp_path / "config.toml").write_text("")
    done = invoked(*command, directory=tmp_path, QUANTDRIFT__STREAM__URL=address)
    assert done.returncode == 2
    assert said in done.stderr
    assert "hunter2" not in done.stderr
    if command[0] not in {
        "up",
        "sidecar",
    }:  # a sidecar never has the address, and `up` gives it to its children
        ports = {f"QUANTDRIFT__{role}__ADMIN": "127.0.0.1:0" for role in ("SHADOW", "MONITOR")}
        done = invoked(*command, directory=tmp_path, QUANTDRIFT_DSN=dsn, **ports)
        assert done.returncode == 2, done.stderr
        assert "has no sslmode, and db.example:5432 is not this machine" in done.stderr
        assert "hunter2" not in done.stderr


def test_commands_say_of_a_slice_that_alerts_what_its_page_said(postgres_dsn: str, tmp_path: Path) -> None:
    """The figures that decided, in the page's own words, and no exponent; its recent mean of 0.4 % is within its budget."""
    event = event_with(
        after=0.053,
        n_since_onset=254,
        onset="2026-03-01T12:00:00+00:00",
        begin="changed",
        evidence=1.6e6,
        changed=0.053,
        changed_low=0.031,
    )

    async def write() -> None:
        story = await write_short_story(postgres_dsn)
        db = await asyncpg.connect(postgres_dsn)
        details = msgspec.json.encode(event.attributes()).decode()
        await db.execute("update alert set details = $2 where slice_id = $1", story.slice_ids[1], details)
        await db.execute("update verdict set evidence = 1.6e6, threshold = 1.2e6")
        await db.execute(
            "insert into detector (model_version_id, slice_id, metric, kind, state, budget, n_groups, evidence, fold_seq,"
            " created_at, last_at) select model_version_id, slice_id, 'flip', 'change', '', 0.01, 400, 1.6e6, 1,"
            " now() - interval '1 day', now() from verdict"
        )
        await db.execute("update fold set event_time = now()")
        await db.close()

    asyncio.run(write())
    (tmp_path / "config.toml").write_text("")
    said = "at least 3.1 % of answers in scanner=faint changed (budget: 1 %)"
    text = invoked("triage", directory=tmp_path, QUANTDRIFT_DSN=postgres_dsn).stdout
    assert said in text
    assert "1,600,000" in text
    assert not re.search(r"\de[+-]\d", text)
    listed = json.loads(invoked("triage", "--json", directory=tmp_path, QUANTDRIFT_DSN=postgres_dsn).stdout)
    assert said in {one["alert"] for one in (*listed["slices"], *listed["firing"])}
