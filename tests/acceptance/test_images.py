"""The images, built by their own build files, run the demo: the sidecar, the shadow and the monitor, each from its root.

They take minutes, root, a package index, buildah and mmdebstrap: `make test-release` runs this.
"""

import asyncio
import logging
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import asyncpg
import pytest

from deploy.images.build import ROOT, build
from quantdrift.demo.model import CANDIDATE, NAME
from quantdrift.demo.scans import Scans
from quantdrift.demo.services import VERSION, Ports, child
from quantdrift.demo.traffic import DemoTraffic
from tests.support.image_root import can_mount, environment, running

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.timeout(1800),
    pytest.mark.release,
]

_LOG = logging.getLogger(__name__)
ROLES = ("sidecar", "shadow", "monitor")
BASE = "localhost/quantdrift-test-base:1"
_PACKAGES = "python3,python3-pip,python3-venv,ca-certificates,libstdc++6,tzdata"
_READY_S = 120.0
N_COMPARED = 50
_FOLDED = "select count(*) from comparison join batch on batch.id = batch_id where fold_seq is not null"


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Return the mounted root of each role's image, built on Debian's own Python instead of the base in a registry."""
    if missing := [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]:
        pytest.skip(f"needs {' and '.join(missing)}")
    if not can_mount():
        pytest.skip("needs root on Linux")
    place = tmp_path_factory.mktemp("containers")
    storage = place / "storage.conf"
    storage.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{place}/root"\nrunroot = "{place}/run"\n',
        encoding="utf-8",
    )
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(storage))
        stack.callback(subprocess.run, ["buildah", "rm", "--all"], check=False, stdout=subprocess.DEVNULL)
        base = place / "base.tar"
        command = [
            "mmdebstrap",
            "--quiet",
            "--variant=essential",
            f"--include={_PACKAGES}",
            "bookworm",
            str(base),
        ]
        subprocess.run(command, check=True)
        container = _buildah("from", "scratch")
        _buildah("add", "--quiet", container, str(base), "/")
        _buildah("commit", "--quiet", container, BASE)
        found = {}
        for role in ROLES:
            image = build(role, "buildah", BASE, place / "out", _builder_options())
            found[role] = Path(_buildah("mount", _buildah("from", image)))
            assert (place / "out" / f"quantdrift-{role}.sbom.cdx.json").exists()
            assert (place / "out" / f"quantdrift-{role}.provenance.json").exists()
            files = sum(1 for path in found[role].rglob("*") if path.is_file() and not path.is_symlink())
            size = subprocess.run(
                ["du", "-sm", found[role]], check=True, capture_output=True, text=True
            ).stdout
            _LOG.info("%s: %s MB, %d files", image, size.split()[0], files)
        yield found


def _buildah(*arguments: str) -> str:
    return subprocess.run(["buildah", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def _builder_options() -> list[str]:
    """Return what lets pip reach this machine's package index from a build, without a word of it in the image."""
    places = [Path("/etc/pip.conf"), Path("/etc/ssl/certs/ca-certificates.crt")]
    return [
        "--isolation=chroot",
        "--network=host",
        *(f"--volume={place}:{place}:ro" for place in places if place.exists()),
    ]


async def test_the_demos_roles_run_from_their_images(
    roots: dict[str, Path], models: Path, nats_url: str, postgres_dsn: str, tmp_path: Path
) -> None:
    """From read-only roots, without rights, traffic is relayed, replayed, compared and folded."""
    config = tmp_path / "config"
    config.mkdir()
    await asyncio.to_thread(tmp_path.chmod, 0o755)
    text = (ROOT / "quantdrift" / "demo" / "config.toml").read_text(encoding="utf-8")
    (config / "config.toml").write_text(text.replace('path = "models/', 'path = "/models/'), encoding="utf-8")
    published = tmp_path / "models"
    shutil.copytree(models, published)
    ports = Ports.free()
    server = [
        "quantdrift.demo.oip_server",
        *("--model", f"{NAME}={models / CANDIDATE}", "--version", VERSION),
        *("--listen", f"127.0.0.1:{ports.model}"),
    ]
    variables = {
        **ports.overrides(""),
        "QUANTDRIFT_DSN": postgres_dsn,
        "QUANTDRIFT__STREAM__URL": nats_url,
        "QUANTDRIFT__STREAM__NAME": "images",
    }
    admin = {"sidecar": ports.sidecar_admin, "shadow": ports.shadow_admin, "monitor": ports.monitor_admin}
    async with child("the inference server", server, tmp_path / "server.log") as served:
        await served.ready([ports.model], "/v2/health/ready")
        with ExitStack() as stack:
            began = time.monotonic()
            processes = {}
            for role in ROLES:
                log = stack.enter_context((tmp_path / f"{role}.log").open("w", encoding="utf-8"))
                processes[role] = stack.enter_context(
                    running(
                        roots[role],
                        ["/opt/quantdrift/bin/quantdrift", role, "--config", "/etc/quantdrift/config.toml"],
                        variables=environment(role) | variables,
                        config=config,
                        models=published,
                        output=log,
                    )
                )
            for role in ROLES:
                await _until_ready(admin[role], processes[role], tmp_path / f"{role}.log")
                _LOG.info("%s is ready after %.1f s", role, time.monotonic() - began)
            _, held_out = Scans.bundled()
            traffic = DemoTraffic(
                f"http://127.0.0.1:{ports.sidecar}", held_out, 1, rate_per_s=40, archive_share=0.2
            )
            sending = asyncio.create_task(traffic.run())
            connection = await asyncpg.connect(postgres_dsn)
            try:
                async with asyncio.timeout(_READY_S):
                    while await connection.fetchval(_FOLDED) < N_COMPARED:
                        assert not sending.done(), sending
                        await asyncio.sleep(0.1)
                assert "compiling" not in _tail(tmp_path / "monitor.log"), "the image has the compiled loops"
                _LOG.info("%d comparisons are folded after %.1f s", N_COMPARED, time.monotonic() - began)
                assert await connection.fetchval("select count(*) from quarantine") == 0
            except TimeoutError:
                pytest.fail("\n".join(_tail(tmp_path / f"{role}.log") for role in ROLES))
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                await connection.close()
    assert {role: process.returncode for role, process in processes.items()} == dict.fromkeys(ROLES, 0)


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8")[-3000:]


async def _until_ready(port: int, process: subprocess.Popen[str], log: Path) -> None:
    async with asyncio.timeout(_READY_S), aiohttp.ClientSession() as session:
        while True:
            assert process.poll() is None, _tail(log)
            try:
                async with session.get(f"http://127.0.0.1:{port}/readyz") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
