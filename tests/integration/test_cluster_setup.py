"""The walk-through of docs/how-to/kubernetes.md: its commands make what the manifests need, in the order that they need."""

import asyncio
import base64
import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import nkeys
import pytest
import yaml
from click.testing import CliRunner

from deploy.kustomize import render
from quantdrift.cli.main import main
from quantdrift.core.codec import encode
from quantdrift.core.config import load
from quantdrift.core.config.callers import find_caller, read_callers
from quantdrift.core.config.load import Role, load_secrets
from quantdrift.core.config.schema import Stream
from quantdrift.core.errors import QuarantineError, RetryError
from quantdrift.core.keys import read_keys
from quantdrift.core.sealing import seal, unseal
from quantdrift.core.stream.connection import Queue, durable_name
from quantdrift.core.stream.rights import NatsRole
from quantdrift.core.stream.subjects import subject_token
from quantdrift.show.report.page import DIRECTORY
from tests.integration.test_deploy import DEPLOY, PODS, ROOT, Pod, given_files, of_kind, pods
from tests.integration.test_nats_rights import server_with
from tests.support.commands import started
from tests.support.shadow.onnx_models import exchange_of, inputs_of

pytestmark = pytest.mark.integration

_PAGE: Final = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text(encoding="utf-8")
# What needs servers or a cluster: the commands for Postgres, with what they read and write, and kubectl, whose calls are
# written down.
_AROUND: Final = """
set -eu
quantdrift() {
    case "$1 $2" in
    "db upgrade") test -s "$QUANTDRIFT__STORAGE__DSN_FILE" ;;
    "setup postgres")
        for role in shadow monitor report operator reader; do
            test -s postgres/$role.dsn ||
                sed "s#//[^@]*@#//quantdrift_$role:password@#" "$QUANTDRIFT__STORAGE__DSN_FILE" > postgres/$role.dsn
        done ;;
    *) command quantdrift "$@" ;;
    esac
}
kubectl() { echo "$@" >> "$CALLS"; }
export -f quantdrift kubectl
"""


def _block(mark: str) -> str:
    """Return the commands of the block after a comment, as a script."""
    lines = _PAGE.partition(f"<!-- {mark} -->\n```console\n")[2].partition("```")[0].splitlines()
    return "\n".join(line[2:] for line in lines)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the manifests in which the commands for the secrets have run: they take seconds."""
    folder = tmp_path_factory.mktemp("first") / "run"
    copied = folder / "deploy" / "kubernetes"
    shutil.copytree(DEPLOY, copied)
    for name in ("nats", "postgres"):
        (folder / f"{name}-ca.pem").write_text(f"the authority of {name}\n")
    (folder / "owner.dsn").write_text("postgresql://OWNER:PASSWORD@postgres.postgres.svc/quantdrift\n")
    assert _run(copied) == ["models"]
    return folder


@pytest.fixture
def manifests(first_run: Path, tmp_path: Path) -> Path:
    """Return the test's own copy of those manifests."""
    shutil.copytree(first_run, tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path / "deploy" / "kubernetes"


def _run(copied: Path, commands: str = "") -> list[str]:
    """Run the commands of the page, or others; return the namespaces whose secrets were applied after those of the roles."""
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    calls = copied.parents[1] / "calls"
    calls.unlink(missing_ok=True)
    subprocess.run(
        ["bash", "-c", _AROUND + (commands or _block("secrets"))],
        check=True,
        cwd=copied.parents[1],
        env={**os.environ, "PATH": programs, "CALLS": str(calls)},
        stdout=subprocess.DEVNULL,
    )
    applied = [line for line in calls.read_text().splitlines() if line.startswith("apply")]
    assert applied[0] == "apply --kustomize ."
    found = [re.fullmatch(r"apply --namespace (\S+) --kustomize namespaces/\1", line) for line in applied[1:]]
    return [one[1] for one in found if one]


_CREATE: Final = "deploy/kubernetes/secrets/create.sh owner.dsn nats-ca.pem postgres-ca.pem"


def _applied(secrets: Path) -> dict[tuple[str, str], dict[str, bytes]]:
    """Return the secrets that are applied, by namespace and name: those of the roles, and of each namespace with models."""
    made = {
        (one["metadata"]["namespace"], one["metadata"]["name"]): one["data"]
        for one in render(secrets)
        if one["kind"] == "Secret"
    }
    for folder in (path.parent for path in secrets.glob("namespaces/*/kustomization.yaml")):
        for one in render(folder):
            if one["kind"] == "Secret":
                made[folder.name, one["metadata"]["name"]] = one["data"]
    return {
        key: {name: base64.b64decode(value) for name, value in data.items()} for key, data in made.items()
    }


def _files(secrets: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(secrets)): path.read_bytes() for path in secrets.rglob("*") if path.is_file()
    }


def test_the_commands_make_every_secret_and_a_second_run_changes_none(manifests: Path) -> None:
    """Only the owner can read the files, git ignores them, and the salt, a variable, ends without a new line."""
    secrets = manifests / "secrets"
    made = _applied(secrets)
    assert made.keys() == {
        *(
            ("quantdrift", f"quantdrift-{role}")
            for role in ["intake", "shadow", "monitor", "report", "web", "migrate"]
        ),
        ("models", "quantdrift-sidecar"),
        ("models", "quantdrift-gate"),
    }
    for data in made.values():
        if "sampling-salt" in data:
            assert re.fullmatch(rb"[0-9a-f]{64}", data["sampling-salt"])
    for directory in ("nats", "postgres", "shadow", "namespaces"):
        for path in (secrets / directory).rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert "*" in (secrets / ".gitignore").read_text().splitlines()
    before = _files(secrets)
    assert _run(manifests) == ["models"]
    assert _files(secrets) == before
    assert _run(manifests, _CREATE) == ["models"], "the namespaces are remembered"
    assert _files(secrets) == before


@pytest.mark.release
def test_each_namespace_has_keys_of_its_own(manifests: Path) -> None:
    """A namespace that is added changes no other's; the shadow opens what all encrypt, and nobody what the shadow encrypts."""
    secrets = manifests / "secrets"
    before = _applied(secrets)["models", "quantdrift-sidecar"]
    assert _run(manifests, f"{_CREATE} vision=faces,plates") == ["models", "vision"]
    made = _applied(secrets)
    assert made["models", "quantdrift-sidecar"] == before
    own = [
        made[key]
        for key in (
            ("models", "quantdrift-sidecar"),
            ("vision", "quantdrift-sidecar"),
            ("quantdrift", "quantdrift-intake"),
        )
    ]
    for name in ("sidecar.nk", "hmac-key", "sampling-salt"):
        assert len({data[name] for data in own}) == len(own), name
    now = datetime.now(UTC)
    option = "stream.payload_key_file"
    shadow = read_keys(made["quantdrift", "quantdrift-shadow"]["payload-keys.json"], option, "")
    for data in own:
        ring = read_keys(data["payload-keys.json"], option, "")
        (key,) = ring.keys
        sealed = seal(b"x", key, model="faces", exchange_id="a" * 32)
        assert unseal(sealed, shadow, "faces") == b"x"
        by_shadow = seal(b"x", shadow.current(now), model="faces", exchange_id="a" * 32)
        for message in (sealed, by_shadow):
            with pytest.raises(QuarantineError, match="public key"):
                unseal(message, ring, "faces")
    for kind in ("intake", "gate"):
        file = made["quantdrift", f"quantdrift-{'intake' if kind == 'intake' else 'monitor'}"][
            f"{kind}-tokens"
        ]
        callers = read_callers(file.decode(), kind)
        for namespace, models in (("models", ("digits",)), ("vision", ("faces", "plates"))):
            token = (secrets / "namespaces" / namespace / f"{kind}-token").read_text()
            caller = find_caller(callers, token, now)
            assert caller is not None
            assert (caller.name, caller.models) == (namespace, models)
    assert made["vision", "quantdrift-gate"]["gate-token"] != made["models", "quantdrift-gate"]["gate-token"]


async def test_nats_refuses_what_one_namespace_forges_of_anothers_model(
    manifests: Path, tmp_path: Path
) -> None:
    """With the key of its pods it publishes its own models alone; the intake's publishes all, unless it is bound too."""
    secrets = manifests / "secrets"
    await asyncio.to_thread(_run, manifests, f"{_CREATE} models=digits vision=faces,plates")
    users = (secrets / "nats-users.conf").read_text()
    async with server_with(users, tmp_path) as url:
        keys = str(secrets / "nats")
        (tmp_path / "config.toml").write_text(f'[stream]\nurl = "{url}"\n')
        applied = await asyncio.to_thread(
            started, "setup", "nats", "--keys", keys, "--apply", directory=tmp_path
        )
        assert applied.returncode == 0, applied.stderr
        for place, models in (
            (("models", "quantdrift-sidecar"), {"digits"}),
            (("vision", "quantdrift-sidecar"), {"faces", "plates"}),
            (("quantdrift", "quantdrift-intake"), {"digits", "faces", "plates"}),
        ):
            key = tmp_path / "stolen.nk"
            key.write_bytes(_applied(secrets)[place]["sidecar.nk"])
            stream = Stream(url=url, credentials_file=str(key))
            queue = await Queue.connect(
                stream, client_name="attacker", role=NatsRole.SIDECAR, publish_timeout_s=1.0
            )
            try:
                taken = set()
                for model in ("digits", "faces", "plates", "unknown"):
                    exchange = exchange_of(inputs_of(1))
                    wire = encode(msgspec.structs.replace(exchange, model=model))
                    with contextlib.suppress(RetryError):
                        await queue.publish_exchange(model, exchange.id, wire)
                        taken.add(model)
                assert taken == models, place
            finally:
                await queue.close()
    assert "sidecar: " not in users, "a key for all models"
    await asyncio.to_thread(_run, manifests, f"{_CREATE} quantdrift=plates")
    (of_intake,) = re.findall(
        r"# sidecar-quantdrift: .*of (.*) only", (secrets / "nats-users.conf").read_text()
    )
    assert of_intake == "plates"


def test_the_key_that_a_pod_mounts_is_that_of_its_role(manifests: Path) -> None:
    """NATS knows its public half as the user of this role; the database's address names this role too."""
    users = (manifests / "secrets" / "nats-users.conf").read_text()
    roles = {key: role for role, key in re.findall(r"# ([\w-]+): .*\n +\{ nkey: (\w+)", users)}
    made = _applied(manifests / "secrets")
    for pod in PODS:
        namespace = pod.owner["metadata"]["namespace"]
        for name, key, path in given_files(pod):
            if name == "quantdrift-intake-tls":  # its certificate comes from whoever runs the cluster
                continue
            content = made[namespace, name][key] if key != "ca.crt" else b""
            role = name.removeprefix("quantdrift-")
            if path.endswith(".nk"):
                public = nkeys.from_seed(bytearray(content.strip())).public_key.decode()
                expected = {
                    "intake": f"sidecar-{namespace}",
                    "sidecar": f"sidecar-{namespace}",
                    "migrate": "admin",
                }
                assert roles[public] == expected.get(role, role)
            elif path == "dsn":
                user = {"migrate": "OWNER", "web": "quantdrift_reader"}.get(role, f"quantdrift_{role}")
                assert f"://{user}:".encode() in content
                assert content.strip().endswith(
                    b"?sslmode=verify-full&sslrootcert=/etc/quantdrift/secrets/ca.crt"
                )


@pytest.mark.release
def test_the_variable_on_the_page_gives_commands_the_owners_address(manifests: Path) -> None:
    """Though the configuration names the file in the pods."""
    file = manifests / "secrets" / "postgres" / "migrate.dsn"
    config = load(manifests / "config" / "config.toml", {"QUANTDRIFT__STORAGE__DSN_FILE": str(file)})
    assert load_secrets(config, Role.MIGRATE, {}).current_dsn() == file.read_text().strip()


@pytest.mark.parametrize(
    "arguments",
    sorted({tuple(one["args"]) for pod in PODS for one in pod.containers() if "quantdrift" in one["image"]}),
    ids=lambda arguments: "-".join(arguments[:2]),
)
def test_every_command_of_a_container_exists(arguments: tuple[str, ...]) -> None:
    """With each of its options."""
    words = [one for one in arguments[:2] if not one.startswith("-")]
    ran = CliRunner().invoke(main, [*words, "--help"])
    assert ran.exit_code == 0, ran.output
    for option in (one for one in arguments if one.startswith("--")):
        assert option in ran.output


@pytest.mark.parametrize("folder", [".", pytest.param("namespaces/models", marks=pytest.mark.release)])
def test_kubectl_builds_the_same_secrets(manifests: Path, folder: str) -> None:
    """The authority of both servers is in the ConfigMap of each namespace."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here")
    directory = manifests / "secrets" / folder
    command = [kubectl, "kustomize", str(directory)]
    built = list(yaml.safe_load_all(subprocess.run(command, check=True, capture_output=True).stdout))

    def key(resource: dict[str, Any]) -> tuple[str, str, str]:
        metadata = resource["metadata"]
        return resource["kind"], metadata.get("namespace", ""), metadata["name"]

    for one in built:  # in lines
        if one["kind"] == "Secret":
            one["data"] = {name: value.replace("\n", "") for name, value in one["data"].items()}
    assert sorted(built, key=key) == sorted(render(directory), key=key)
    (authorities,) = [one["data"] for one in built if one["kind"] == "ConfigMap"]
    assert authorities == {"ca.crt": "the authority of nats\nthe authority of postgres\n"}


def test_every_object_that_the_page_names_exists() -> None:
    """Directories, jobs and deployments of its commands."""
    directories = set(re.findall(r"--kustomize deploy/kubernetes/([\w-]+)", _PAGE))
    assert {"migrate", "central", "istio"} <= directories
    for directory in directories:
        assert render(DEPLOY / directory)
    existing = {
        f"{one['kind'].lower()}/{one['metadata']['name']}"
        for variant in ("everything", "migrate")
        for one in render(DEPLOY / variant)
    }
    named = set(re.findall(r"\b(?:job|cronjob|deployment)/quantdrift[\w-]*", _PAGE))
    assert len(named) >= 4
    assert named <= existing


def _owning(pod: Pod) -> list[list[str]]:
    return [
        container["args"][:2]
        for container in pod.containers()
        if container.get("args", [""])[0] in {"db", "setup"}
    ]


def test_the_schema_comes_first_and_one_pod_has_the_owners_rights() -> None:
    """The Job upgrades, then grants, then prepares NATS; the page waits for it before anything else starts."""
    (job,) = pods("migrate")
    assert _owning(job) == [["db", "upgrade"], ["setup", "postgres"], ["setup", "nats"]]
    assert job.owner["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    for pod in PODS:
        if pod.variant != "migrate":
            assert _owning(pod) == []
    assert re.findall(r"kubernetes/\w+|job/\S+|deployment/\S+", _block("start")) == [
        "kubernetes/migrate",
        "job/quantdrift-migrate",
        "kubernetes/central",
        "deployment/quantdrift-monitor",
        "deployment/quantdrift-shadow",
    ]


def test_an_upgrade_replaces_the_shadow_alone_after_the_schema() -> None:
    """In the order of docs/how-to/operate.md: the selector of its command has all of the shadow, and no other role."""
    steps = _block("upgrade")
    assert re.findall(
        r"delete job|kubernetes/\w+|--for condition=complete|component=\w+|deployment/\S+", steps
    ) == [
        "delete job",
        "kubernetes/migrate",
        "--for condition=complete",
        "kubernetes/central",
        "component=shadow",
        "deployment/quantdrift-shadow",
    ]
    chosen = [
        one["kind"]
        for one in render(DEPLOY / "central")
        if one["metadata"].get("labels", {}).get("app.kubernetes.io/component") == "shadow"
    ]
    assert sorted(chosen) == ["Deployment", "NetworkPolicy", "PodDisruptionBudget", "ServiceAccount"]


def test_keda_follows_the_consumer_of_every_model() -> None:
    """The triggers are those of the configured models, and nothing else sets the number of workers."""
    config = load(DEPLOY / "config" / "config.toml", {})
    (models,) = (DEPLOY / "config" / "models.d").glob("*.toml")
    names = [model["name"] for model in tomllib.loads(models.read_text())["models"]]
    (scaled,) = of_kind("everything", "ScaledObject")
    asked = [trigger["metadata"] for trigger in scaled["spec"]["triggers"]]
    assert [one["consumer"] for one in asked] == [
        durable_name(f"{config.stream.name}.exchange.{subject_token(name)}") for name in names
    ]
    assert {one["stream"] for one in asked} == {config.stream.name}
    assert scaled["spec"]["minReplicaCount"] >= 1
    (shadow,) = [pod.owner for pod in pods("everything") if pod.owner["metadata"]["name"].endswith("shadow")]
    assert scaled["spec"]["scaleTargetRef"]["name"] == shadow["metadata"]["name"]
    assert "replicas" not in shadow["spec"]


def test_the_report_is_written_to_its_volume() -> None:
    """The default file is below the working directory, and nothing else can be written there."""
    (pod,) = [pod for pod in pods("central") if pod.owner["kind"] == "CronJob"]
    (container,) = pod.containers()
    assert container["args"][:2] == ["report", "--week"]
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "reports"]
    assert mount["mountPath"] == str(Path(container["workingDir"]) / DIRECTORY)
    assert not mount.get("readOnly", False)
    assert pod.owner["spec"]["concurrencyPolicy"] == "Forbid"
