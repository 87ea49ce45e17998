"""The commands that run a process: `sidecar`, `shadow`, `monitor`, and `up` for all of them."""

import logging
import os
import sys
from pathlib import Path
from typing import Final

import click

from quantdrift.cli.options import CONFIG, WITHOUT_MODELS, data_option, prepare, prepare_sidecar
from quantdrift.core.config.load import Role
from quantdrift.core.data_directory import UP_DATA
from quantdrift.core.logs import setup_logs
from quantdrift.core.process.kept_config import DIRECTORY_VARIABLE, KEPT, load_or_kept

_LOG = logging.getLogger(__name__)
_SERVER_DATA: Final = data_option("servers", is_found=False)
NICE = 10
"""Niceness of a shadow worker: where it shares a host with anything that serves, it waits."""


@click.command()
@CONFIG
def sidecar(config_path: Path) -> None:
    """Relay inference traffic and capture a sample of it.

    Clients connect to sidecar.listen; the sidecar relays all bytes unchanged between them and sidecar.backend. On
    SIGTERM it keeps the port open for drain_delay_s, closes connections between exchanges, and ends within grace_s.

    It watches the configuration file and the directory models.d/ next to it. Changes of models and sampling take
    effect within seconds and touch no connection. Changes of ports and of the stream need a restart; the log says so.

    \b
    Example:
      QUANTDRIFT__SIDECAR__BACKEND=127.0.0.1:8001 quantdrift sidecar -c config.toml
    """
    from quantdrift.core.process.run import run
    from quantdrift.sidecar.supervisor import serve

    config, secrets = prepare_sidecar(config_path)
    sys.exit(run(lambda stop: serve(config, secrets, stop, config_path), grace_s=config.sidecar.grace_s))


@click.command()
@CONFIG
@_SERVER_DATA
def shadow(config_path: Path, data: Path | None) -> None:
    """Replay captured exchanges through the FP32 reference and store comparisons.

    Run as many workers as the traffic needs: they share the stream. On SIGTERM a worker finishes its current batch.

    \b
    Example:
      QUANTDRIFT_DSN=postgresql://... quantdrift shadow -c config.toml
    """
    from quantdrift.cli.run.embedded_postgres import address_file
    from quantdrift.core.data_directory import at_data
    from quantdrift.core.process.run import GRACE_S, run
    from quantdrift.core.stream.rights import NatsRole
    from quantdrift.shadow.worker import serve

    config, secrets = prepare(config_path, Role.SHADOW, data, address=address_file("shadow"))
    config = at_data(config, data, NatsRole.SHADOW)
    os.nice(NICE)  # before any thread: each inherits it
    sys.exit(run(lambda stop: serve(config, secrets, stop), grace_s=GRACE_S))


@click.command()
@CONFIG
@_SERVER_DATA
def monitor(config_path: Path, data: Path | None) -> None:
    """Watch the stored comparisons for drift and send alerts by OpenTelemetry.

    One monitor leads; the others stand by, and one of them takes over when it fails.

    \b
    Example:
      QUANTDRIFT_DSN=postgresql://... quantdrift monitor -c config.toml
    """
    from quantdrift.cli.run.embedded_postgres import address_file
    from quantdrift.core.data_directory import at_data
    from quantdrift.core.process.run import GRACE_S, run
    from quantdrift.core.stream.rights import NatsRole
    from quantdrift.monitor.service import serve

    config, secrets = prepare(config_path, Role.MONITOR, data, address=address_file("monitor"))
    config = at_data(config, data, NatsRole.MONITOR)
    sys.exit(run(lambda stop: serve(config, secrets, stop), grace_s=GRACE_S))


@click.command()
@CONFIG
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    default=UP_DATA,
    show_default=True,
    envvar="QUANTDRIFT_DATA",
    help="Data directory of the embedded servers.",
)
@click.option(
    "--only",
    type=click.Choice(["sidecar", "shadow", "monitor", "web"]),
    multiple=True,
    help="Start only this process and the servers; may be repeated.",
)
@click.option(
    "--restart",
    "restarted",
    type=click.Choice(["sidecar", "shadow", "monitor", "web"]),
    multiple=True,
    help="Let the running command start this process again, and end; may be repeated.",
)
def up(config_path: Path, data: Path, only: tuple[str, ...], restarted: tuple[str, ...]) -> None:
    """Run sidecar, shadow, monitor and live page on this host, with embedded Postgres and NATS servers.

    If a server is configured (QUANTDRIFT_DSN or storage.dsn_file, stream.url), it is used instead of the embedded
    one. The sidecar starts first and serves even if the rest fails. A process that cannot start, or ends, is
    restarted without limit; the log says since when and why it is down, and when it runs again. The command ends only
    on SIGTERM or Ctrl-C, which stop everything in order, or with exit code 2 if the sidecar cannot start with its
    configuration.

    It watches the configuration file and the directory models.d/ next to it. The sidecar takes a change at once; shadow,
    monitor and live page are restarted with it. The log names what a sidecar takes at its next start: `--restart sidecar`
    starts it again, and its port stays open.

    \b
    Example:
      quantdrift up -c config.toml --data /var/lib/quantdrift
      quantdrift up --restart sidecar --data /var/lib/quantdrift
    """
    from quantdrift.cli.run.up import SERVERS_GRACE_S, ask_restart, serve
    from quantdrift.core.process.run import GRACE_S, run

    if restarted:
        ask_restart(data, restarted)
        click.echo(f"started again: {', '.join(restarted)}; `quantdrift status` says when it is ready")
        return
    os.environ.setdefault(DIRECTORY_VARIABLE, str(data.absolute() / KEPT))
    config, why = load_or_kept(config_path)
    setup_logs(config.telemetry.log_level, as_json=config.telemetry.log_json, role="up")
    if why:
        _LOG.error("%s", why)
    if not config.models:
        _LOG.warning("%s has no [[models]]: %s", config_path, WITHOUT_MODELS)
    grace_s = config.sidecar.grace_s + 2 * GRACE_S + SERVERS_GRACE_S
    sys.exit(run(lambda stop: serve(config_path, config, data, only, stop), grace_s=grace_s))
