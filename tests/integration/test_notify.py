"""Alerts without Prometheus: through a real Alertmanager to a real receiver, and to a webhook that is away at first."""

import asyncio
import json
import re
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import asyncpg
import pytest

from quantdrift.core.keys import Key, KeyRing, write_keys
from tests.support.monitor.fold_stream import FAINT_ID, batches, store_batch, store_catalog
from tests.support.monitor.monitor_processes import running_monitor, stop_monitor, until
from tests.support.sidecar.relay_process import free_port

pytestmark = pytest.mark.integration

ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
ROOT = Path(__file__).resolve().parents[2]
ROUTES = """
global: {{resolve_timeout: 5s}}
route:
  receiver: ticket
  group_by: [alert]
  group_wait: 50ms
  group_interval: 100ms
  repeat_interval: 1h
  routes: [{{receiver: page, matchers: ['severity="page"']}}]
receivers: [{{name: ticket}}, {{name: page, webhook_configs: [{{url: "{url}", send_resolved: true}}]}}]
"""
NOTIFY = """
[notify]
alertmanager = ["http://127.0.0.1:{dead}", "http://127.0.0.1:{port}"]
webhook_url = "{url}/hook?a=b"
webhook_key_file = "{key}"
"""


class Inbox:
    """An HTTP receiver. It refuses the first `n_refused` posts to /hook."""

    def __init__(self, n_refused: int) -> None:
        self.posts: list[tuple[str, dict[str, str], bytes]] = []
        self.n_refused = n_refused
        inbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                refused = self.path.startswith("/hook") and inbox.n_refused > 0
                inbox.n_refused -= refused
                if not refused:
                    inbox.posts.append((self.path, dict(self.headers), body))
                self.send_response(503 if refused else 200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def documents(self, path: str) -> list[Any]:
        """Return the documents that came to a path."""
        return [json.loads(body) for where, _, body in list(self.posts) if where.startswith(path)]


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    """Return a receiver that answers."""
    made = Inbox(n_refused=1)
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


@asynccontextmanager
async def alertmanager(directory: Path, inbox: Inbox) -> AsyncIterator[int]:
    """Start Debian's Alertmanager; return its port."""
    assert ALERTMANAGER is not None
    port, config = free_port(), directory / "alertmanager.yml"
    config.write_text(ROUTES.format(url=f"{inbox.url}/page"))
    process = await asyncio.create_subprocess_exec(
        ALERTMANAGER,
        f"--config.file={config}",
        f"--storage.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
        stderr=asyncio.subprocess.DEVNULL,
    )

    async def is_up() -> bool:
        try:
            return await asyncio.to_thread(_asked, port) is not None
        except OSError:
            return False

    try:
        await until(is_up, "Alertmanager answers")
        yield port
    finally:
        process.kill()
        await process.wait()


def _asked(port: int) -> list[Any]:
    with urlopen(f"http://127.0.0.1:{port}/api/v2/alerts") as answer:
        found: list[Any] = json.load(answer)
    return found


def _verifier() -> Callable[[str, bytes, str], bool]:
    """Return the function that the documentation gives to receivers."""
    page = (ROOT / "docs/how-to/notify.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?is_genuine.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    found: Callable[[str, bytes, str], bool] = names["is_genuine"]
    return found


@pytest.mark.skipif(
    ALERTMANAGER is None, reason="no Alertmanager is installed (Debian: prometheus-alertmanager)"
)
@pytest.mark.release
async def test_one_drift_is_one_page_and_one_resolved_whatever_monitors_do(
    postgres_dsn: str, record: asyncpg.Connection, tmp_path: Path, inbox: Inbox
) -> None:
    """The leader is killed, another one takes over and is restarted: nothing is resolved, and nothing pages twice.

    One of two Alertmanagers is not there. The webhook is away at first: it gets each change all the same, signed.
    """
    await store_catalog(record)
    key_file = tmp_path / "webhook.key"
    write_keys(key_file, KeyRing(keys=(Key.create(datetime.now(UTC)),)), is_new=True)
    for rows in batches(200):
        await store_batch(record, rows)

    async def paged() -> bool:
        return bool(inbox.documents("/page"))

    async with alertmanager(tmp_path, inbox) as port:
        notify = NOTIFY.format(dead=free_port(), port=port, url=inbox.url, key=key_file)

        async def posted_again() -> None:
            since = datetime.now(UTC)

            async def is_newer() -> bool:
                (alert,) = await asyncio.to_thread(_asked, port)
                return datetime.fromisoformat(alert["updatedAt"]) > since

            await until(is_newer, "the next leader posts the state")

        async with running_monitor(postgres_dsn, tmp_path, notify=notify) as first:
            await until(paged, "the page arrives")
            async with running_monitor(postgres_dsn, tmp_path, notify=notify) as second:
                first.kill()
                await first.wait()
                await posted_again()
                assert await stop_monitor(second) == 0
        async with running_monitor(postgres_dsn, tmp_path, notify=notify):
            await posted_again()
            assert [document["status"] for document in inbox.documents("/page")] == ["firing"]
            # What the fold writes when the evidence of recovery suffices.
            await record.execute(
                "with a as (update alert set resolved_at = now() where slice_id = $1 returning id),"
                " t as (insert into transition (model_version_id, slice_id, alert_id, from_verdict, to_verdict, at, fold_seq,"
                " details) select 1, $1, id, 'firing', 'ok', now(), 1, '{}' from a returning id)"
                " insert into outbox (transition_id, webhook_due_at) select id, now() from t",
                FAINT_ID,
            )

            async def all_out() -> bool:
                return len(inbox.documents("/page")) >= 2 and any(
                    document["change"] == "ended" for document in inbox.documents("/hook")
                )

            await until(all_out, "the end arrives")
    pages = inbox.documents("/page")
    assert [document["status"] for document in pages] == ["firing", "resolved"]
    labels = pages[0]["alerts"][0]["labels"]
    assert (labels["alertname"], labels["severity"]) == ("QuantdriftSliceFiring", "page")
    assert labels["slice"] == "scanner=faint"
    assert "Do now\n1. " in pages[0]["alerts"][0]["annotations"]["description"]
    events = [(headers, body) for path, headers, body in inbox.posts if path == "/hook?a=b"]
    verify = _verifier()
    for headers, body in events:
        assert verify(headers["Quantdrift-Signature"], body, str(key_file))
        assert not verify(headers["Quantdrift-Signature"], body + b" ", str(key_file))
    changes = {json.loads(body)["id"]: json.loads(body)["change"] for _, body in events}
    assert set(changes.values()) <= {"opened", "escalated", "ended"}
    assert {"ended"} < set(changes.values())


async def test_a_chat_gets_a_message_without_a_program_between(
    postgres_dsn: str, record: asyncpg.Connection, tmp_path: Path, inbox: Inbox
) -> None:
    """The first try is refused; the message comes all the same, with the headline of the alert, unsigned."""
    await store_catalog(record)
    for rows in batches(200):
        await store_batch(record, rows)
    notify = f'[notify]\nwebhook_url = "{inbox.url}/hook"\nwebhook_format = "slack"\n'

    async def said() -> bool:
        return bool(inbox.documents("/hook"))

    async with running_monitor(postgres_dsn, tmp_path, notify=notify):
        await until(said, "the message arrives")
    path, headers, body = inbox.posts[0]
    assert path == "/hook"
    assert "Quantdrift-Signature" not in headers
    header, *others = json.loads(body)["blocks"]
    assert header["type"] == "header"
    assert "scanner=faint" in header["text"]["text"]
    assert any(block["text"]["text"].startswith("Since: ") for block in others)
