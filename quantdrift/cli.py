"""The roof: the one command line. Every command imports only what its role needs."""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec

from quantdrift.core.config.load import Role, Secrets, load, load_secrets
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import OperatorError, QuantdriftError, RetryError
from quantdrift.core.logs import setup_logs
from quantdrift.terminal import Steps, explained

CONFIG = click.option(
    "--config",
    "-c",
    "config_path",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("config.toml"),
    show_default=True,
    envvar="QUANTDRIFT_CONFIG",
    help="Configuration file.",
)
DATA = click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="QUANTDRIFT_DATA",
    help="Data directory of a running `quantdrift up`, to find its Postgres.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


_EXTRAS = {
    "shadow": "shadow",
    "monitor": "monitor",
    "report": "report",
    "db": "storage",
    "up": "all",
    "config": "shadow",
}


class _Group(click.Group):
    """Prints our own errors without a traceback: exit code 2 where a person must act, 1 where it may pass."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OperatorError as error:
            _fail(str(error), 2)
        except RetryError as error:
            _fail(f"{error} (try again)", 1)
        except QuantdriftError as error:
            _fail(str(error), 1)
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get(ctx.invoked_subcommand or "")
            if extra is None:
                raise
            _fail(f"this command needs {error.name}: pip install 'quantdrift[{extra}]'", 2)


def _fail(message: str, code: int) -> NoReturn:
    click.secho(f"quantdrift: {message}", fg="red", err=True)
    sys.exit(code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="quantdrift")
def main() -> None:
    """Find the input slice on which a quantised model has silently gone bad.

    A sidecar samples live traffic, a shadow replays it through the FP32 reference, a monitor compares per slice
    and pages through OpenTelemetry.

    \b
    Everything on this host:     quantdrift up --config config.toml
    What would it do?            quantdrift config check
    The weekly report:           quantdrift report --week
    """


def _role(config_path: Path, role: Role, data: Path | None = None) -> tuple[Config, Secrets]:
    config = load(config_path)
    setup_logs(config.telemetry.log_level, as_json=config.telemetry.log_json, role=role.value)
    if data is not None and role is not Role.SIDECAR and not os.environ.get("QUANTDRIFT_DSN"):
        try:
            os.environ["QUANTDRIFT_DSN"] = (data / "dsn").read_text(encoding="utf-8").strip()
        except OSError as error:
            raise OperatorError(
                f"{data} holds no `dsn`: is `quantdrift up --data {data}` running?"
            ) from error
    return config, load_secrets(config, role)


def _emit(record: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(record), indent=2))


@main.command()
@CONFIG
def sidecar(config_path: Path) -> None:
    """Relay inference traffic and capture a sample of it.

    Clients connect to sidecar.listen; bytes go to sidecar.backend and back unchanged. SIGTERM keeps the port open
    for drain_delay_s, closes connections between exchanges, and ends within grace_s.

    \b
    Example:
      QUANTDRIFT__SIDECAR__BACKEND=127.0.0.1:8001 quantdrift sidecar -c config.toml
    """
    from quantdrift.core.process import run
    from sidecar.supervisor import serve

    config, secrets = _role(config_path, Role.SIDECAR)
    sys.exit(run(lambda stop: serve(config_path, config, secrets, stop), grace_s=config.sidecar.grace_s))


@main.command()
@CONFIG
@DATA
def shadow(config_path: Path, data: Path | None) -> None:
    """Replay captured exchanges through the FP32 reference and store comparisons.

    Run as many as there is traffic: they share the stream. SIGTERM finishes the batch in hand.

    \b
    Example:
      QUANTDRIFT_DSN=postgresql://... quantdrift shadow -c config.toml
    """
    from quantdrift.core.process import run
    from shadow.worker import serve

    config, secrets = _role(config_path, Role.SHADOW, data)
    sys.exit(run(lambda stop: serve(config, secrets, stop), grace_s=config.shadow.grace_s))


@main.command()
@CONFIG
@DATA
def monitor(config_path: Path, data: Path | None) -> None:
    """Fold comparisons into detectors, own the alerts, send them by OpenTelemetry.

    One leads; others started beside it stand by and take over.

    \b
    Example:
      QUANTDRIFT_DSN=postgresql://... quantdrift monitor -c config.toml
    """
    from quantdrift.core.process import run
    from quantdrift.monitor.worker import serve

    config, secrets = _role(config_path, Role.MONITOR, data)
    sys.exit(run(lambda stop: serve(config, secrets, stop), grace_s=config.monitor.grace_s))


@main.command()
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
    one. What dies is started again. SIGTERM or Ctrl-C ends all in order.

    \b
    Example:
      quantdrift up -c config.toml --data /var/lib/quantdrift
    """
    from quantdrift.core.process import run
    from quantdrift.up import serve

    config = load(config_path)
    setup_logs(config.telemetry.log_level, as_json=config.telemetry.log_json, role="up")
    grace_s = config.sidecar.grace_s + config.shadow.grace_s + config.monitor.grace_s + 10
    sys.exit(run(lambda stop: serve(config_path, config, data, only, stop), grace_s=grace_s))


@main.command()
@CONFIG
@DATA
@click.option("--week", is_flag=True, help="The last seven days (the default).")
@click.option("--day", is_flag=True, help="The last 24 hours.")
@click.option("--from", "from_at", type=click.DateTime(), help="Begin, UTC.")
@click.option("--to", "to_at", type=click.DateTime(), help="End, UTC, exclusive; now if left out.")
@click.option("--model", default="", help="Only this model; all of them if left out.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="File to write; else a dated one in report.directory."
)
@JSON
def report(
    config_path: Path,
    data: Path | None,
    week: bool,
    day: bool,
    from_at: datetime | None,
    to_at: datetime | None,
    model: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Write one self-contained HTML file: what fired, the worst slices, trends, coverage and losses.

    \b
    Examples:
      quantdrift report --week --data .quantdrift
      quantdrift report --from 2026-01-01 --to 2026-02-01 --out january.html --json
    """
    import asyncio

    from quantdrift.report.page import Period, write

    if sum([week, day, from_at is not None]) > 1:
        raise OperatorError("give one of --week, --day and --from")
    config, secrets = _role(config_path, Role.REPORT, data)
    end = (to_at or datetime.now(UTC)).replace(tzinfo=UTC)
    period = Period.of(
        kind="day" if day else "range" if from_at else "week",
        end=end,
        start=from_at.replace(tzinfo=UTC) if from_at else None,
    )
    with Steps(quiet=as_json) as step:
        figures = asyncio.run(write(config, secrets, period, out=out, progress=step, model=model))
    if as_json:
        _emit(figures)
    else:
        click.echo(figures.summary())


@main.group()
def db() -> None:
    """Prepare and inspect the Postgres database."""


@db.command("upgrade")
@CONFIG
@DATA
@JSON
def db_upgrade(config_path: Path, data: Path | None, as_json: bool) -> None:
    """Bring the schema to this version and make partitions ahead. Safe to run again, or twice at once.

    \b
    Example:
      QUANTDRIFT_DSN=postgresql://... quantdrift db upgrade
    """
    import asyncio

    from storage.migrate import head, upgrade

    config, secrets = _role(config_path, Role.MIGRATE, data)
    with Steps(quiet=as_json) as step:
        applied = asyncio.run(upgrade(secrets.dsn, config.storage, progress=step))
    if as_json:
        _emit({"applied": applied, "head": head()})
    else:
        click.echo(f"schema is at {head()} ({len(applied)} revisions applied)")


@db.command("roles")
@CONFIG
@DATA
@click.option("--apply", "apply_", is_flag=True, help="Run the statements instead of printing them.")
def db_roles(config_path: Path, data: Path | None, apply_: bool) -> None:
    """Print (or apply) SQL roles with the least privileges each process needs, and a reader for people.

    \b
    Example:
      quantdrift db roles | psql "$QUANTDRIFT_DSN"
    """
    import asyncio

    from storage.roles import apply, statements

    if not apply_:
        click.echo("\n".join(f"{statement};" for statement in statements()))
        return
    _, secrets = _role(config_path, Role.MIGRATE, data)
    asyncio.run(apply(secrets.dsn))
    click.echo("roles applied")


@main.group("config")
def config_() -> None:
    """Check, explain and document the configuration."""


@config_.command("check")
@CONFIG
@click.option("--requests-per-s", type=float, help="Inference traffic of one pod, to expect a replay rate.")
@click.option(
    "--references", is_flag=True, help="Open each reference and check that it is FP32, as the shadow will."
)
@JSON
def config_check(config_path: Path, requests_per_s: float | None, references: bool, as_json: bool) -> None:
    """Say whether the configuration is sound and what it would do.

    Exit code 2 if it is not: every contradiction is listed at once.

    \b
    Example:
      quantdrift config check --requests-per-s 300 --references
    """
    from quantdrift.core.config.explain import explain

    config = load(config_path)
    explanation = explain(config, requests_per_s)
    missing = [
        f"reference file {path} of model `{model.name}` does not exist here (the shadow needs it)"
        for model in explanation.models
        for path in model.references.values()
        if not Path(path).is_file()
    ]
    explanation = msgspec.structs.replace(explanation, notes=explanation.notes + missing)
    if references:
        from shadow.onnx_runtime import inspect

        found = [
            inspect(Path(reference.path), reference.allow_reduced_precision)
            for model in config.models
            for reference in model.references
        ]
        checked = {one.path: f"{one.precision}, opset {one.opset}, sha256 {one.digest}" for one in found}
        explanation = msgspec.structs.replace(explanation, checked=checked)
    if as_json:
        _emit(explanation)
    else:
        click.echo(explained(explanation, config_path))


@config_.command("show")
@CONFIG
@click.option("--defaults", is_flag=True, help="The annotated defaults instead of what is in force.")
def config_show(config_path: Path, defaults: bool) -> None:
    """Print the configuration in force as JSON, or the annotated defaults as TOML."""
    from quantdrift.core.config.render import default_toml

    if defaults:
        click.echo(default_toml(), nl=False)
    else:
        config = load(config_path)
        stream = msgspec.structs.replace(config.stream, url=config.stream.address)
        _emit(msgspec.structs.replace(config, stream=stream))


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the shell's completion script.

    \b
    Example:
      quantdrift completion bash > ~/.local/share/bash-completion/completions/quantdrift
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise OperatorError(f"no completion for {shell}")
    click.echo(kind(main, {}, "quantdrift", "_QUANTDRIFT_COMPLETE").source())
