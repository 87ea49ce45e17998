"""The files of `quantdrift init --compose` and `--kubernetes`: what they run agrees with the configuration, and is what the tools take."""

import json
import math
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import yaml

from deploy.helm.chart import CHART
from deploy.images.build import IMAGES
from quantdrift.cli.config_summary import memory_bytes
from quantdrift.core.config.load import Role, load, load_secrets
from quantdrift.core.config.schema import MIB
from quantdrift.core.process.nats_server import find_program
from quantdrift.init.deployment import IN_CLUSTER, PASSWORD, compose_file, helm_values
from tests.support.commands import invoked
from tests.support.shadow.onnx_models import linear_model, saved
from tests.support.sidecar.relay_process import free_port

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
SECRET = "0f3a91c27b6d4e58a1c29f07"
ROLES = ("sidecar", "shadow", "monitor", "web")


class _Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Members that Compose knows; others are errors, as Compose says."""


class _Condition(_Strict):
    condition: Literal["service_healthy", "service_completed_successfully"]


class _Health(_Strict):
    test: list[str]
    interval: str
    retries: int


class _Mounted(_Strict):
    source: str
    target: str


class _Service(_Strict):
    image: str
    command: list[str]
    network_mode: Literal["host"]
    restart: Literal["unless-stopped", "on-failure"]
    user: str = "0"
    read_only: bool = False
    tmpfs: list[str] = []
    cap_drop: list[str] = []
    security_opt: list[str] = []
    volumes: list[str] = []
    environment: dict[str, str] = {}
    stop_grace_period: str = "10s"
    depends_on: dict[str, _Condition] = {}
    healthcheck: _Health | None = None
    configs: list[_Mounted] = []


class _Content(_Strict):
    content: str


class _Compose(_Strict):
    common: dict[str, Any] = msgspec.field(name="x-quantdrift")
    services: dict[str, _Service]
    configs: dict[str, _Content]
    volumes: dict[str, None]


def _init(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call `init` for a model outside of the folder of the configuration."""
    folder = directory / "project"
    folder.mkdir(exist_ok=True)
    (directory / "models").mkdir(exist_ok=True)
    saved(linear_model(), directory / "models" / "model-fp32.onnx")
    done = invoked(
        *("init", "../models/model-fp32.onnx", "--yes", "--backend", "127.0.0.1:1", *arguments),
        directory=folder,
    )
    assert done.returncode == 0, done.stderr
    return done


def _compose(text: str) -> _Compose:
    """Return the file as Compose reads it, with the password in place of its variable."""
    filled = re.sub(rf"\$\{{{PASSWORD}:\?[^}}]*\}}", SECRET, text)
    assert "$" not in filled.partition("\nservices:")[2]
    return msgspec.convert(yaml.safe_load(filled), _Compose)


def test_compose_runs_every_role_with_the_addresses_of_the_configuration(tmp_path: Path) -> None:
    """Each role has its secrets and no other ones, finds Postgres, NATS and the reference, and waits for the schema; NATS takes its file."""
    _init(tmp_path, "--compose")
    folder = tmp_path / "project"
    compose = _compose((folder / "compose.yaml").read_text())
    assert set(compose.services) == {*ROLES, "migrate", "postgres", "nats"}
    postgres, nats = compose.services["postgres"], compose.services["nats"]
    assert postgres.environment["POSTGRES_PASSWORD"] == SECRET
    assert "listen_addresses=127.0.0.1" in postgres.command
    for name in (*ROLES, "migrate"):
        service = compose.services[name]
        assert service.image.partition(":")[0].removeprefix("quantdrift-") in IMAGES
        assert service.read_only
        assert service.user == "65532:65532"
        assert service.cap_drop == ["ALL"]
        config = load(folder / "config.toml", service.environment)
        assert config.stream.url == (
            f"nats://quantdrift:{SECRET}@127.0.0.1:4222"
            if "QUANTDRIFT__STREAM__URL" in service.environment
            else "nats://127.0.0.1:4222"
        )
        has_dsn = "QUANTDRIFT_DSN" in service.environment
        assert has_dsn is (name != "sidecar")
        if name in ROLES:
            secrets = load_secrets(config, Role(name), service.environment)
            assert secrets.dsn == (
                f"postgresql://quantdrift:{SECRET}@127.0.0.1:5432/quantdrift" if has_dsn else ""
            )
            assert secrets.web_token == (SECRET if name == "web" else "")
    assert not compose.services["sidecar"].depends_on
    assert (
        float(compose.services["sidecar"].stop_grace_period.removesuffix("s"))
        > load(folder / "config.toml").sidecar.grace_s
    )
    assert compose.services["migrate"].depends_on["postgres"].condition == "service_healthy"
    for name in ("shadow", "monitor", "web"):
        assert compose.services[name].depends_on["migrate"].condition == "service_completed_successfully"

    mounts = dict(mount.removesuffix(":ro").split(":") for mount in compose.services["shadow"].volumes)
    (reference,) = load(folder / "config.toml").models[0].references
    in_container = os.path.normpath(
        Path(
            "/etc/quantdrift",
            tomllib.loads((folder / "config.toml").read_text())["models"][0]["references"][0]["path"],
        )
    )
    (source,) = [source for source, target in mounts.items() if target == in_container]
    assert (folder / source).samefile(reference.path)
    assert (mounts["./"], nats.configs[0].target) == ("/etc/quantdrift", nats.command[-1])

    settings = tmp_path / "nats.conf"
    settings.write_text(compose.configs["nats"].content.replace("/data", str(tmp_path / "nats")))
    checked = subprocess.run(
        [find_program(), "-t", "-c", str(settings)], check=False, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


def test_helm_values_have_the_configuration_of_a_cluster(tmp_path: Path) -> None:
    """The chart's schema takes them, the product loads them as a pod does, and what they add is what the manifests have."""
    import jsonschema

    _init(tmp_path, "--kubernetes")
    values = yaml.safe_load((tmp_path / "project" / "quantdrift-values.yaml").read_text())
    jsonschema.Draft7Validator(json.loads((ROOT / CHART / "values.schema.json").read_text())).validate(values)
    (tmp_path / "pod" / "models.d").mkdir(parents=True)
    main = tmp_path / "pod" / "config.toml"
    main.write_text(values["config"])
    for name, text in values["models"].items():
        (tmp_path / "pod" / "models.d" / name).write_text(text)
    config = load(main, {})
    assert (config.sidecar.listen, config.sidecar.backend) == ("0.0.0.0:9000", "127.0.0.1:1")
    assert [model.name for model in config.models] == ["model"]
    assert config.models[0].references[0].path == "/models/model-fp32.onnx"
    assert values["sidecar"]["resources"]["requests"]["memory"] == "160Mi"
    assert values["sidecar"]["resources"]["limits"] == {
        "memory": f"{math.ceil(memory_bytes(config) / MIB)}Mi"
    }
    manifests = tomllib.loads((ROOT / "deploy/kubernetes/config/config.toml").read_text())
    for section, options in IN_CLUSTER.items():
        for option, value in options.items():
            assert manifests[section][option] == value, f"{section}.{option}"


def test_a_file_that_is_there_is_never_changed(tmp_path: Path) -> None:
    """A second call says that it is the same, a third how it would be written otherwise."""
    files = [tmp_path / "project" / name for name in ("compose.yaml", "quantdrift-values.yaml")]
    _init(tmp_path, "--compose", "--kubernetes")
    before = [file.read_text() for file in files]
    again = _init(tmp_path, "--compose", "--kubernetes")
    assert again.stdout.count("is there and is the same") == 2
    config = tmp_path / "project" / "config.toml"
    config.write_text(
        config.read_text()
        .replace("[sidecar]", "[sidecar]\ngrace_s = 40.0")
        .replace('"127.0.0.1:1"', '"127.0.0.1:2"')
    )
    changed = json.loads(_init(tmp_path, "--compose", "--kubernetes", "--json").stdout)["deployment"]
    assert [file["written"] for file in changed] == [False, False]
    assert "+    stop_grace_period: 45s" in changed[0]["differences"]
    assert '+  backend = "127.0.0.1:2"' in changed[1]["differences"]
    assert [file.read_text() for file in files] == before


def test_headers_strata_and_slices_come_along() -> None:
    """What was found in traffic is in both parts of the values, equal to what it was; addresses of this machine are pointed out."""
    document: dict[str, Any] = {
        "sidecar": {"listen": "0.0.0.0:8000", "backend": "127.0.0.1:8001"},
        "capture": {"headers": ["x-scanner"], "hmac": ["header.x-user"]},
        "sampling": {
            "rate": 0.1,
            "header_strata": [
                {"name": "scanner=archive", "headers": {"x-scanner": 'a "quoted" one'}, "rate": 1.0}
            ],
        },
        "telemetry": {"otlp_endpoint": "https://otel.example.com:4317"},
        "models": [
            {
                "name": "digits",
                "references": [{"runtime": "openai", "url": f"http://127.0.0.1:{free_port()}"}],
                "budget": {"flip": 0.02},
            }
        ],
        "slices": [{"name": "scanner", "header": "x-scanner"}],
    }
    file = helm_values(document, memory_bytes=1)
    values = yaml.safe_load(file.text)
    config, models = tomllib.loads(values["config"]), tomllib.loads(values["models"]["models.toml"])
    assert models == {name: document[name] for name in ("models", "slices")}
    assert config["sampling"] == document["sampling"]
    assert config["capture"] == {**document["capture"], **IN_CLUSTER["capture"]}
    assert config["sidecar"]["backend"] == "127.0.0.1:8001"
    assert config["telemetry"]["otlp_endpoint"] == "https://otel.example.com:4317"
    assert any("is this machine" in note for note in file.notes)


def test_a_reference_in_pytorch_has_the_image_that_runs_it(tmp_path: Path) -> None:
    """And the files of its weights are mounted beside it."""
    for name in ("model-fp32.pt2", "model-fp32.pt2.data"):
        (tmp_path / name).touch()
    folder = tmp_path / "project"
    folder.mkdir()
    document: dict[str, Any] = {
        "models": [{"name": "m", "references": [{"runtime": "torch", "path": "../model-fp32.pt2"}]}]
    }
    shadow = _compose(compose_file(document, folder, grace_s=25).text).services["shadow"]
    assert shadow.image.startswith("quantdrift-shadow-cuda:")
    assert shadow.volumes[1:] == [
        "../model-fp32.pt2:/etc/model-fp32.pt2:ro",
        "../model-fp32.pt2.data:/etc/model-fp32.pt2.data:ro",
    ]
