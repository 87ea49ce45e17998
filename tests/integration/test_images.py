"""The images: what their build files pin, and a sidecar that runs from what its lock installs."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import psutil
import pytest
import yaml
from packaging.requirements import Requirement

from deploy.images.build import CONTAINERFILE, FOLDER, IMAGES, ROOT, default_base, lock_command, provenance
from deploy.images.pin import main
from tests.support.image_root import (
    USER,
    can_mount,
    environment,
    installed_root,
    running,
    stages,
    work_directory,
)
from tests.support.sidecar.relay_process import free_port, running_backend, wait

pytestmark = pytest.mark.integration

_LOCKED = re.compile(r"^([a-z0-9][a-z0-9._-]*)==(\S+)", re.MULTILINE)


def locked(name: str) -> dict[str, str]:
    """Return the versions that a lock file names."""
    return dict(_LOCKED.findall((ROOT / FOLDER / f"{name}.txt").read_text(encoding="utf-8")))


def normal(name: str) -> str:
    """Return a package's name as lock files write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_containerfile_is_lint_free() -> None:
    """By hadolint, which follows Docker's own advice."""
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, ROOT / CONTAINERFILE], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_image_is_made_from_one_base_that_a_digest_names() -> None:
    """Whoever moves a tag, or answers in the place of a registry, cannot put another base under an image."""
    assert re.fullmatch(r"[\w.:/-]+@sha256:[0-9a-f]{64}", default_base())
    found = stages()
    for name, lines in found.items():
        for line in lines:
            if line.startswith("FROM "):
                assert line.split()[1] in {"${BASE}", "scratch", *found}, (name, line)
    for target in IMAGES:
        assert [line for line in found[target] if line.startswith("USER")] == ["USER 65532:65532"]
        assert work_directory(target) == "/"
        assert environment(target)["PYTHONSAFEPATH"] == "1"
        assert any(line.startswith("FROM scratch") for line in found[target]), (
            "a layer of the base would be in it"
        )


def test_the_context_holds_what_is_copied_and_nothing_else() -> None:
    """Each file that the Containerfile copies is there and sent to the builder."""
    sent = (ROOT / f"{CONTAINERFILE}.dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [name for line in stages()["build"] if line.startswith("COPY ") for name in line.split()[1:-1]]
    for name in copied:
        assert (ROOT / name).exists(), name
        assert any(f"!{part}" in sent for part in (name, str(Path(name).parent))), (
            f"{name} is not in the context"
        )
    linked = {path.name for path in (ROOT / "quantdrift").iterdir() if path.is_symlink()}
    assert {"quantdrift", *linked} <= set(copied)


@pytest.mark.parametrize("name", [*IMAGES, "build"])
def test_a_lock_names_each_package_by_version_and_hash(name: str) -> None:
    """It has no package without a hash, and names no index: where packages come from is the installer's configuration."""
    text = (ROOT / FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert "://" not in text
    assert "--index" not in text
    for entry in re.split(r"\n(?=[a-z0-9])", text):
        assert _LOCKED.match(entry), entry[:80]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry[:80]


@pytest.mark.parametrize("target", IMAGES)
def test_no_package_of_an_image_asks_for_the_source_of_what_uses_it(target: str) -> None:
    """Whatever is installed here and in the image says a licence, and none of the GPL's family."""
    installed = {normal(package.name): package.metadata for package in distributions()}
    here = {name: installed[name] for name in locked(target) if name in installed}
    assert len(here) > 0.6 * len(locked(target))
    for name, metadata in here.items():
        fields = ("License-Expression", "License", "License-File", "Classifier")
        licences = [text[:200] for field in fields for text in metadata.get_all(field) or ()]
        assert licences, name
        assert not any(re.search("GPL|General Public", text) for text in licences), name


@pytest.mark.parametrize("target", IMAGES)
def test_a_lock_has_what_pyproject_asks_for_in_the_versions_that_were_tested(target: str) -> None:
    """A dependency that is added to pyproject.toml, or raised in constraints.txt, needs `make locks`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = locked(target)
    wanted = [Requirement(line) for line in project["dependencies"]]
    extras = list(IMAGES[target].extras)
    while extras:
        for line in project["optional-dependencies"][extras.pop()]:
            requirement = Requirement(line)
            if requirement.name == "quantdrift":
                extras += sorted(requirement.extras)
            else:
                wanted.append(requirement)
    for requirement in wanted:
        if requirement.marker is None or requirement.marker.evaluate({"sys_platform": "linux"}):
            assert requirement.specifier.contains(versions[normal(requirement.name)], prereleases=True), (
                requirement
            )
    tested = (
        line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    for package, _, version in tested:
        assert versions.get(normal(package), version) == version, package


def test_the_sidecars_lock_has_nothing_of_the_other_roles() -> None:
    """It runs in the pod of the model: no runtime, no database driver, no installer."""
    assert not {"torch", "onnxruntime", "scipy", "sqlalchemy", "asyncpg", "grpcio", "numba"} & set(
        locked("sidecar")
    )
    assert not {"torch", "onnxruntime", "onnxruntime-gpu"} & set(locked("monitor"))
    for target in IMAGES:
        assert not {"pip", "uv", "wheel", "pytest"} & set(locked(target))


def test_a_lock_is_written_for_the_extras_of_its_image() -> None:
    """The command names the constraints, and no index."""
    command = lock_command("monitor", "uv")
    extras = ("monitor", "report", "web", "ext-proc")
    assert command[-8:] == [word for extra in extras for word in ("--extra", extra)]
    assert "--generate-hashes" in command
    assert "--no-emit-index-url" in command


def test_the_digests_of_pushed_images_get_into_every_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As kustomize builds them, and into the values of the chart; again with newer ones; one that is missing or none changes nothing."""
    manifests, folder = tmp_path / "kubernetes", tmp_path / "images"
    shutil.copytree(ROOT / "deploy" / "kubernetes", manifests)
    folder.mkdir()
    before = {path: path.read_bytes() for path in manifests.rglob("*.yaml")}

    def pin(**letters: str) -> None:
        for name, letter in letters.items():
            (folder / f"quantdrift-{name}.digest").write_text(f"sha256:{letter * 64}\n", encoding="utf-8")
        main(["registry.example.com/ml", "--digests", str(folder), "--manifests", str(manifests)])

    for letters in ({}, {"sidecar": "a", "shadow": "b"}, {"monitor": "no digest"}):
        with pytest.raises(SystemExit):
            pin(**letters)
        assert {path: path.read_bytes() for path in manifests.rglob("*.yaml")} == before
    pin(sidecar="a", shadow="b", monitor="c")
    pin(monitor="d")
    values = yaml.safe_load(capsys.readouterr().out.rpartition("images:")[2])
    assert values["digests"] == {
        "sidecar": f"sha256:{'a' * 64}",
        "shadow": f"sha256:{'b' * 64}",
        "monitor": f"sha256:{'d' * 64}",
    }
    for variant in ("central", "relay", "migrate", "envoy"):
        kustomization = yaml.safe_load(
            (manifests / variant / "kustomization.yaml").read_text(encoding="utf-8")
        )
        assert {entry["digest"][7] for entry in kustomization["images"]} <= set("abd")
    kubectl = shutil.which("kubectl")
    if kubectl is not None:
        command = [kubectl, "kustomize", str(manifests / "central")]
        built = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        named = set(re.findall(r"image: (\S+)", built))
        assert named == {
            f"registry.example.com/ml/quantdrift-{name}@sha256:{letter * 64}"
            for name, letter in (("shadow", "b"), ("monitor", "d"))
        }


def test_provenance_says_what_an_image_was_made_from() -> None:
    """The digests of the base, of the lock and of the build files; and that nobody signed it."""
    statement = provenance(
        "quantdrift-shadow-cuda:1", f"sha256:{'a' * 64}", default_base(), "podman", ("1", "2")
    )
    assert statement["subject"] == [{"name": "quantdrift-shadow-cuda:1", "digest": {"sha256": "a" * 64}}]
    definition = statement["predicate"]["buildDefinition"]
    assert definition["externalParameters"]["target"] == "shadow-cuda"
    materials = {one["uri"]: one["digest"] for one in definition["resolvedDependencies"]}
    assert "deploy/images/shadow-cuda.txt" in materials
    assert materials["oci:python:3.11-slim-bookworm"] == {"sha256": default_base().partition("@sha256:")[2]}
    assert statement["predicate"]["runDetails"]["builder"] == {"id": "local:unsigned"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """Return the root of the sidecar's image, with this machine's Python as the base."""
    if not can_mount():
        pytest.skip("needs root on Linux, for a mount namespace with a read-only root")
    if importlib.util.find_spec("cyclonedx_py") is None:
        pytest.skip("needs cyclonedx-bom: `make setup` installs it")
    place = tmp_path_factory.mktemp("image")
    place.chmod(0o755)
    try:
        installed_root(place, "sidecar", wheel.parent)
    except subprocess.CalledProcessError as error:
        pytest.skip(
            f"the packages of the lock cannot be installed here: is a package index reached? ({error})"
        )
    return place


@pytest.fixture
def backend_port() -> Iterator[int]:
    """Return the port of an inference server."""
    with running_backend() as backend:
        yield backend.server_address[1]


PYTHON = "/opt/quantdrift/bin/python"
PLANTED = ("quantdrift", "uvloop", "msgspec", "aiohttp")


@pytest.mark.release
def test_the_sidecars_image_serves_from_a_read_only_root(
    root: Path, backend_port: int, tmp_path: Path
) -> None:
    """Every process of it has no rights, the relay passes requests on, and nothing of the root is written."""
    config, temporary = tmp_path / "config", tmp_path / "tmp"
    config.mkdir()
    temporary.mkdir()
    temporary.chmod(0o1777)
    (config / "config.toml").write_text("")
    for name in PLANTED:
        (temporary / f"{name}.py").write_text(f"open('/tmp/{name}.imported', 'w').close()\n")
    listen, admin = free_port(), free_port()
    settings = {
        "SIDECAR__LISTEN": f"127.0.0.1:{listen}",
        "SIDECAR__BACKEND": f"127.0.0.1:{backend_port}",
        "SIDECAR__ADMIN": f"127.0.0.1:{admin}",
        "STREAM__URL": f"nats://127.0.0.1:{free_port()}",
    }
    variables = environment("sidecar") | {f"QUANTDRIFT__{name}": value for name, value in settings.items()}
    command = [PYTHON, "-m", "quantdrift", "sidecar", "--config", "/etc/quantdrift/config.toml"]
    with running(
        root, command, variables=variables, directory="/tmp", config=config, temporary=temporary, on_host=True
    ) as process:
        wait(lambda: process.poll() is not None or _ready(admin), "the sidecar is ready")
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        request = urllib.request.Request(f"http://127.0.0.1:{listen}/v2/models/digits/infer", b"scan")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.read() == b"to scan"
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert len(family) > 2
        for one in family:
            assert set(one.uids()) | set(one.gids()) == {USER}
            status = Path(f"/proc/{one.pid}/status").read_text()
            assert re.search(r"^CapEff:\s0+$", status, re.MULTILINE)
            assert one.environ()["PYTHONSAFEPATH"] == "1"
    assert process.returncode == 0
    assert sorted(temporary.glob("*.imported")) == []


def _ready(admin: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{admin}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.release
def test_nothing_of_the_working_directory_is_imported_in_an_image(root: Path, tmp_path: Path) -> None:
    """Whoever can write to /tmp gets no code run by a Python that starts there, nor by a child of one with `-m`."""
    tmp_path.chmod(0o1777)
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"open('/tmp/{name}.imported', 'w').close()\n")
    program = f"import uvloop, subprocess; subprocess.run([{PYTHON!r}, '-m', 'quantdrift', '--version'])"
    for directory in (work_directory("sidecar"), "/tmp"):
        with running(
            root,
            [PYTHON, "-c", program],
            variables=environment("sidecar"),
            directory=directory,
            temporary=tmp_path,
            on_host=True,
        ) as process:
            output, _ = process.communicate(timeout=60)
            assert [path.stem for path in tmp_path.glob("*.imported")] == [], directory
            assert "quantdrift, version" in output, output


@pytest.mark.release
def test_an_image_has_no_installer_and_cannot_be_written(root: Path) -> None:
    """One command besides Python's, no pip, and a root that refuses a file."""
    assert sorted(
        path.name for path in (root / "opt/quantdrift/bin").iterdir() if "python" not in path.name
    ) == ["quantdrift"]
    program = (
        "import importlib.util, os\n"
        "print(importlib.util.find_spec('pip'), importlib.util.find_spec('setuptools'), os.getcwd(), os.getuid())\n"
        "for place in ('/opt/quantdrift/x', '/etc/quantdrift/x', '/x'):\n"
        "    try: open(place, 'w')\n"
        "    except OSError as error: print(error.strerror)\n"
    )
    with running(root, [PYTHON, "-c", program], variables=environment("sidecar"), on_host=True) as process:
        output, _ = process.communicate(timeout=60)
    assert output.splitlines() == [f"None None / {USER}", *["Read-only file system"] * 3]


@pytest.mark.release
def test_the_sbom_names_every_package_of_the_lock(root: Path) -> None:
    """With its version; and the interpreter."""
    document = json.loads((root / "usr-share-quantdrift" / "sbom.cdx.json").read_text())
    assert document["bomFormat"] == "CycloneDX"
    found = {
        normal(one["name"]): one["version"]
        for one in document["components"]
        if "pkg:pypi" in one.get("purl", "")
    }
    assert locked("sidecar").items() <= found.items()
    assert {"python", "quantdrift"} <= {one["name"] for one in document["components"]}
