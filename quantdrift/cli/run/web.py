"""The command `quantdrift web`."""

import os
import sys
from pathlib import Path

import click
import msgspec

from quantdrift.cli.options import CONFIG, DATA, prepare
from quantdrift.core.config.load import Role
from quantdrift.core.errors import OperatorError

_NICE = 5
_GRACE_S = 5.0


@click.command()
@CONFIG
@DATA
def web(config_path: Path, data: Path | None) -> None:
    """Serve the live page: models, slices, alerts, releases, and how the system does.

    It reads Postgres and changes nothing that is measured; a page that is slow or down costs nothing else. With
    web.operator_dsn_file, people who have logged in can acknowledge alerts and write notes on it. It listens on
    this machine only, until people can log in: with a token (web.token_file), at a provider (web.oidc), or at a proxy
    (web.identity_header).

    \b
    Example:
      quantdrift web --data .quantdrift
    """
    from quantdrift.cli.run.embedded_postgres import address_file
    from quantdrift.core.process.run import run
    from quantdrift.show.page.server import serve

    config, secrets = prepare(config_path, Role.WEB, data, address=address_file("reader"))
    if data is not None and not secrets.operator_dsn_file and not os.environ.get("QUANTDRIFT_DSN"):
        secrets = msgspec.structs.replace(secrets, operator_dsn_file=str(data / address_file("page")))
    if not config.web.listen:
        raise OperatorError("web.listen is empty, so there is no page: set it, e.g. to 127.0.0.1:9468")
    os.nice(_NICE)  # where it shares a host with anything that serves, it waits
    sys.exit(run(lambda stop: serve(config, secrets, stop), grace_s=_GRACE_S))
