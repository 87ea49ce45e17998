"""Forged exchanges by every way in, through sidecars, a shadow worker and a monitor: who may not report cannot page.

The control is a caller who may report on its model: as many exchanges of the same content do page there.
"""

import asyncio
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import grpc
import pytest

from quantdrift.core.config.schema import Config, Model, Reference
from tests.support.monitor.monitor_processes import CONFIG, until
from tests.support.shadow.onnx_models import linear_model, saved
from tests.support.shadow.shadow_workers import serving, worker_config
from tests.support.sidecar.envoy_messages import METHOD, exchange
from tests.support.sidecar.relay_process import SidecarProcess, free_port, sidecar

pytestmark = pytest.mark.integration

N_FORGED = 60
NOBODY = 65534
BY_OWNER, BY_PROC, BY_TAP, BY_KSERVE, BY_BATCH = "by-owner", "by-proc", "by-tap", "by-kserve", "by-batch"
BY_USER = "by-user"
MODELS = (BY_OWNER, BY_PROC, BY_TAP, BY_KSERVE, BY_BATCH, BY_USER)
OWNER, STRANGER, EXPIRED = "owners-t0ken", "strangers-t0ken", "expired-t0ken"
FORGED = {
    "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1.0, 2.0, 3.0, 4.0]}],
    "outputs": [{"name": "logits", "shape": [1, 3], "datatype": "FP32", "data": [90.0, -90.0, -90.0]}],
}
REQUEST, RESPONSE = {"inputs": FORGED["inputs"]}, {"outputs": FORGED["outputs"]}
TAP = """
import os, sys, time
import numpy as np
from quantdrift import Tap
os.setgroups([])
os.setgid(int(sys.argv[4]))
os.setuid(int(sys.argv[4]))  # here: the interpreter may be in a directory that this user may not read
tap = Tap(sys.argv[1], model=sys.argv[2])
until = time.monotonic() + 30
while not tap.is_ready and time.monotonic() < until:
    time.sleep(0.01)
for _ in range(int(sys.argv[3])):
    tap.record(
        {"x": np.array([[1, 2, 3, 4]], dtype=np.float32)}, {"logits": np.array([[90, -90, -90]], dtype=np.float32)}
    )
tap.close(10.0)
"""


def line(name: str, token: str, *rest: str) -> str:
    """Return a line of the file of callers."""
    return " ".join([name, "sha256:" + hashlib.sha256(token.encode()).hexdigest(), *rest])


def callers() -> str:
    """Return the file of callers."""
    return "\n".join(
        [
            "# who may report on which model",
            line("owner", OWNER, BY_OWNER),
            line("stranger", STRANGER, "another-*"),
            f"server uid:{NOBODY} {BY_USER}",
            line("former", EXPIRED, "until=2020-01-01T00:00Z", BY_BATCH, BY_KSERVE),
        ]
    )


class Installation:
    """Two sidecars, one whose ways in have no token and one whose ways have, and what the database says in the end."""

    def __init__(
        self, open_: SidecarProcess, closed: SidecarProcess, ports: dict[str, int], taps: Path
    ) -> None:
        self.open, self.closed, self.ports, self.taps = open_, closed, ports, taps

    async def post(self, path: str, body: Any, *, to: str = "intake", **headers: str) -> tuple[int, Any]:
        """Send JSON to a port of the intake; return status and answer."""
        url = f"http://127.0.0.1:{self.ports[to]}{path}"
        sent = {"Content-Type": "application/json", **headers}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=io.BytesIO(json.dumps(body).encode()), headers=sent) as response,
        ):
            text = await response.text()
            return response.status, json.loads(text) if text else None

    async def batch(self, model: str, token: str, n: int = N_FORGED) -> tuple[int, Any]:
        """Send a batch of forged exchanges."""
        forged = {"target": f"/v2/models/{model}/infer", "request": REQUEST, "response": RESPONSE}
        return await self.post("/v1/exchanges", {"exchanges": [forged] * n}, Authorization=f"Bearer {token}")

    async def log(self, model: str, token: str, n: int = N_FORGED) -> set[int]:
        """Send forged events as KServe's logger does; return the statuses."""
        found = set()
        for number in range(n):
            for half, body in (("request", REQUEST), ("response", RESPONSE)):
                headers = {
                    "Ce-Specversion": "1.0",
                    "Ce-Source": "http://localhost:9081/",
                    "Ce-Id": f"{model}-{number}",
                    "Ce-Type": f"org.kubeflow.serving.inference.{half}",
                    "Ce-Inferenceservicename": model,
                }
                status, _ = await self.post(f"/kserve/{token}", body, to="kserve", **headers)
                found.add(status)
        return found

    async def envoy(self, model: str, n: int = N_FORGED) -> None:
        """Send forged exchanges as Envoy does, without a token."""
        messages = exchange(
            [json.dumps(REQUEST).encode()],
            [json.dumps(RESPONSE).encode()],
            {},
            path=f"/v2/models/{model}/infer",
        )
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.ports['ext_proc']}") as channel:
            for _ in range(n):
                call = channel.stream_stream(METHOD)()
                for message in messages:
                    await call.write(message)
                await call.code()

    def record(self, model: str, user: int, socket: str = "tap", n: int = N_FORGED) -> None:
        """Record forged calls by a tap in a process of a user."""
        command = [sys.executable, "-c", TAP, str(self.taps / socket), model, str(n), str(user)]
        subprocess.run(command, check=True, timeout=60)


@asynccontextmanager
async def installed(config: Config, dsn: str, directory: Path) -> AsyncIterator[Installation]:
    """Run two sidecars, a shadow worker and a monitor."""
    ports = {way: free_port() for way in ("intake", "kserve", "ext_proc")}
    tokens = directory / "callers"
    tokens.write_text(callers())
    common = {
        "SIDECAR__LISTEN": "",
        "STREAM__URL": config.stream.url,
        "STREAM__NAME": config.stream.name,
        "SAMPLING__RATE": 1,
        "MODELS": json.dumps([{"name": name} for name in MODELS]),
    }
    for name in ("open", "closed", "monitor"):
        (directory / name).mkdir()
    models = "".join(f'[[models]]\nname = "{name}"\n' for name in MODELS)
    path = directory / "monitor" / "config.toml"
    path.write_text(CONFIG.format(endpoint="").partition("[[models]]")[0] + models)
    with ExitStack() as stack:
        socket = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qd-"))) / "tap"
        socket.parent.chmod(0o755)
        open_ = stack.enter_context(
            sidecar(
                directory / "open",
                0,
                INTAKE__EXT_PROC=f"127.0.0.1:{ports['ext_proc']}",
                INTAKE__TAP=str(socket),
                **common,
            )
        )
        os.chown(socket, -1, NOBODY)
        bound = socket.with_name("bound")
        closed = stack.enter_context(
            sidecar(
                directory / "closed",
                0,
                INTAKE__LISTEN=f"127.0.0.1:{ports['intake']}",
                INTAKE__TOKEN_FILE=str(tokens),
                INTAKE__TAP=str(bound),
                INTAKE__TAP_UIDS=json.dumps([NOBODY]),
                INTAKE__KSERVE_LOGGER=f"127.0.0.1:{ports['kserve']}",
                **common,
            )
        )
        os.chown(bound, -1, NOBODY)
        monitor = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "quantdrift", "monitor", "-c", str(path)),
            env={**os.environ, "QUANTDRIFT_DSN": dsn},
        )
        try:
            async with serving(config, dsn):
                yield Installation(open_, closed, ports, socket.parent)
        finally:
            monitor.kill()
            await monitor.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="a tap of another user needs the right to become one")
async def test_forged_exchanges_page_by_no_way_without_an_identity(
    nats_url: str, postgres_dsn: str, tmp_path: Path, record: asyncpg.Connection
) -> None:
    """By Envoy's port without a token and by a tap of another user they open a ticket; the page is the owner's alone.

    With the token of another model, or an expired one, nothing is stored at all; nor from a tap whose user is bound to another
    model.
    """
    reference = saved(linear_model(), tmp_path / "reference.onnx")
    config = worker_config(
        nats_url,
        [Model(name=name, references=(Reference(path=str(reference), versions=("*",)),)) for name in MODELS],
    )
    async with installed(config, postgres_dsn, tmp_path) as installation:

        async def folded(model: str) -> None:
            """Wait until a model has detectors: exchanges that are folded as they are created are no evidence."""

            async def has_detectors() -> bool:
                n = "select count(*) from detector join model_version v on v.id = model_version_id where v.model = $1"
                return bool(await record.fetchval(n, model))

            await until(has_detectors, f"the first exchange of {model} is folded")

        await installation.envoy(BY_PROC, 1)
        await folded(BY_PROC)
        await asyncio.to_thread(installation.record, BY_TAP, NOBODY, n=1)
        await folded(BY_TAP)
        assert await installation.batch(BY_OWNER, OWNER, 1) == (200, {"accepted": 1, "rejected": []})
        await folded(BY_OWNER)

        await installation.envoy(BY_PROC, N_FORGED - 1)
        await asyncio.to_thread(installation.record, BY_TAP, NOBODY, n=N_FORGED - 1)
        assert await installation.log(BY_KSERVE, STRANGER) == {200}
        assert await installation.log(BY_KSERVE, EXPIRED, 1) == {404}
        status, answer = await installation.batch(BY_BATCH, STRANGER)
        assert (status, answer["accepted"], len(answer["rejected"])) == (200, 0, N_FORGED)
        assert answer["rejected"][0] == {
            "index": 0,
            "error": f"this caller may not report on model {BY_BATCH}",
        }
        assert (await installation.batch(BY_BATCH, EXPIRED))[0] == 401
        for _ in range(N_FORGED - 1):  # one by one: what has the same time is no evidence
            status, answer = await installation.batch(BY_OWNER, OWNER, 1)
            assert (status, answer) == (200, {"accepted": 1, "rejected": []})

        refused = "quantdrift_sidecar_intake_refused_total"
        # Of the logger's, the requests alone name a model and are counted.
        assert await asyncio.to_thread(installation.closed.count, refused, reason="model") == 2 * N_FORGED

        await asyncio.to_thread(installation.record, BY_USER, NOBODY, "bound")
        await asyncio.to_thread(installation.record, BY_KSERVE, NOBODY, "bound")

        async def refused_by_user() -> bool:
            return await asyncio.to_thread(installation.closed.count, refused, reason="model") == 3 * N_FORGED

        await until(refused_by_user, "what the tap reports on another model is refused")

        async def alerted() -> bool:
            rows = await record.fetch(
                "select distinct v.model, t.to_verdict from transition t join model_version v"
                " on v.id = t.model_version_id where t.to_verdict in ('warning', 'firing')"
            )
            found.clear()
            found.update((row["model"], row["to_verdict"]) for row in rows)
            return {model for model, _ in found} >= {BY_PROC, BY_TAP} and (BY_OWNER, "firing") in found

        found: set[tuple[str, str]] = set()
        await until(alerted, "the exchanges of three models are judged")
        rows = await record.fetch(
            "select model, candidate_version, count(distinct exchange_id) as n, min(origin) as origin from comparison"
            " join model_version v on v.id = model_version_id group by 1, 2 order by 1"
        )
        stored = {(row["model"], row["candidate_version"], row["n"], row["origin"]) for row in rows}
        reasons = await record.fetch(
            "select details ->> 'reason' as reason from transition where to_verdict = 'warning'"
        )
    assert {model for model, verdict in found if verdict == "firing"} - {BY_USER} == {BY_OWNER}
    assert stored == {
        (BY_OWNER, "unversioned", N_FORGED, "intake owner"),
        (BY_PROC, "unversioned (unverified)", N_FORGED, "ext_proc"),
        (BY_TAP, "unversioned (unverified)", N_FORGED, "tap"),
        (BY_USER, "unversioned", N_FORGED, "tap server"),
    }
    assert sum("nobody checked who sent these exchanges" in row["reason"] for row in reasons) == 2
