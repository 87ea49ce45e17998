"""The commands `quantdrift pause` and `quantdrift resume`."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import click

from quantdrift.cli.embedded_nats import at_data
from quantdrift.cli.options import CONFIG, JSON, emit, span_of, user_name
from quantdrift.core.config.load import load
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import OperatorError
from quantdrift.core.sampling.pause import KEY, Order, Pause, PauseError, decode, encode

_MODEL = click.option("--model", help="Only this model, as named in [[models]].")
_NATS = click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="QUANTDRIFT_DATA",
    help="Data directory of a running `quantdrift up`; the command uses its NATS.",
)


@click.command("pause")
@CONFIG
@_NATS
@_MODEL
@click.option(
    "--for", "span", help="Duration, after which sampling resumes: 30m, 2h, 1d.  [default: until resumed]"
)
@click.option("--reason", default="", help="Reason; --show prints it.")
@click.option("--by", default=user_name, help="Name of the person who pauses.  [default: the user]")
@click.option("--show", is_flag=True, help="Change nothing; show what is paused.")
@JSON
def pause(
    config_path: Path,
    *,
    data: Path | None,
    model: str | None,
    span: str | None,
    reason: str,
    by: str,
    show: bool,
    as_json: bool,
) -> None:
    """Pause sampling in the whole fleet, for all models or for one.

    Sidecars stop sampling within five seconds; they keep relaying and counting requests. A sidecar that cannot reach
    NATS does not notice the pause: send POST /pause to its admin port from inside the pod, or use sidecar.pause_file.

    \b
    Example:
      quantdrift pause --for 2h --reason "load test"
      quantdrift pause --model digits
      quantdrift resume
    """
    config = at_data(load(config_path), data)
    if show:
        _print_pause(_change(config, None), as_json=as_json)
        return
    _check(config, model)
    now = datetime.now(UTC)
    order = Order(by=by, at=now, until=None if span is None else now + span_of("--for", span), reason=reason)
    _print_pause(_change(config, lambda current: current.at(now).paused(order, model)), as_json=as_json)


@click.command("resume")
@CONFIG
@_NATS
@_MODEL
@JSON
def resume(config_path: Path, *, data: Path | None, model: str | None, as_json: bool) -> None:
    """Resume sampling, of everything or of one model that was paused by name.

    It does not end a pause that was set at one sidecar, by its admin port or its pause_file.

    \b
    Example:
      quantdrift resume --model digits
    """
    config = at_data(load(config_path), data)
    now = datetime.now(UTC)

    def change(current: Pause) -> Pause:
        current = current.at(now)
        if model is not None and model not in current.models:
            also = "; all models are paused" if current.everything is not None else ""
            raise OperatorError(f"`{model}` is not paused by name{also}")
        return current.resumed(model)

    _print_pause(_change(config, change), as_json=as_json)


def _change(config: Config, change: Callable[[Pause], Pause] | None) -> Pause:
    import asyncio

    from quantdrift.core.stream.connection import Queue
    from quantdrift.core.stream.keyvalue import KeyValue
    from quantdrift.core.stream.rights import NatsRole

    async def run() -> Pause:
        queue = await Queue.connect(config.stream, client_name="quantdrift-pause", role=NatsRole.OPERATOR)
        try:
            bucket = KeyValue(queue, config.stream, purpose=KEY)
            entry = await bucket.get(KEY)
            try:
                current = Pause() if entry is None else decode(entry.value)
            except PauseError:
                current = Pause()
            if change is None:
                return current.at(datetime.now(UTC))
            try:
                changed = change(current)
            except PauseError as error:
                raise OperatorError(str(error)) from error
            await bucket.put(KEY, encode(changed))
            return changed
        finally:
            await queue.close()

    return asyncio.run(run())


def _print_pause(current: Pause, *, as_json: bool) -> None:
    if as_json:
        emit(current)
        return
    orders = ([("everything", current.everything)] if current.everything is not None else []) + sorted(
        current.models.items()
    )
    if not orders:
        click.echo("Nothing is paused; sidecars follow within five seconds.")
        return
    from quantdrift.cli.output import columns

    rows = [
        (
            name,
            order.by,
            f"{order.at:%Y-%m-%d %H:%M} UTC",
            "resumed" if order.until is None else f"{order.until:%Y-%m-%d %H:%M} UTC",
            order.reason,
        )
        for name, order in orders
    ]
    click.echo(columns(("paused", "by", "since", "until", "reason"), rows))


def _check(config: Config, model: str | None) -> None:
    if model is None or config.model(model) is not None:
        return
    names = ", ".join(model.name for model in config.models) or "none"
    raise OperatorError(f"there is no model `{model}` in the configuration; known are: {names}")
