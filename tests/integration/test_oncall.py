"""Drift in, one page out: a real monitor, Postgres, Prometheus, Alertmanager and receiver."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import msgspec
import pytest
import yaml

from quantdrift.storage.database import Database
from quantdrift.storage.incidents.incidents import Say, say
from tests.support.monitor.fold_stream import (
    FAINT_ID,
    SECOND_US,
    batches,
    store_batch,
    store_catalog,
    store_serving,
)
from tests.support.monitor.monitor_processes import running_monitor, until
from tests.support.sidecar.relay_process import free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
_PROGRAMS = ("prometheus", "prometheus-alertmanager", "amtool")
_MISSING = [name for name in _PROGRAMS if shutil.which(name) is None]
needs_programs = pytest.mark.skipif(
    bool(_MISSING),
    reason=f"not installed: {', '.join(_MISSING)} (apt-get install prometheus prometheus-alertmanager)",
)


class _Receiver:
    """An HTTP server that keeps every notification."""

    def __init__(self) -> None:
        self.notifications: list[dict[str, Any]] = []
        notifications = self.notifications

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                notifications.append(json.loads(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def of(self, status: str) -> list[dict[str, Any]]:
        """Return the notifications with a status."""
        return [one for one in self.notifications if one["status"] == status]


@pytest.fixture
def receiver() -> Iterator[_Receiver]:
    """Return a receiver that listens."""
    found = _Receiver()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


@contextlib.asynccontextmanager
async def _program(*command: str) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


def _alertmanager_config(directory: Path, receiver: _Receiver) -> Path:
    """Write the configuration of `deploy/` with short waits and `receiver` as the target of pages."""
    document = yaml.safe_load((DEPLOY / "alertmanager/alertmanager.yml").read_text(encoding="utf-8"))
    document["route"] |= {"group_wait": "1s", "group_interval": "1s"}
    url = f"http://127.0.0.1:{receiver.server.server_address[1]}/"
    document["receivers"] = [
        {"name": "page", "webhook_configs": [{"url": url, "send_resolved": True}]},
        {"name": "ticket"},
    ]
    shutil.copy(DEPLOY / "alertmanager/quantdrift.tmpl", directory)
    path = directory / "alertmanager.yml"
    path.write_text(yaml.safe_dump(document))
    return path


def _prometheus_config(directory: Path, monitors: tuple[int, ...], alertmanager: int) -> Path:
    shutil.copy(DEPLOY / "prometheus/rules.yaml", directory)
    path = directory / "prometheus.yml"
    path.write_text(
        yaml.safe_dump(
            {
                "global": {
                    "scrape_interval": "500ms",
                    "scrape_timeout": "500ms",
                    "evaluation_interval": "500ms",
                },
                "rule_files": ["rules.yaml"],
                "scrape_configs": [
                    {
                        "job_name": "monitor",
                        "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in monitors]}],
                    }
                ],
                "alerting": {
                    "alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]
                },
            }
        )
    )
    return path


def _query(port: int, query: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{port}/api/v1/query?query={quote(query)}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    except OSError:  # it does not listen yet
        return []
    return found


@needs_programs
async def test_drift_is_one_page_through_a_hang_and_the_end_of_leaders_and_then_one_end(
    postgres_dsn: str,
    record: asyncpg.Connection,
    tmp_path: Path,
    receiver: _Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No leader change sends an end or a second page.

    The leader is stopped, and no process shows a verdict until the next one leads. It wakes up and stands by; the next one
    is killed, and the first leads again.
    """
    await store_catalog(record)
    for rows in batches(200):
        await store_batch(record, rows)
    monitor, second, prometheus, alertmanager = (free_port() for _ in range(4))
    monkeypatch.setenv("QUANTDRIFT__MONITOR__ADMIN", f"127.0.0.1:{monitor}")

    def of(port: int, query: str) -> str:
        name, _, rest = query.partition(" ")
        return f'{name}{{instance="127.0.0.1:{port}"}} {rest}'

    async def shows(query: str) -> bool:
        return bool(await asyncio.to_thread(_query, prometheus, query))

    async def paged() -> bool:
        return bool(receiver.of("firing"))

    async def ended() -> bool:
        return bool(receiver.of("resolved"))

    async with contextlib.AsyncExitStack() as programs:
        await programs.enter_async_context(
            _program(
                "prometheus-alertmanager",
                f"--config.file={_alertmanager_config(tmp_path, receiver)}",
                f"--storage.path={tmp_path / 'alertmanager'}",
                f"--web.listen-address=127.0.0.1:{alertmanager}",
                "--cluster.listen-address=",
            )
        )
        await programs.enter_async_context(
            _program(
                "prometheus",
                f"--config.file={_prometheus_config(tmp_path, (monitor, second), alertmanager)}",
                f"--storage.tsdb.path={tmp_path / 'prometheus'}",
                f"--web.listen-address=127.0.0.1:{prometheus}",
            )
        )
        async with running_monitor(postgres_dsn, tmp_path) as former:
            await until(paged, "the drift is paged")
            former.send_signal(signal.SIGSTOP)
            await until(lambda: shows(of(monitor, "up == 0")), "Prometheus finds no monitor")
            monkeypatch.setenv("QUANTDRIFT__MONITOR__ADMIN", f"127.0.0.1:{second}")
            following = await programs.enter_async_context(running_monitor(postgres_dsn, tmp_path))
            await until(lambda: shows(of(second, "quantdrift_slice_verdict == 3")), "the next one shows it")
            former.send_signal(signal.SIGCONT)
            await until(lambda: shows(of(monitor, "quantdrift_monitor_leader == 0")), "the first stands by")
            following.kill()
            await until(lambda: shows(of(second, "up == 0")), "the next one is gone")
            await until(lambda: shows(of(monitor, "quantdrift_slice_verdict == 3")), "the first leads again")
            assert not receiver.of("resolved")
            assert len(receiver.of("firing")) == 1
            for rows in _healthy_again(300):
                await store_batch(record, rows)
            await until(ended, "the end is sent")

    (page,), (end,) = receiver.of("firing"), receiver.of("resolved")
    assert page["groupLabels"] == {"alertname": "QuantdriftSliceFiring", "model": "digits", "version": "1"}
    (alert,) = page["alerts"]
    assert alert["labels"]["slice"] == "scanner=faint"
    assert alert["labels"]["severity"] == "page"
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url", "page"}
    assert end["groupKey"] == page["groupKey"]


@needs_programs
@pytest.mark.release
async def test_the_page_of_a_version_ends_within_a_minute_of_its_replacement_and_comes_back_with_it(
    postgres_dsn: str,
    record: asyncpg.Connection,
    tmp_path: Path,
    receiver: _Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gauge says `unknown` at once: a rule that uses the last known verdict for 15 minutes waits for none of them."""
    await store_catalog(record)
    for rows in batches(200):
        await store_batch(record, rows)
    monitor, prometheus, alertmanager = (free_port() for _ in range(3))
    monkeypatch.setenv("QUANTDRIFT__MONITOR__ADMIN", f"127.0.0.1:{monitor}")

    def times(n_firing: int, n_resolved: int) -> Callable[[], Awaitable[bool]]:
        async def hold() -> bool:
            return (len(receiver.of("firing")), len(receiver.of("resolved"))) == (n_firing, n_resolved)

        return hold

    async with (
        _program(
            "prometheus-alertmanager",
            f"--config.file={_alertmanager_config(tmp_path, receiver)}",
            f"--storage.path={tmp_path / 'alertmanager'}",
            f"--web.listen-address=127.0.0.1:{alertmanager}",
            "--cluster.listen-address=",
        ),
        _program(
            "prometheus",
            f"--config.file={_prometheus_config(tmp_path, (monitor,), alertmanager)}",
            f"--storage.tsdb.path={tmp_path / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{prometheus}",
        ),
        running_monitor(postgres_dsn, tmp_path),
    ):
        await until(times(1, 0), "the drift is paged")
        await store_serving(record, 3, 700, 200)
        await until(times(1, 1), "the end is sent")
        shown = 'quantdrift_slice_verdict{version="1",slice="scanner=faint"}'
        assert [row["value"][1] for row in await asyncio.to_thread(_query, prometheus, shown)] == ["1"]
        await store_serving(record, 1, 1000, 200)
        await store_serving(record, 3, 1001, 200)
        await until(times(2, 1), "it is paged again")


@needs_programs
@pytest.mark.release
async def test_the_page_of_an_incident_ends_while_it_is_mitigated_also_where_no_prometheus_is(
    postgres_dsn: str,
    record: asyncpg.Connection,
    tmp_path: Path,
    receiver: _Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the gauge and its rule, and by what the monitor posts to an Alertmanager itself, with the reason; the verdict goes on."""
    await store_catalog(record)
    for rows in batches(200):
        await store_batch(record, rows)
    monitor, prometheus, alertmanager, second = (free_port() for _ in range(4))
    monkeypatch.setenv("QUANTDRIFT__MONITOR__ADMIN", f"127.0.0.1:{monitor}")
    monkeypatch.setenv("QUANTDRIFT__NOTIFY__ALERTMANAGER", f'["http://127.0.0.1:{second}"]')
    of_rules, of_monitor = tmp_path / "rules", tmp_path / "direct"
    of_rules.mkdir()
    of_monitor.mkdir()

    def times(n_firing: int, n_resolved: int) -> Callable[[], Awaitable[bool]]:
        async def hold() -> bool:
            found = [
                [one for one in receiver.of(status) if "alert" in one["commonLabels"]]
                for status in ("firing", "resolved")
            ]
            direct = tuple(map(len, found))
            total = len(receiver.of("firing")), len(receiver.of("resolved"))
            return direct == (n_firing, n_resolved) and total == (2 * n_firing, 2 * n_resolved)

        return hold

    async def said(what: Say, reason: str) -> None:
        number = await record.fetchval(
            "select incident_id from alert where slice_id = $1 and resolved_at is null", FAINT_ID
        )
        async with Database(postgres_dsn) as database, database.begin() as connection:
            await say(connection, number, what, reason, identity="ada")

    def alertmanager_at(folder: Path, port: int) -> contextlib.AbstractAsyncContextManager[None]:
        return _program(
            "prometheus-alertmanager",
            f"--config.file={_alertmanager_config(folder, receiver)}",
            f"--storage.path={folder / 'alertmanager'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--cluster.listen-address=",
        )

    async with (
        alertmanager_at(of_rules, alertmanager),
        alertmanager_at(of_monitor, second),
        _program(
            "prometheus",
            f"--config.file={_prometheus_config(of_rules, (monitor,), alertmanager)}",
            f"--storage.tsdb.path={of_rules / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{prometheus}",
        ),
        running_monitor(postgres_dsn, tmp_path),
    ):
        await until(times(1, 0), "the drift is paged by both")
        await said(Say.MITIGATE, "the caller ignores these answers")
        await until(times(1, 1), "both send the end")
        shown = 'quantdrift_slice_verdict{version="1",slice="scanner=faint"}'
        assert [row["value"][1] for row in await asyncio.to_thread(_query, prometheus, shown)] == ["3"]
        (end,) = [one for one in receiver.of("resolved") if "alert" in one["commonLabels"]]
        (alert,) = end["alerts"]
        assert alert["annotations"]["ended"] == "reported"
        assert alert["annotations"]["summary"] == (
            "digits 1, scanner=faint: Mitigated, as reported by ada: the caller ignores these answers."
        )
        await said(Say.REOPEN, "rolled back")
        await until(times(2, 1), "both page again")


def _healthy_again(n: int) -> list[Any]:
    """Return batches in which no slice is worse than it was accepted, after those with the drift."""
    later = int(timedelta(minutes=20).total_seconds()) * SECOND_US
    return [
        msgspec.structs.replace(
            rows,
            stored_us=rows.stored_us + later,
            comparisons=tuple(
                msgspec.structs.replace(row, captured_us=row.captured_us + later) for row in rows.comparisons
            ),
        )
        for rows in batches(n, seed=5, faint_flips=0.001)
        if rows.comparisons
    ]


@needs_programs
async def test_all_traffic_that_fires_as_its_slice_ends_updates_the_page_of_the_slice(
    tmp_path: Path, receiver: _Receiver
) -> None:
    """Both are one group, with one key: a pager updates its incident, and nobody is woken twice."""
    port = free_port()

    def send(name: str, *, ends: bool = False) -> bool:
        now = datetime.now(UTC)
        alert = {
            "labels": {
                "alertname": "QuantdriftSliceFiring",
                "model": "digits",
                "version": "1",
                "slice": name,
                "severity": "page",
            },
            "annotations": {"summary": f"digits 1: {name}"},
            "startsAt": (now - timedelta(minutes=1)).isoformat(),
            "endsAt": (now if ends else now + timedelta(minutes=5)).isoformat(),
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/api/v2/alerts",
            json.dumps([alert]).encode(),
            {"content-type": "application/json"},
        )
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except OSError:  # it does not listen yet
            return False
        return True

    async def sent() -> bool:
        return await asyncio.to_thread(send, "scanner=faint")

    def states() -> dict[str, str]:
        last = receiver.notifications[-1]["alerts"] if receiver.notifications else []
        return {alert["labels"]["slice"]: alert["status"] for alert in last}

    async def paged() -> bool:
        return states() == {"scanner=faint": "firing"}

    async def moved() -> bool:
        return states() in (
            {"scanner=faint": "resolved", "all": "firing"},
            {"all": "firing"},
        )

    async with _program(
        "prometheus-alertmanager",
        f"--config.file={_alertmanager_config(tmp_path, receiver)}",
        f"--storage.path={tmp_path / 'alertmanager'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ):
        await until(sent, "Alertmanager listens")
        await until(paged, "the slice is paged")
        await asyncio.to_thread(send, "all")
        await asyncio.to_thread(send, "scanner=faint", ends=True)
        await until(moved, "the page names all traffic")
    assert len({one["groupKey"] for one in receiver.notifications}) == 1
    assert not receiver.of("resolved")


@needs_programs
@pytest.mark.parametrize("name", ["QuantdriftSliceFiring", "QuantdriftSliceWarning"])
async def test_the_silence_of_a_runbook_is_of_one_slice_of_one_model(name: str, tmp_path: Path) -> None:
    """As typed, against a real Alertmanager: the other slices and models go on to notify."""
    port = free_port()
    page = (DEPLOY.parent / f"docs/runbooks/{name}.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^amtool silence add .+$", page, flags=re.MULTILINE)
    command = command.replace("http://localhost:9093", f"http://127.0.0.1:{port}")
    config = tmp_path / "alertmanager.yml"
    config.write_text("route: {receiver: nobody}\nreceivers: [{name: nobody}]\n")
    now = datetime.now(UTC)
    alerts = [
        {
            "labels": {"alertname": name, "model": model, "version": "1", "slice": slice_},
            "startsAt": (now - timedelta(minutes=1)).isoformat(),
            "endsAt": (now + timedelta(minutes=5)).isoformat(),
        }
        for model in ("digits", "letters")
        for slice_ in ("scanner=archive", "scanner=office")
    ]
    url = f"http://127.0.0.1:{port}/api/v2/alerts"

    def post() -> bool:
        request = urllib.request.Request(
            url, json.dumps(alerts).encode(), {"content-type": "application/json"}
        )
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except OSError:  # it does not listen yet
            return False
        return True

    def silenced() -> set[tuple[str, str]]:
        with urllib.request.urlopen(url, timeout=5) as answer:
            listed = json.load(answer)
        return {
            (alert["labels"]["model"], alert["labels"]["slice"])
            for alert in listed
            if alert["status"]["silencedBy"]
        }

    async def sent() -> bool:
        return await asyncio.to_thread(post)

    async def is_silent() -> bool:
        return bool(await asyncio.to_thread(silenced))

    async with _program(
        "prometheus-alertmanager",
        f"--config.file={config}",
        f"--storage.path={tmp_path / 'alertmanager'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ):
        await until(sent, "Alertmanager listens")
        done = await asyncio.create_subprocess_shell(command, env={**os.environ, "HOME": str(tmp_path)})
        assert await done.wait() == 0
        await until(is_silent, "the silence is in effect")
        assert await asyncio.to_thread(silenced) == {("digits", "scanner=archive")}


@needs_programs
def test_a_page_reads_well_as_text(tmp_path: Path) -> None:
    """The title is one line; the text names what happens, since when, where to look and what to do.

    An alert without an absolute link to the live page has no line for it, and an alert that says since when says it once.
    """
    data = {
        "status": "firing",
        "commonLabels": {"severity": "page"},
        "alerts": [
            {
                "status": "firing",
                "annotations": {
                    "summary": "digits 1: answers in scanner=faint are outside their budget",
                    "description": "It is not chance.",
                    "page": "https://live/slice",
                    "runbook_url": "https://docs/runbook",
                },
                "startsAt": "2026-03-01T12:00:00Z",
            },
            {
                "status": "firing",
                "annotations": {
                    "summary": "digits 2: answers in all are outside their budget",
                    "description": "Confidence: almost certain, this is not chance.\nSince: not known.",
                    "page": "/alert/12",
                    "runbook_url": "https://docs/runbook",
                },
                "startsAt": "2026-03-01T12:10:00Z",
            },
            {
                "status": "resolved",
                "annotations": {"summary": "digits 1: answers in all are outside their budget"},
                "startsAt": "2026-03-01T11:00:00Z",
                "endsAt": "2026-03-01T12:30:00Z",
            },
        ],
    }
    path = tmp_path / "data.json"
    path.write_text(json.dumps(data))
    text = '{{ template "quantdrift.title" . }}\n{{ template "quantdrift.text" . }}'
    amtool = shutil.which("amtool")
    assert amtool is not None
    done = subprocess.run(
        [
            amtool,
            "template",
            "render",
            f"--template.glob={DEPLOY / 'alertmanager/quantdrift.tmpl'}",
            f"--template.text={text}",
            f"--template.data={path}",
        ],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert [line for line in done.stdout.splitlines() if line] == [
        "[page] digits 1: answers in scanner=faint are outside their budget (and 1 more)",
        "digits 1: answers in scanner=faint are outside their budget",
        "It is not chance.",
        "Since: 2026-03-01 12:00 UTC",
        "Look: https://live/slice",
        "Do: https://docs/runbook",
        "digits 2: answers in all are outside their budget",
        "Confidence: almost certain, this is not chance.",
        "Since: not known.",
        "Do: https://docs/runbook",
        "Resolved at 2026-03-01 12:30 UTC: digits 1: answers in all are outside their budget",
    ]


@needs_programs
def test_alertmanager_takes_the_configuration_and_each_alert_has_a_receiver(tmp_path: Path) -> None:
    """`amtool` reads route, receivers and templates, and a page goes to who is on call."""
    config = str(DEPLOY / "alertmanager/alertmanager.yml")
    amtool = shutil.which("amtool")
    assert amtool is not None

    def run(*arguments: str) -> str:
        return subprocess.run(
            [amtool, *arguments],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "HOME": str(tmp_path)},
        ).stdout

    assert "SUCCESS" in run("check-config", config)
    rules = yaml.safe_load((DEPLOY / "prometheus/rules.yaml").read_text(encoding="utf-8"))
    known = {
        rule["alert"]: rule["labels"]["severity"] for group in rules["groups"] for rule in group["rules"]
    }
    for severity in ("page", "ticket"):
        assert (
            run("config", "routes", "test", f"--config.file={config}", f"severity={severity}").strip()
            == severity
        )
    inhibitions = yaml.safe_load(Path(config).read_text(encoding="utf-8"))["inhibit_rules"]
    for rule in inhibitions:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            for name in matcher.split('"')[1].split("|"):
                assert name in known
