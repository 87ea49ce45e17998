"""The commands `quantdrift pause` and `quantdrift resume`."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

import click
import msgspec

from quantdrift.cli.options import CONFIG, JSON, REASON, audit_dsn, data_option, emit, span_of
from quantdrift.core.config.address import Address, read_address
from quantdrift.core.config.load import load
from quantdrift.core.config.schema import Config, Stream
from quantdrift.core.data_directory import at_data
from quantdrift.core.errors import OperatorError, RetryError, os_error_text
from quantdrift.core.sampling.pause import KEY, LocalPause, Order, Pause, PauseError, decode, encode
from quantdrift.core.text import plain

if TYPE_CHECKING:
    from quantdrift.core.stream.keyvalue import KeyValue

_LOCAL_S: Final = 10.0
_AUDIT_S: Final = 5.0
"""Longest wait for Postgres; then the pause takes effect without an entry of this command."""
_SEED: Final = re.compile(rb"SU[A-Z2-7]{56}")
_LOCAL = click.option(
    "--local",
    is_flag=True,
    help="Only the sidecar in this container or on this host, without NATS: run it there, as the user of the sidecar.",
)
_MODEL = click.option("--model", help="Only this model, as named in [[models]].")
_NATS = data_option("NATS")


@click.command("pause")
@CONFIG
@_NATS
@_MODEL
@_LOCAL
@click.option(
    "--for", "span", help="Duration, after which sampling resumes: 30m, 2h, 1d.  [default: until resumed]"
)
@click.option("--reason", default="", help="Reason; --show and the audit have it.")
@click.option("--show", is_flag=True, help="Change nothing; show what is paused.")
@JSON
def pause(
    config_path: Path,
    *,
    data: Path | None,
    model: str | None,
    local: bool,
    span: str | None,
    reason: str,
    show: bool,
    as_json: bool,
) -> None:
    """Pause sampling in the whole fleet, for all models or for one.

    Sidecars stop sampling within five seconds; they keep relaying and counting requests. A sidecar that cannot reach
    NATS does not notice the pause: give --local in its container, or use sidecar.pause_file. The monitor adds an entry to the audit
    about a local pause that a sidecar reports.

    The entry in the audit is written with your own user of Postgres (QUANTDRIFT_DSN, storage.dsn_file or --data). Without
    Postgres the pause takes effect as well; the monitor adds an entry about what it sees in NATS.

    \b
    Example:
      quantdrift pause --for 2h --reason "load test"
      quantdrift pause --model digits
      quantdrift resume
      quantdrift pause --local --reason "NATS is away"
    """
    config = load(config_path)
    now = datetime.now(UTC)
    until = None if span is None else now + span_of("--for", span)
    if local:
        if not show:
            _check(config, model)
        asked = None if show else LocalPause(model=model or "", until=until, reason=reason)
        _print_pause(_asked_here(config, "/pause", asked), as_json=as_json)
        return
    config = at_data(config, data)
    if show:
        _print_pause(_shown(config), as_json=as_json)
        return
    _check(config, model)

    def change(current: Pause, by: str) -> Pause:
        return current.at(now).paused(Order(by=by, at=now, until=until, reason=reason), model)

    changed = _changed(config, data, _Change(change, is_resume=False, model=model or "", note=reason))
    _print_pause(changed, as_json=as_json)


@click.command("resume")
@CONFIG
@_NATS
@_MODEL
@_LOCAL
@REASON
@JSON
def resume(
    config_path: Path, *, data: Path | None, model: str | None, local: bool, reason: str, as_json: bool
) -> None:
    """Resume sampling, of everything or of one model that was paused by name.

    It does not end a pause that was set at one sidecar: with --local it ends the one of that sidecar, but not a pause_file.

    \b
    Example:
      quantdrift resume --model digits
    """
    config = load(config_path)
    if local:
        asked = LocalPause(model=model or "")
        _print_pause(_asked_here(config, "/resume", asked), as_json=as_json)
        return
    config = at_data(config, data)
    now = datetime.now(UTC)

    def change(current: Pause, _by: str) -> Pause:
        current = current.at(now)
        if model is not None and model not in current.models:
            also = "; all models are paused" if current.everything is not None else ""
            raise OperatorError(f"`{model}` is not paused by name{also}")
        return current.resumed(model)

    changed = _changed(config, data, _Change(change, is_resume=True, model=model or "", note=reason))
    _print_pause(changed, as_json=as_json)


class _Change(NamedTuple):
    """A change of what is paused.

    Parameters
    ----------
    apply
        Returns the new state, from the former one and who changes it.
    is_resume
        Whether it ends a pause.
    model
        Model, or empty.
    note
        Reason.
    """

    apply: Callable[[Pause, str], Pause]
    is_resume: bool
    model: str
    note: str


def _shown(config: Config) -> Pause:
    async def run() -> Pause:
        async with _bucket(config) as bucket:
            return (await _current(bucket)).at(datetime.now(UTC))

    return asyncio.run(run())


def _asked_here(config: Config, path: str, asked: LocalPause | None) -> Pause:
    """Ask the sidecar of this host through its Unix socket, and return what is paused there; None: only show it."""
    import aiohttp

    admin = read_address(config.sidecar.admin).dialled
    timeout = aiohttp.ClientTimeout(total=_LOCAL_S)

    async def answer(method: str, url: str, connector: aiohttp.BaseConnector | None = None) -> _Here:
        body = None if asked is None or connector is None else msgspec.json.encode(asked)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            session.request(method, url, data=body) as response,
        ):
            return msgspec.json.decode(await response.read(), type=_Here)

    async def run() -> _Here:
        here = await answer("GET", f"http://{admin}/pause")
        _check_socket(here.socket, admin)
        method = "GET" if asked is None else "POST"
        return await answer(method, f"http://sidecar{path}", aiohttp.UnixConnector(here.socket))

    try:
        here = asyncio.run(run())
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
        raise RetryError(
            f"no sidecar answers at {admin} (sidecar.admin): run this in its container, or on its host"
        ) from error
    if here.error:
        raise OperatorError(here.error)
    return here.here


def _check_socket(socket: str, admin: Address) -> None:
    path = Path(socket)
    if path.parent.is_dir() and not os.access(path, os.W_OK):
        raise OperatorError(f"the sidecar at {admin} belongs to another user: run this as that user")
    if not path.is_socket():
        raise OperatorError(
            f"the sidecar at {admin} runs in another container: run this in it, such as by `kubectl exec POD -c quantdrift -- ...`"
        )


class _Here(msgspec.Struct, frozen=True):
    """What a sidecar says of its own pauses."""

    here: Pause = Pause()
    socket: str = ""
    error: str = ""


def _changed(config: Config, data: Path | None, change: _Change) -> Pause:
    dsn = audit_dsn(config, data)

    async def run() -> Pause:
        async with _bucket(config) as bucket:
            current = await _current(bucket)
            try:
                unaudited = change.apply(current, _nats_user(config.stream))
            except PauseError as error:
                raise OperatorError(str(error)) from error
            if dsn and (changed := await _put_audited(dsn, bucket, current, change)) is not None:
                return changed
            if not dsn:
                _not_audited("there is no Postgres address")
            await bucket.put(KEY, encode(unaudited))
            return unaudited

    return asyncio.run(run())


async def _put_audited(dsn: str, bucket: "KeyValue", current: Pause, change: _Change) -> Pause | None:
    """Put the new state with its entry in the audit, and return it; None: Postgres takes no entry, and nothing was put.

    An emergency does not wait for Postgres: the monitor adds an entry for what it sees without one.
    """
    from quantdrift.storage.audit import Action, add, who
    from quantdrift.storage.database import Database

    stored: Pause | None = None
    is_written = False
    try:
        async with (
            asyncio.timeout(_AUDIT_S) as limit,
            Database(dsn) as database,
            database.begin() as connection,
        ):
            changed = change.apply(current, await who(connection))
            number = await add(
                connection,
                Action.RESUME if change.is_resume else Action.PAUSE,
                model=change.model,
                before=current.state(),
                after=changed.state(),
                note=change.note,
            )
            limit.reschedule(None)
            is_written = True
            changed = msgspec.structs.replace(changed, audit=number)
            await bucket.put(KEY, encode(changed))
            stored = changed
    except (RetryError, OperatorError, TimeoutError) as error:
        if is_written and stored is None:
            raise  # NATS did not take it
        _not_audited(str(error) or f"Postgres does not answer within {_AUDIT_S:g} s")
    return stored


def _not_audited(why: str) -> None:
    click.echo(
        f"warning: this command writes no entry into the audit: {plain(why)}. The monitor adds one about what it sees in NATS",
        err=True,
    )


def _nats_user(stream: Stream) -> str:
    """Return the user of our credentials at NATS: the public key, or the name in the address."""
    user = urlsplit(stream.url).username or ""
    if stream.credentials_file:
        import nkeys

        try:
            seed = _SEED.search(Path(stream.credentials_file).read_bytes())
        except OSError as error:
            raise OperatorError(
                f"stream.credentials_file {stream.credentials_file}: {os_error_text(error)}"
            ) from error
        if seed is not None:
            user = nkeys.from_seed(bytearray(seed[0])).public_key.decode()
    return f"NATS user {user}" if user else "a user of NATS"


@asynccontextmanager
async def _bucket(config: Config) -> "AsyncIterator[KeyValue]":
    from quantdrift.core.stream.connection import Queue
    from quantdrift.core.stream.keyvalue import KeyValue
    from quantdrift.core.stream.rights import NatsRole

    queue = await Queue.connect(config.stream, client_name="quantdrift-pause", role=NatsRole.OPERATOR)
    try:
        yield KeyValue(queue, config.stream, purpose=KEY)
    finally:
        await queue.close()


async def _current(bucket: "KeyValue") -> Pause:
    entry = await bucket.get(KEY)
    try:
        return Pause() if entry is None else decode(entry.value)
    except PauseError:
        return Pause()


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
    from quantdrift.core.text import columns

    rows = [
        (
            plain(name),
            plain(order.by),
            f"{order.at:%Y-%m-%d %H:%M} UTC",
            "resumed" if order.until is None else f"{order.until:%Y-%m-%d %H:%M} UTC",
            plain(order.reason),
        )
        for name, order in orders
    ]
    click.echo(columns(("paused", "by", "since", "until", "reason"), rows))


def _check(config: Config, model: str | None) -> None:
    if model is None or config.model(model) is not None:
        return
    names = ", ".join(model.name for model in config.models) or "none"
    raise OperatorError(f"there is no model `{model}` in the configuration; known are: {names}")
