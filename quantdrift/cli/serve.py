"""The long-running roles: `sidecar`, `shadow`, `monitor`, and `up` for all of them."""

import sys
from pathlib import Path

import click

from quantdrift.cli.options import CONFIG, DATA, prepare
from quantdrift.core.config.load import Role, load
from quantdrift.core.logs import setup_logs


@click.command()
@CONFIG
def sidecar(config_path: Path) -> None:
    """Relay inference traffic and capture a sample of it.

    Clients connect to sidecar.listen; bytes go to sidecar.backend and back unchanged. SIGTERM keeps the port open
    for drain_delay_s, closes connections between exchanges, and ends within grace_s.

    The configuration file and models.d/ beside it are watched: what is captured and how much of it follows a change
    within seconds, without a connection being touched. Ports and the stream need a restart; the log says so.

    \b
    Example:
      QUANTDRIFT__SIDECAR__BACKEND=127.0.0.1:8001 quantdrift sidecar -c config.toml
    """
    from quantdrift.core.process.run import run
    from quantdrift.sidecar.supervisor import serve

    config, secrets = prepare(config_path, Role.SIDECAR)
    sys.exit(run(lambda stop: serve(config, secrets, stop, config_path), grace_s=config.sidecar.grace_s))


@click.command()
@CONFIG
@DATA
def shadow(config_path: Path, data: Path | None) -> None:
    """Replay captured exchanges through the FP32 reference and store comparisons.

    Run as many as there is traffic: they share the stream. SIGTERM finishes the batch in hand.

    \b
    Example:
      QUANTDRIFT_DSN=postgresql://... quantdrift shadow -c config.toml
    """
    from quantdrift.core.process.run import run
    from quantdrift.shadow.worker import serve

    config, secrets = prepare(config_path, Role.SHADOW, data)
    sys.exit(run(lambda stop: serve(config, secrets, stop), grace_s=config.shadow.grace_s))


@click.command()
@CONFIG
@DATA
def monitor(config_path: Path, data: Path | None) -> None:
    """Fold comparisons into detectors, own the alerts, send them by OpenTelemetry.

    One leads; others started beside it stand by and take over.

    \b
    Example:
      QUANTDRIFT_DSN=postgresql://... quantdrift monitor -c config.toml
    """
    from quantdrift.core.process.run import run
    from quantdrift.monitor.service import serve

    config, secrets = prepare(config_path, Role.MONITOR, data)
    sys.exit(run(lambda stop: serve(config, secrets, stop), grace_s=config.monitor.grace_s))


@click.command()
@CONFIG
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".quantdrift"),
    show_default=True,
    envvar="QUANTDRIFT_DATA",
    help="Where the embedded servers keep their files.",
)
@click.option(
    "--only",
    type=click.Choice(["sidecar", "shadow", "monitor"]),
    multiple=True,
    help="Start only this role beside the servers; may be repeated.",
)
def up(config_path: Path, data: Path, only: tuple[str, ...]) -> None:
    """Run every role on this host, with Postgres and NATS servers of its own.

    A server that is configured (QUANTDRIFT_DSN or storage.dsn_file, stream.url) is used instead of an embedded
    one. The sidecar starts first, and serves whatever becomes of the rest. What cannot run, or dies, is tried again
    without end; the log says once since when and why, and again when it runs. Only a signal ends this, or a
    configuration with which the sidecar cannot start (2). SIGTERM or Ctrl-C ends all in order.

    \b
    Example:
      quantdrift up -c config.toml --data /var/lib/quantdrift
    """
    from quantdrift.cli.up import SERVERS_GRACE_S, serve
    from quantdrift.core.process.run import run

    config = load(config_path)
    setup_logs(config.telemetry.log_level, as_json=config.telemetry.log_json, role="up")
    grace_s = config.sidecar.grace_s + config.shadow.grace_s + config.monitor.grace_s + SERVERS_GRACE_S
    sys.exit(run(lambda stop: serve(config_path, config, data, only, stop), grace_s=grace_s))
