"""The files that run a configuration elsewhere: a Compose file for one host, and values of the Helm chart for a cluster."""

import glob
import importlib.metadata
import math
import os
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from quantdrift.core.config.address import AddressError, is_loopback, read_address, read_server_url
from quantdrift.core.config.models import Runtime
from quantdrift.core.process.nats_server import MAX_PAYLOAD_BYTES
from quantdrift.init.toml import toml_text

COMPOSE: Final = "compose.yaml"
VALUES: Final = "quantdrift-values.yaml"
PASSWORD: Final = "QUANTDRIFT_PASSWORD"  # noqa: S105 - the name of a variable
_MOUNTED: Final = "/etc/quantdrift"
_IN_TORCH: Final = frozenset({Runtime.TORCH.value, Runtime.TRANSFORMERS.value})
_STOP_S: Final = 5
_SECRETS: Final = "/etc/quantdrift/secrets"
# What deploy/kubernetes/config/config.toml says of a cluster; a test compares both.
IN_CLUSTER: Final[dict[str, dict[str, Any]]] = {
    "stream": {
        "url": "tls://nats.nats.svc:4222",
        "ca_file": f"{_SECRETS}/ca.crt",
        "credentials_file": f"{_SECRETS}/nats.nk",
        "payload_key_file": f"{_SECRETS}/payload-keys.json",
        "replicas": 3,
    },
    "storage": {"dsn_file": f"{_SECRETS}/dsn"},
    "sidecar": {
        "listen": "0.0.0.0:9000",
        "admin": "0.0.0.0:9464",
        "probes": "0.0.0.0:9463",
        "drain_delay_s": 1.0,
        "grace_s": 15.0,
        "pause_file": f"{_MOUNTED}/main/pause",
    },
    "capture": {"hmac_key_file": f"{_SECRETS}/hmac-key"},
    "intake": {"token_file": f"{_SECRETS}/intake-tokens"},
    "shadow": {
        "ca_file": f"{_SECRETS}/ca.crt",
        "admin": "0.0.0.0:9465",
        "reference_memory_bytes": 2_147_483_648,
    },
    "monitor": {"admin": "0.0.0.0:9466", "gate_token_file": f"{_SECRETS}/gate-tokens"},
    "telemetry": {
        "otlp_endpoint": "https://otel-collector.observability.svc:4317",
        "ca_file": f"{_SECRETS}/ca.crt",
        "log_json": True,
    },
}


class DeploymentFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that runs a configuration, beside it.

    Parameters
    ----------
    notes
        What a person has to do or to change before it is used.
    """

    name: str
    text: str
    notes: tuple[str, ...] = ()


def compose_file(document: Mapping[str, Any], folder: Path, *, grace_s: float) -> DeploymentFile:
    """Return a Compose file that runs a configuration on this host, with the addresses that stand in it.

    Parameters
    ----------
    document
        The configuration, as TOML has it.
    folder
        Of the configuration, and of the file that is returned: all of it is mounted.
    grace_s
        Seconds that a sidecar needs to end.
    """
    runtimes = {reference.get("runtime", Runtime.ONNX.value) for reference in _references(document)}
    notes = [
        f"build the images by `make images` in a checkout, and set {PASSWORD} to 16 letters and digits or more: {PASSWORD}=$(openssl rand -hex 16)",
        f"the user 65532 reads this folder in the containers: `chmod -R a+rX {os.path.relpath(folder)}`",
        "network_mode: host needs Linux, or Docker Desktop where host networking is switched on",
    ]
    if Runtime.TRANSFORMERS.value in runtimes:
        notes.append("a language model needs the extra `text` in the shadow's image")
    mounts = "".join(
        f"\n    - {_quoted(mount)}" for mount in ["./:/etc/quantdrift:ro", *_mounts(document, folder)]
    )
    text = _COMPOSE
    for name, value in {
        "@MOUNTS@": mounts,
        "@TAG@": importlib.metadata.version("quantdrift"),
        "@SHADOW@": "quantdrift-shadow-cuda" if runtimes & _IN_TORCH else "quantdrift-shadow",
        "@MAX_PAYLOAD@": str(MAX_PAYLOAD_BYTES),
        "@STOP_S@": f"{math.ceil(grace_s) + _STOP_S}s",
        "@PASSWORD@": f"${{{PASSWORD}:?set it to 16 letters and digits or more}}",
    }.items():
        text = text.replace(name, value)
    return DeploymentFile(name=COMPOSE, text=text, notes=tuple(notes))


def helm_values(document: Mapping[str, Any], *, memory_bytes: int) -> DeploymentFile:
    """Return values of the chart deploy/helm/quantdrift for a configuration: what stands in it, with the addresses and files of a cluster.

    Parameters
    ----------
    document
        The configuration, as TOML has it.
    memory_bytes
        What a sidecar needs.
    """
    main = {name: value for name, value in document.items() if name not in {"models", "slices"}}
    for section, options in IN_CLUSTER.items():
        if section == "capture" and not main.get("capture", {}).get("hmac"):
            continue
        main[section] = {**main.get(section, {}), **options}
    notes = [
        "in the cluster Postgres and NATS are yours, with TLS, and a script makes their secrets: docs/how-to/kubernetes.md#secrets",
        "the sidecar goes into the pod of the model server: docs/how-to/kubernetes.md#next-to-your-model-server",
    ]
    backend = document.get("sidecar", {}).get("backend", "")
    port = _port(backend)
    main["sidecar"]["backend"] = f"127.0.0.1:{port}" if port else backend
    if (theirs := document.get("telemetry", {}).get("otlp_endpoint")) and not _is_here(theirs):
        main["telemetry"]["otlp_endpoint"] = theirs
    models = {name: document[name] for name in ("models", "slices") if name in document}
    models["models"] = [
        {**model, "references": list(map(_in_volume, model.get("references", [])))}
        for model in models.get("models", [])
    ]
    notes += [
        f"{reference['url']} is this machine: write the address that the reference has in the cluster into {VALUES}"
        for reference in _references(document)
        if _is_here(reference.get("url", ""))
    ]
    files = [reference["path"] for reference in _references(models) if reference.get("path")]
    if files:
        notes.append(
            f"copy into the volume claim quantdrift-references: {', '.join(Path(file).name for file in files)}"
        )
    text = _VALUES
    for name, value in {
        "@MEMORY@": f"{math.ceil(memory_bytes / 2**20)}Mi",
        "@CONFIG@": textwrap.indent(toml_text(main), "  "),
        "@MODELS@": textwrap.indent(toml_text(models), "    "),
    }.items():
        text = text.replace(name, value)
    return DeploymentFile(name=VALUES, text=text, notes=tuple(notes))


def _references(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for model in document.get("models", []):
        yield from model.get("references", [])


def _in_volume(reference: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reference as the shadow of a cluster has it: its file is in the volume `/models`."""
    path = reference.get("path")
    return {**reference, "path": f"/models/{Path(path).name}"} if path else dict(reference)


def _mounts(document: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yield the mounts of the references that are not below the folder of the configuration, with the files of their weights."""
    for reference in _references(document):
        path = reference.get("path")
        if not path:
            continue
        below = Path(os.path.normpath(Path(_MOUNTED, path)))
        if below.is_relative_to(_MOUNTED):
            continue
        host = folder / path
        for file in sorted(host.parent.glob(f"{glob.escape(host.name)}*")) or [host]:
            yield f"{os.path.relpath(file, folder)}:{below.parent / file.name}:ro"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _port(address: str) -> int:
    try:
        return read_address(address).port
    except AddressError:
        return 0


def _is_here(url: str) -> bool:
    try:
        return bool(url) and is_loopback(read_server_url(url, "http", "https", "grpc", "grpcs").host)
    except AddressError:
        return False


_COMPOSE: Final = """\
# Written by `quantdrift init --compose`: the relay of config.toml, Postgres, NATS, shadow, monitor and page on this host.
#
#     QUANTDRIFT_PASSWORD=$(openssl rand -hex 16)    # once, kept in .env beside this file
#     docker compose up --detach
#
# All ports but the relay's are open to this machine only: the page is at http://127.0.0.1:9468, its token is the password.
x-quantdrift: &quantdrift
  network_mode: host        # the addresses in config.toml are those of this machine
  user: "65532:65532"
  read_only: true
  tmpfs: [/tmp]
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]
  restart: unless-stopped
  volumes:@MOUNTS@

services:
  # On the serving path: it waits for nothing else.
  sidecar:
    <<: *quantdrift
    image: quantdrift-sidecar:@TAG@
    command: [sidecar, --config, /etc/quantdrift/config.toml]
    stop_grace_period: @STOP_S@
    environment:
      QUANTDRIFT__STREAM__URL: &stream "nats://quantdrift:@PASSWORD@@127.0.0.1:4222"

  shadow:
    <<: *quantdrift
    image: @SHADOW@:@TAG@
    command: [shadow, --config, /etc/quantdrift/config.toml]
    stop_grace_period: 30s
    depends_on: &migrated
      migrate: { condition: service_completed_successfully }
    environment: &stores
      QUANTDRIFT__STREAM__URL: *stream
      QUANTDRIFT_DSN: &dsn "postgresql://quantdrift:@PASSWORD@@127.0.0.1:5432/quantdrift"

  monitor:
    <<: *quantdrift
    image: quantdrift-monitor:@TAG@
    command: [monitor, --config, /etc/quantdrift/config.toml]
    stop_grace_period: 30s
    depends_on: *migrated
    environment: *stores

  web:
    <<: *quantdrift
    image: quantdrift-monitor:@TAG@
    command: [web, --config, /etc/quantdrift/config.toml]
    depends_on: *migrated
    environment:
      QUANTDRIFT_DSN: *dsn
      QUANTDRIFT_WEB_TOKEN: "@PASSWORD@"

  # Brings the schema to this release, and ends.
  migrate:
    <<: *quantdrift
    image: quantdrift-monitor:@TAG@
    command: [db, upgrade, --config, /etc/quantdrift/config.toml]
    restart: on-failure
    depends_on:
      postgres: { condition: service_healthy }
    environment:
      QUANTDRIFT_DSN: *dsn

  postgres:
    image: postgres:17
    network_mode: host
    command: [postgres, -c, listen_addresses=127.0.0.1]
    restart: unless-stopped
    environment:
      POSTGRES_USER: quantdrift
      POSTGRES_DB: quantdrift
      POSTGRES_PASSWORD: "@PASSWORD@"
    volumes: ["postgres:/var/lib/postgresql/data"]
    healthcheck:
      test: [CMD, pg_isready, --host, 127.0.0.1, --username, quantdrift]
      interval: 2s
      retries: 60

  nats:
    image: nats:2
    network_mode: host
    command: [--config, /nats.conf]
    restart: unless-stopped
    configs:
      - { source: nats, target: /nats.conf }
    volumes: ["nats:/data"]

configs:
  nats:
    content: |
      listen: "127.0.0.1:4222"
      jetstream { store_dir: "/data" }
      max_payload: @MAX_PAYLOAD@
      authorization { user: quantdrift, password: "@PASSWORD@" }

volumes:
  postgres:
  nats:
"""
_VALUES: Final = """\
# Written by `quantdrift init --kubernetes`, for the chart deploy/helm/quantdrift of a checkout:
#
#     helm upgrade --install quantdrift deploy/helm/quantdrift --namespace quantdrift --create-namespace --values quantdrift-values.yaml
#
# The addresses of NATS and of the collector are examples. docs/how-to/kubernetes.md
sidecar:
  resources:
    requests: { cpu: 250m, memory: 160Mi }
    limits: { memory: @MEMORY@ }
config: |
@CONFIG@
models:
  models.toml: |
@MODELS@"""
