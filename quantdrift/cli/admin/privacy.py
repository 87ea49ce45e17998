"""The command `quantdrift privacy`: what is stored of a person or an exchange, and its erasure."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.cli.output import Steps
from quantdrift.core.clock import Clock, SystemClock
from quantdrift.core.config.load import Role, hmac_key
from quantdrift.core.data_directory import at_data
from quantdrift.core.errors import OperatorError, QuarantineError, RetryError
from quantdrift.core.keys import KeyRing, is_key_file, load_keys, read_keys
from quantdrift.core.records import Metric, Side, Verdict
from quantdrift.core.sealing import envelope_of, is_sealed, unseal
from quantdrift.core.slices import attribute_key
from quantdrift.core.stream.rights import NatsRole
from quantdrift.core.text import columns, plain

if TYPE_CHECKING:
    from quantdrift.core.config.schema import Config
    from quantdrift.core.stream.connection import Queue
    from quantdrift.storage.privacy import Search, StoredPlace, WantedData

_SETTLE_S: Final = 60.0
"""Longest wait for the workers to store what they have in hand, and for the monitor to end the slices of a value."""
_POLL_S: Final = 0.2
_SENT_S: Final = 1.0  # what was sent at the last moment arrives within it
_HEX_ID: Final = re.compile(r"[0-9a-f]{32}")
_ATTRIBUTE: Final = re.compile(r"(header|parameter|json|text)\..+", re.DOTALL)
_NOT_SEARCHED: Final = (
    "files of reports, and copies of them",
    "backups of Postgres and of NATS",
    "events that the collector has already received, and whoever it sent them to",
    "logs and traces of the services themselves",
)


@click.group()
def privacy() -> None:
    """Find and erase what is stored of a person or of an exchange.

    KEY says what VALUE is: `exchange` (the id of an exchange), `trace` (the id of a production trace), a recorded attribute
    such as `header.x-request-id`, or `any` for all attributes. Give the value as the client sent it: of an attribute in
    capture.hmac the command computes the hash. With `-` as VALUE it reads one line from standard input, so that the value
    is not in the history of the shell.

    Needs the owner of the schema at Postgres, and the administrator of NATS.
    """


@privacy.command("find")
@CONFIG
@DATA
@click.argument("key")
@click.argument("value")
@JSON
def find(config_path: Path, data: Path | None, key: str, value: str, as_json: bool) -> None:
    """Show in which tables and streams something is stored: how many rows, and from when. No content is shown.

    \b
    Examples:
      quantdrift privacy find header.x-request-id 3f0c9c1e
      quantdrift privacy find header.x-user - < value.txt
    """
    task = _prepared(config_path, data, key, value)
    with Steps(quiet=as_json) as step:
        stored = asyncio.run(_find(task, step))
    _show(stored, key, as_json=as_json)


@privacy.command("erase")
@CONFIG
@DATA
@click.argument("key")
@click.argument("value")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--reason", default="", help="Reason; it is stored in the audit for ever: name no person and no value."
)
@JSON
def erase(
    config_path: Path, *, data: Path | None, key: str, value: str, yes: bool, reason: str, as_json: bool
) -> None:
    """Erase what `find` shows: waiting exchanges first, then all tables, then a second time what came meanwhile.

    Rows of the exchanges are deleted. In other texts a random word takes the place of the value and of the ids. Sums and
    evidence that were folded stay as they are: they contain no value. Running it again is safe, and finds what was stored
    since.

    \b
    Examples:
      quantdrift privacy erase header.x-request-id 3f0c9c1e
      quantdrift privacy erase header.x-user - --yes --reason "ticket 4711" < value.txt
    """
    if value == "-" and not yes:
        raise OperatorError(
            "with the value on standard input nobody can be asked: look with `find` first, and give --yes"
        )
    task = _prepared(config_path, data, key, value)
    _check_not_declared(task.config, task.wanted)
    if any(form in reason for form in task.wanted.values):
        raise OperatorError("--reason contains the value, and the audit would keep it for ever: leave it out")
    with Steps(quiet=as_json) as step:
        stored = asyncio.run(_find(task, step))
    if not stored.places:
        _show(stored, key, as_json=as_json, done=True)
        return
    if not yes:
        click.echo(_table(stored.places), err=as_json)
        click.confirm("Erase all of it? This cannot be undone.", abort=True, err=as_json)
    with Steps(quiet=as_json) as step:
        erased = asyncio.run(_erase(task, stored.places, reason, step, SystemClock()))
    _show(erased._replace(files=sorted({*stored.files, *erased.files})), key, as_json=as_json, done=True)
    if erased.left:
        raise RetryError(
            f"{', '.join(erased.left)} may still have, or store again, something of it: run the command again in a few"
            " minutes"
        )


class _Task(NamedTuple):
    config: Config
    dsn: str
    wanted: WantedData


class _FoundPlaces(NamedTuple):
    """Places, files of reports, and places that were not finished."""

    places: list[StoredPlace]
    files: list[str]
    left: Sequence[str] = ()


def _prepared(config_path: Path, data: Path | None, key: str, value: str) -> _Task:
    config, secrets = prepare(config_path, Role.MIGRATE, data)
    if value == "-":
        value = sys.stdin.readline().rstrip("\r\n")
    return _Task(at_data(config, data, NatsRole.ADMIN), secrets.dsn, wanted_of(config, key, value))


def wanted_of(config: Config, key: str, value: str) -> WantedData:
    """Return what is searched: each form in which the value may be stored.

    Raises
    ------
    OperatorError
        The key is unknown, the value is empty or no id, or the HMAC key is missing.
    """
    from quantdrift.core.config.strata import MAX_VALUE_BYTES
    from quantdrift.sidecar.capture.attributes import cut, every_hash
    from quantdrift.storage.privacy import ANY, EXCHANGE, TRACE, WantedData

    if key in {EXCHANGE, TRACE}:
        id_text = value.strip().lower().replace("-", "") if key == EXCHANGE else _trace_id(value)
        if not _HEX_ID.fullmatch(id_text):
            raise OperatorError(f"this is no id of an {key}: give 32 hexadecimal digits")
        return WantedData(key=key, values=(id_text,))
    if key != ANY and not _ATTRIBUTE.fullmatch(key):
        raise OperatorError(
            f"`{key}` is unknown: give exchange, trace, any, or a recorded attribute such as header.x-user,"
            " parameter.NAME, json.PATH or text.NAME"
        )
    shown = cut(value, MAX_VALUE_BYTES)
    if not shown:
        raise OperatorError("the value is empty")
    sticky = config.sampling.sticky_header
    is_group = bool(sticky) and key in {ANY, f"header.{sticky.lower()}", f"header.{sticky}"}
    is_hashed = key in config.capture.hashed or (key == ANY and bool(config.capture.hashed))
    secret = hmac_key(config) if is_hashed or is_group else b""
    if is_hashed and not secret:
        raise OperatorError(
            f"`{key}` is stored as a hash: set QUANTDRIFT_HMAC_KEY or capture.hmac_key_file to the key of the sidecars"
        )
    ring = None
    if is_key_file(secret):
        secret, ring = b"", read_keys(secret, "capture.hmac_key_file", config.capture.hmac_key_file)
    hashes = every_hash(value, secret, ring)
    of_groups = hashes or every_hash(value, os.environ.get("QUANTDRIFT_SAMPLING_SALT", "").encode())
    return WantedData(
        key=key,
        values=(shown, *hashes) if is_hashed else (shown,),
        groups=of_groups if is_group else (),
    )


class _Opener:
    """Decrypts messages, and counts those whose key is missing.

    Parameters
    ----------
    config
        `stream.payload_key_file` has the keys.
    """

    def __init__(self, config: Config) -> None:
        file = config.stream.payload_key_file
        self._ring = load_keys(file, "stream.payload_key_file") if file else KeyRing(keys=())
        self.n_closed = 0

    def __call__(self, message: bytes) -> bytes:
        """Return a message without its encryption."""
        if not is_sealed(message):
            return message
        try:
            return unseal(message, self._ring, envelope_of(message).model)
        except QuarantineError:
            self.n_closed += 1
            raise

    def check(self) -> None:
        """Refuse to go on if something could not be searched."""
        if self.n_closed:
            raise OperatorError(
                f"{self.n_closed} encrypted exchanges cannot be searched: give the file with their keys in"
                " stream.payload_key_file, as the shadow has it. If a key is gone, `quantdrift exemplars erase` erases all exemplars, also"
                " those that nobody can read any more"
            )


def _trace_id(value: str) -> str:
    parts = value.strip().lower().split("-")
    return parts[1] if len(parts) == 4 else parts[0]


def _check_not_declared(config: Config, wanted: WantedData) -> None:
    words = {*Metric, *Verdict, *Side, *(model.name for model in config.models)}
    if wanted.is_value and words & set(wanted.values):
        raise OperatorError(
            "the value is a word that the tables use themselves, such as the name of a model: erase by another key, such"
            " as a request id"
        )
    for rule in config.slices:
        if set(wanted.values) & set(rule.values) and wanted.key in {attribute_key(rule), "any"}:
            raise OperatorError(
                f"the value is in `values` of the slice `{rule.name}` in the configuration, so it belongs to no person:"
                " take it out there first, or erase by another key"
            )


async def _find(task: _Task, step: Callable[[str], None]) -> _FoundPlaces:
    from quantdrift.core.stream.connection import Queue
    from quantdrift.storage.database import Database
    from quantdrift.storage.privacy import STATEMENT_TIMEOUT_S, Search
    from quantdrift.storage.schema.unknown import refuse_unknown

    opened = _Opener(task.config)
    queue = await Queue.connect(task.config.stream, client_name="quantdrift privacy", role=NatsRole.ADMIN)
    try:
        async with Database(task.dsn, statement_timeout_s=STATEMENT_TIMEOUT_S) as database:
            async with database.begin() as connection:
                await refuse_unknown(connection)
            search = Search(database, task.wanted, opened=opened, progress=step)
            places = await _pass(queue, search, step, erase=False)
    finally:
        await queue.close()
    opened.check()
    return _FoundPlaces(places, sorted(search.files))


async def _erase(
    task: _Task, found: list[StoredPlace], reason: str, step: Callable[[str], None], clock: Clock
) -> _FoundPlaces:
    """Erase twice: what workers had in hand, and what the monitor wrote about a slice that ended, comes in between."""
    from quantdrift.core.stream.config import LONGEST_S
    from quantdrift.core.stream.connection import Queue
    from quantdrift.core.stream.search import has_exemplars, wait_for_workers
    from quantdrift.storage.audit import Action, add
    from quantdrift.storage.database import Database
    from quantdrift.storage.privacy import STATEMENT_TIMEOUT_S, Search, slices_wait
    from quantdrift.storage.schema.unknown import refuse_unknown

    async def note(database: Database, **state: Any) -> None:
        async with database.begin() as connection:
            await add(connection, Action.PRIVACY_ERASE, subject=task.wanted.key, note=reason, **state)

    async def applied(database: Database) -> bool:
        async with asyncio.timeout(_SETTLE_S):
            while True:
                async with database.begin() as connection:
                    if not await slices_wait(connection):
                        return True
                await asyncio.sleep(_POLL_S)

    opened = _Opener(task.config)
    queue = await Queue.connect(task.config.stream, client_name="quantdrift privacy", role=NatsRole.ADMIN)
    try:
        async with Database(task.dsn, statement_timeout_s=STATEMENT_TIMEOUT_S) as database:
            async with database.begin() as connection:
                await refuse_unknown(connection)
            search = Search(database, task.wanted, opened=opened, progress=step)
            # Nothing is erased without an entry, also if this process ends before the second one.
            await note(database, before={store.place: store.n for store in found}, after={"status": "begun"})
            erased = await _pass(queue, search, step, erase=True)
            left = []
            step("waiting for the shadow workers")
            if not await wait_for_workers(queue, _SETTLE_S):
                left.append("shadow workers")
            exemplars_until_s = clock.monotonic_s() + LONGEST_S + _SENT_S
            step("waiting for the monitor")
            try:
                await applied(database)
            except TimeoutError:
                left.append("the monitor")
            if any(model.exemplars for model in task.config.models) or await has_exemplars(queue):
                step("waiting for exemplars that the shadow workers still store")
                while clock.monotonic_s() < exemplars_until_s:  # noqa: ASYNC110 - a clock has no event
                    await asyncio.sleep(_POLL_S)
            erased = _sum(erased, await _pass(queue, search, step, erase=True))
            remaining = await _pass(queue, search, step, erase=False)
            left += [store.place for store in remaining]
            await note(
                database,
                after={"status": "erased", **{store.place: store.n for store in erased}, "left": left},
            )
    finally:
        await queue.close()
    return _FoundPlaces(erased, sorted(search.files), left)


async def _pass(
    queue: Queue, search: Search, step: Callable[[str], None], *, erase: bool
) -> list[StoredPlace]:
    """Search the streams and then the tables: what is deleted from the stream no worker can store later."""
    from quantdrift.core.stream.search import search_stream
    from quantdrift.storage.privacy import StoredPlace

    step("searching the stream")
    waiting = await search_stream(queue, search.is_one, delete=erase, progress=step)
    step("searching the exemplars")
    kept = await search_stream(queue, search.is_exemplar, delete=erase, progress=step, kind="exemplar")
    streams = [
        StoredPlace(place=store, n=matches.n, first_at=matches.first_at, last_at=matches.last_at)
        for store, matches in (("stream", waiting), ("exemplars", kept))
    ]
    return [*(store for store in streams if store.n), *await search.run(erase=erase)]


def _sum(first: list[StoredPlace], second: list[StoredPlace]) -> list[StoredPlace]:
    from quantdrift.storage.privacy import added

    places = {store.place: store for store in first}
    for store in second:
        places[store.place] = added(places[store.place], store) if store.place in places else store
    return list(places.values())


def _show(found: _FoundPlaces, key: str, *, as_json: bool, done: bool = False) -> None:
    if as_json:
        emit(
            {
                "key": key,
                "erased" if done else "found": found.places,
                "report_files": found.files,
                "not_searched": _NOT_SEARCHED,
                **({"left": found.left} if done else {}),
            }
        )
        return
    if found.places:
        click.echo(_table(found.places))
    else:
        click.echo("Nothing is stored of it in the stream and in the tables.")
    click.echo()
    for path in found.files:
        click.echo(f"A report shows it, and its file stays: {plain(path)}")
    click.echo("Not searched, because the command cannot reach them:")
    for unsearched in _NOT_SEARCHED:
        click.echo(f"  - {unsearched}")


def _table(places: list[StoredPlace]) -> str:
    rows = ((store.place, str(store.n), _time(store.first_at), _time(store.last_at)) for store in places)
    return columns(("place", "rows", "oldest (UTC)", "newest (UTC)"), rows)


def _time(at: datetime | None) -> str:
    return "-" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M}"
