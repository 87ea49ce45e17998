"""A release: what it is made of, and an installation from its wheel in an environment where no checkout is."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path

import msgspec
import pytest

from deploy.release import NAMESPACE, build_sdist, build_wheel, changes, sign, version, write_sbom
from tests.integration.conftest import EPOCH_S, copied_checkout
from tests.support.sidecar.relay_process import free_port, running_backend

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("sidecar", "shadow", "storage", "migrations")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `bin` of an environment with the wheel, and with what it needs from the environment of the tests."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-index", str(wheel)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A line of a .pth file adds a folder and not the .pth files in it: the checkout that is installed there stays out.
    needed = dict.fromkeys(
        [sysconfig.get_path("purelib"), *(path for path in sys.path if "site-packages" in path)]
    )
    (packages / "needed.pth").write_text("\n".join(needed) + "\n", encoding="utf-8")
    nats = shutil.which("nats-server", path=str(Path(sys.executable).parent))
    if (
        nats is not None
    ):  # a command of a package: it lies in the `bin` of the environment that has the package
        (python.parent / "nats-server").symlink_to(nats)
    return python.parent


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a working directory with modules of the user's own, each of which leaves a mark where it is imported."""
    for name in ("sidecar", "shadow", "storage", "hpack", "migrations/__init__"):
        module = tmp_path / f"{name}.py"
        module.parent.mkdir(exist_ok=True)
        mark = tmp_path / f"{name.partition('/')[0]}.imported"
        module.write_text(f"OWN = True\nopen({str(mark)!r}, 'w').close()\n", encoding="utf-8")
    return tmp_path


def imported(directory: Path) -> list[str]:
    """Return which of the user's modules have been imported."""
    return sorted(mark.stem for mark in directory.glob("*.imported"))


def test_a_wheel_has_one_name_at_its_top_level(wheel: Path) -> None:
    """A module `storage` or `migrations` of a server that has the tap is the server's own."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"quantdrift"}
    there = {
        path.relative_to(ROOT).as_posix()
        for linked in ("quantdrift", *LINKED)
        for path in (ROOT / linked).rglob("*.py")
        if not (linked == "quantdrift" and path.relative_to(ROOT / linked).parts[0] in LINKED)
    }
    assert {name for name in names if name.endswith(".py")} == {
        name if name.startswith("quantdrift/") else f"quantdrift/{name}" for name in there
    }
    for data in ("py.typed", "sidecar/intake/openapi.json", "migrations/script.py.mako", "demo/config.toml"):
        assert f"quantdrift/{data}" in names


@pytest.mark.release
def test_a_release_is_the_same_whoever_builds_it(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    """Another directory, other times of the files and other rights: source distribution and wheel are equal byte by byte."""
    source = copied_checkout(tmp_path / "elsewhere")
    for path in source.rglob("*"):
        if not path.is_symlink():
            os.utime(path, (1_000_000_000, 1_000_000_000))
            path.chmod(0o700)
    again = build_sdist(source, tmp_path, EPOCH_S)
    assert again.name == sdist.name
    assert again.read_bytes() == sdist.read_bytes()
    assert build_wheel(again, tmp_path, EPOCH_S).read_bytes() == wheel.read_bytes()


@pytest.mark.release
def test_the_sbom_of_a_release_names_it_and_the_versions_that_it_was_tested_with(tmp_path: Path) -> None:
    """Each package of constraints.txt, by its package URL; a second one is the same."""
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for path in paths:
        write_sbom(ROOT, path)
    document = msgspec.json.decode(paths[0].read_bytes())
    assert (document["bomFormat"], document["metadata"]["component"]["name"]) == ("CycloneDX", "quantdrift")
    assert document["metadata"]["component"]["version"] == version()
    pinned = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    named = {(part["name"].lower(), part["version"]) for part in document["components"]}
    assert {(name.lower(), pin) for name, pin in pinned} <= named
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_the_checksums_of_a_release_are_signed_by_a_key_and_by_no_other(tmp_path: Path) -> None:
    """As the release page says how to check: another file, another key, and a signature for something else are refused."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen: apt-get install openssh-client")
    sums = tmp_path / "SHA256SUMS"
    for name in ("release", "other"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(tmp_path / name)]
        subprocess.run(command, check=True)
    public = (tmp_path / "release.pub").read_text(encoding="utf-8")
    (tmp_path / "allowed").write_text(f"release {public}", encoding="utf-8")

    def is_valid(content: bytes, namespace: str = NAMESPACE) -> bool:
        command = ["ssh-keygen", "-Y", "verify", "-f", str(tmp_path / "allowed"), "-I", "release"]
        command += ["-n", namespace, "-s", f"{sums}.sig"]
        return subprocess.run(command, input=content, capture_output=True, check=False).returncode == 0

    sums.write_bytes(b"aa  quantdrift.whl\n")
    assert sign(sums, tmp_path / "other") == sign(sums, tmp_path / "release")
    assert is_valid(sums.read_bytes())
    assert not is_valid(b"bb  quantdrift.whl\n")
    assert not is_valid(sums.read_bytes(), "git")
    sign(sums, tmp_path / "other")
    assert not is_valid(sums.read_bytes())


def test_the_source_distribution_has_no_link_and_one_directory(sdist: Path) -> None:
    """The directories that `quantdrift/` links are copies in it: it can be unpacked wherever there are no links."""
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    assert {(member.uid, member.gid, member.mtime) for member in members} == {(0, 0, EPOCH_S)}
    assert {member.name.partition("/")[0] for member in members} == {sdist.name.removesuffix(".tar.gz")}
    names = {member.name.partition("/")[2] for member in members}
    assert {"quantdrift/py.typed", "quantdrift/migrations/versions/0001_initial.py", "LICENSE"} <= names


@pytest.mark.release
def test_pyproject_states_the_version_and_nothing_else_does(
    installed: Path, sdist: Path, wheel: Path
) -> None:
    """The command, the files' names and the changelog's form go by it."""
    command = [str(installed / "quantdrift"), "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == f"quantdrift, version {version()}\n"
    assert sdist.name == f"quantdrift-{version()}.tar.gz"
    assert wheel.name == f"quantdrift-{version()}-py3-none-any.whl"
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[(.+?)\](.*)$", text, re.MULTILINE)
    assert sections[0] == ("Unreleased", "")
    assert all(re.fullmatch(r" - \d{4}-\d\d-\d\d", date) for _, date in sections[1:])
    assert changes(f"## [Unreleased]\n\n## [{version()}] - 2026-01-01\n\n- One.\n", version()) == "- One."
    assert changes("## [Unreleased]\n\n- One.\n", version()) == ""


@pytest.mark.release
def test_a_type_checker_sees_the_types_of_an_installation(installed: Path, tmp_path: Path) -> None:
    """`py.typed` says that they may be used: what a consumer gets wrong is found, what is right is not."""
    consumer = tmp_path / "consumer.py"
    consumer.write_text(
        "from quantdrift import Tap\nreveal_type(Tap.close)\nTap(unknown=1)\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "mypy", "--python-executable", str(installed / "python")]
    done = subprocess.run(
        [*command, "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), str(consumer)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 'Revealed type is "def (self: quantdrift.sidecar.tap.tap.Tap' in done.stdout, done.stdout
    assert 'Unexpected keyword argument "unknown" for "Tap"' in done.stdout
    assert "import-untyped" not in done.stdout


@pytest.mark.release
def test_up_runs_from_an_installation(installed: Path, directory: Path, backend_port: int) -> None:
    """Every role and both servers, in a directory that has nothing but a configuration."""
    admin = {role: f"127.0.0.1:{free_port()}" for role in ("SIDECAR", "SHADOW", "MONITOR")}
    settings = {
        "SIDECAR__LISTEN": f"127.0.0.1:{free_port()}",
        "SIDECAR__BACKEND": f"127.0.0.1:{backend_port}",
        **{f"{role}__ADMIN": address for role, address in admin.items()},
        "WEB__LISTEN": "",
    }
    (directory / "config.toml").write_text('[[models]]\nname = "digits"\n', encoding="utf-8")
    with subprocess.Popen(
        [installed / "quantdrift", "up", "--config", "config.toml", "--data", str(directory / "data")],
        cwd=directory,
        env={**os.environ, **{f"QUANTDRIFT__{name}": value for name, value in settings.items()}},
    ) as process:
        try:
            until(lambda: all(is_ready(address) for address in admin.values()), process)
        finally:
            process.terminate()
    assert imported(directory) == []


@pytest.mark.release
@pytest.mark.timeout(500)
def test_the_demo_runs_from_an_installation(installed: Path, directory: Path) -> None:
    """It ends with 0: the slice that went bad has paged, and nothing of it was in a checkout."""
    done = subprocess.run(
        [installed / "quantdrift", "demo", "--fast"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=450,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "scanner=archive" in done.stdout
    assert (directory / "out" / "demo" / "report.html").exists()
    assert imported(directory) == []


def test_the_tap_works_next_to_modules_of_the_same_names(installed: Path, directory: Path) -> None:
    """What a server calls `sidecar`, `storage` or `migrations` stays what it was."""
    program = (
        "import sidecar, storage, migrations, sys; from quantdrift import Tap; "
        "assert sidecar.OWN and storage.OWN and migrations.OWN; "
        "assert Tap.__module__ == 'quantdrift.sidecar.tap.tap', Tap.__module__; print(sys.modules['quantdrift'].__file__)"
    )
    done = subprocess.run(
        [installed / "python", "-c", program], cwd=directory, capture_output=True, text=True, check=True
    )
    assert str(installed.parent) in done.stdout


def test_importing_quantdrift_loads_nothing_else(installed: Path, directory: Path) -> None:
    """A server that imports it for the tap does not pay for the rest."""
    program = "import quantdrift, sys; print(*sorted(name for name in sys.modules if name.startswith('quantdrift')))"
    done = subprocess.run(
        [installed / "python", "-c", program], cwd=directory, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["quantdrift"]


def test_commands_import_nothing_from_the_working_directory(
    installed: Path, directory: Path, postgres_dsn: str
) -> None:
    """They are run from wherever somebody stands."""
    version = subprocess.run(
        [installed / "quantdrift", "--version"], cwd=directory, capture_output=True, text=True, check=True
    )
    assert version.stdout.startswith("quantdrift, version ")
    (directory / "config.toml").write_text("", encoding="utf-8")
    subprocess.run(
        [installed / "quantdrift", "db", "upgrade"],
        cwd=directory,
        env={**os.environ, "QUANTDRIFT_DSN": postgres_dsn},
        check=True,
    )
    assert imported(directory) == []


@pytest.fixture
def backend_port() -> Iterator[int]:
    """Return the port of an inference server."""
    with running_backend() as backend:
        yield backend.server_address[1]


def test_child_processes_import_nothing_from_the_working_directory(
    installed: Path, directory: Path, backend_port: int
) -> None:
    """A file that somebody left there would be run beside the model that is served, with the sidecar's rights."""
    admin = f"127.0.0.1:{free_port()}"
    settings = {
        "SIDECAR__LISTEN": f"127.0.0.1:{free_port()}",
        "SIDECAR__BACKEND": f"127.0.0.1:{backend_port}",
        "SIDECAR__ADMIN": admin,
        "STREAM__URL": f"nats://127.0.0.1:{free_port()}",
    }
    (directory / "config.toml").write_text("", encoding="utf-8")
    with subprocess.Popen(
        [installed / "quantdrift", "sidecar", "-c", "config.toml"],
        cwd=directory,
        env={**os.environ, **{f"QUANTDRIFT__{name}": value for name, value in settings.items()}},
    ) as process:
        try:
            until(lambda: is_ready(admin), process)
        finally:
            process.terminate()
    assert process.returncode == 0
    assert imported(directory) == []


def is_ready(admin: str) -> bool:
    """Return whether every process of the sidecar has started."""
    try:
        with urllib.request.urlopen(f"http://{admin}/readyz", timeout=5) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except OSError:
        return False


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait for a condition, for as long as the process runs and at most 150 s."""
    deadline_s = time.monotonic() + 150
    while not condition():
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
