"""The command `quantdrift exemplars`: the exchanges that are kept with their payload."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from quantdrift.cli.options import CONFIG, JSON, REASON, audit_dsn, data_option, emit
from quantdrift.cli.output import Steps
from quantdrift.core.config.load import load
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.data_directory import at_data
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Exemplar, ExemplarKind, Tensor
from quantdrift.core.said_tokens import divergent_tokens
from quantdrift.core.stream.config import EXEMPLAR_AGE_S, EXEMPLARS_EACH
from quantdrift.core.stream.rights import NatsRole
from quantdrift.core.text import columns, plain

if TYPE_CHECKING:
    from quantdrift.core.stream.connection import Queue
    from quantdrift.core.stream.exemplars import KeptExemplar

_DAY_S: Final = 86_400
_LEAST_SHOWN: Final = 0.0005
_FULL: Final = 0.9  # of the limit: a full stream has room for less than one message more
_NATS: Final = data_option("NATS and its Postgres")
_MODEL: Final = click.option("--model", default="", help="Only exemplars of this model.")
_SLICE: Final = click.option(
    "--slice", "slice_name", default="", help="Only exemplars of this slice, such as scanner=archive."
)
_KIND: Final = click.option(
    "--kind", type=click.Choice([kind.value for kind in ExemplarKind]), default=None, help="Only this kind."
)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The exemplars of one kind of one slice; `bytes` is the sum of their payloads."""

    model: str
    slice: str
    kind: ExemplarKind
    count: int
    oldest: datetime
    newest: datetime
    bytes: int


@click.group()
def exemplars() -> None:
    """Show and erase exemplars: exchanges that are kept with their payload for diagnoses and repairs.

    With `models.exemplars = true` a shadow keeps up to 64 damaged and 64 random exchanges of each slice in a stream at NATS, for 7 days at
    most.
    """


@exemplars.command("list")
@CONFIG
@_NATS
@_MODEL
@_SLICE
@JSON
def list_(config_path: Path, data: Path | None, model: str, slice_name: str, *, as_json: bool) -> None:
    """Show how many exemplars are kept of each slice, from when, and how large they are. No payload is read.

    Needs the key of a shadow at NATS.

    \b
    Example:
      quantdrift exemplars list --model digits
    """
    config = at_data(load(config_path), data, NatsRole.SHADOW)
    groups = _grouped(asyncio.run(_kept(config, NatsRole.SHADOW, model, slice_name, None)))
    if as_json:
        emit(
            {
                "exemplars": groups,
                "limits": {
                    "each": EXEMPLARS_EACH,
                    "days": EXEMPLAR_AGE_S / _DAY_S,
                    "bytes": config.stream.exemplar_bytes,
                },
                "models": [entry.name for entry in config.models if entry.exemplars],
            }
        )
        return
    if not groups:
        click.echo(_nothing(config, model, slice_name))
        return
    head = ("model", "slice", "kind", "count", "oldest (UTC)", "newest (UTC)", "kB")
    click.echo(
        columns(
            head,
            (
                (
                    plain(entry.model),
                    plain(entry.slice),
                    entry.kind.value,
                    str(entry.count),
                    _time(entry.oldest),
                    _time(entry.newest),
                    f"{entry.bytes / 1000:,.0f}",
                )
                for entry in groups
            ),
        )
    )
    n_bytes, limit = sum(entry.bytes for entry in groups), config.stream.exemplar_bytes
    if n_bytes >= _FULL * limit:
        click.echo(
            f"The stream is full, with {n_bytes / 1e6:,.1f} of {limit / 1e6:,.1f} MB: the oldest exemplars go, of whatever slice they are, before"
            f" there are {EXEMPLARS_EACH} of a kind. Raise stream.exemplar_bytes to keep more.",
            err=True,
        )


@exemplars.command("show")
@CONFIG
@_NATS
@click.argument("model")
@click.argument("slice_name", metavar="SLICE")
@_KIND
@click.option(
    "--text",
    is_flag=True,
    help="Of generated text: the first token of each answer at which it left the FP32 model, in its context. This shows what clients sent.",
)
@JSON
def show(
    config_path: Path,
    *,
    data: Path | None,
    model: str,
    slice_name: str,
    kind: str | None,
    text: bool,
    as_json: bool,
) -> None:
    """Show the exemplars of a slice: ids, times, probabilities, divergences and shapes. Without --text no value of a tensor is shown.

    Needs the key of a shadow at NATS, and the keys of stream.payload_key_file if exchanges are encrypted.

    \b
    Example:
      quantdrift exemplars show digits scanner=archive --kind damaged
      quantdrift exemplars show assistant language=de --kind damaged --text
    """
    config = at_data(load(config_path), data, NatsRole.SHADOW)
    problems: list[str] = []
    exemplars_read = asyncio.run(_read(config, model, slice_name, kind, problems))
    if text:
        _show_text(exemplars_read, as_json=as_json)
    elif as_json:
        emit({"exemplars": [_shown(exemplar) for exemplar in exemplars_read], "unreadable": len(problems)})
    elif exemplars_read:
        head = (
            "exchange",
            "kind",
            "captured (UTC)",
            "version",
            "items",
            "changed answers",
            "divergence",
            "probability",
            "inputs",
        )
        click.echo(columns(head, (_row(exemplar) for exemplar in exemplars_read)))
    elif not problems:
        click.echo(_nothing(config, model, slice_name))
    if problems:
        raise OperatorError(f"{len(problems)} exemplars cannot be read: {plain(problems[0])}")


@exemplars.command("erase")
@CONFIG
@_NATS
@_MODEL
@_SLICE
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@REASON
@JSON
def erase(
    config_path: Path,
    *,
    data: Path | None,
    model: str,
    slice_name: str,
    yes: bool,
    reason: str,
    as_json: bool,
) -> None:
    """Erase exemplars: all, or those of a model or a slice. The server overwrites their bytes.

    Those of one person or one exchange are erased by `quantdrift privacy erase`. A shadow keeps new ones until
    `models.exemplars` is false. Needs the administrator's key at NATS. The entry in the audit is written with your own user of Postgres.

    \b
    Example:
      quantdrift exemplars erase --model digits --reason "ticket 4711"
    """
    config = at_data(load(config_path), data, NatsRole.ADMIN)
    kept = asyncio.run(_kept(config, NatsRole.ADMIN, model, slice_name, None))
    if not kept:
        if as_json:
            emit({"erased": 0})
        else:
            click.echo(_nothing(config, model, slice_name))
        return
    if not yes:
        click.confirm(
            f"Erase {len(kept)} exemplars of {len({(exemplar.model, exemplar.slice) for exemplar in kept})} slices? This cannot be undone.",
            abort=True,
            err=as_json,
        )
    with Steps(quiet=as_json) as step:
        n = asyncio.run(_erased(config, audit_dsn(config, data), kept, (model, slice_name, reason), step))
    if as_json:
        emit({"erased": n})
    else:
        click.echo(f"{n} exemplars are erased.")


@asynccontextmanager
async def _connected(config: Config, role: NatsRole) -> "AsyncIterator[Queue]":
    from quantdrift.core.stream.connection import Queue

    queue = await Queue.connect(config.stream, client_name="quantdrift exemplars", role=role)
    try:
        yield queue
    finally:
        await queue.close()


async def _kept(
    config: Config, role: NatsRole, model: str, slice_name: str, kind: str | None
) -> "list[KeptExemplar]":
    from quantdrift.core.stream.exemplars import kept_exemplars

    async with _connected(config, role) as queue:
        kept = kept_exemplars(queue, model=model, slice_name=slice_name, kind=kind or "")
        return [exemplar async for exemplar in kept]


async def _read(
    config: Config, model: str, slice_name: str, kind: str | None, problems: list[str]
) -> list[Exemplar]:
    from quantdrift.core.stream.exemplars import exemplars as of_slice
    from quantdrift.core.stream.exemplars import opener

    async with _connected(config, NatsRole.SHADOW) as queue:
        exemplars_read = of_slice(
            queue,
            model,
            slice_name,
            opened=opener(config.stream),
            kind=None if kind is None else ExemplarKind(kind),
            unreadable=problems.append,
        )
        return [exemplar async for exemplar in exemplars_read]


async def _erased(
    config: Config, dsn: str, found: "list[KeptExemplar]", what: tuple[str, str, str], step: Any
) -> int:
    """Erase with an entry in the audit; where there is no address of Postgres, without one."""
    from quantdrift.core.stream.exemplars import delete_exemplars

    model, slice_name, reason = what
    async with _connected(config, NatsRole.ADMIN) as queue:
        step(f"erasing {len(found)} exemplars")

        async def delete() -> int:
            return await delete_exemplars(
                queue, found, progress=lambda n: step(f"erasing, {n} of {len(found)}")
            )

        if not dsn:
            click.echo("warning: not in the audit: there is no Postgres address (QUANTDRIFT_DSN)", err=True)
            return await delete()
        from quantdrift.storage.audit import Action, add
        from quantdrift.storage.database import Database

        async with Database(dsn) as database:
            async with database.begin() as connection:  # nothing is erased without an entry
                await add(
                    connection,
                    Action.EXEMPLARS_ERASE,
                    model=model,
                    subject=slice_name,
                    before={"exemplars": len(found)},
                    note=reason,
                )
            return await delete()


def _grouped(found: "list[KeptExemplar]") -> list[Group]:
    by_key: dict[tuple[str, str, str], list[KeptExemplar]] = {}
    for exemplar in found:
        by_key.setdefault((exemplar.model, exemplar.slice, exemplar.kind.value), []).append(exemplar)
    return [
        Group(
            model=model,
            slice=name,
            kind=ExemplarKind(kind),
            count=len(of_key),
            oldest=min(exemplar.stored_at for exemplar in of_key),
            newest=max(exemplar.stored_at for exemplar in of_key),
            bytes=sum(exemplar.n_bytes for exemplar in of_key),
        )
        for (model, name, kind), of_key in sorted(by_key.items())
    ]


def _nothing(config: Config, model: str, slice_name: str) -> str:
    chosen: list[Model] = [configured for configured in config.models if model in ("", configured.name)]
    if model and not chosen:
        return f"There are no exemplars of `{plain(model)}`, and the configuration has no such model."
    if not any(configured.exemplars for configured in chosen):
        return "There are no exemplars: `models.exemplars` is false. See docs/how-to/exemplars.md before you set it."
    of = f" of the slice {plain(slice_name)}" if slice_name else ""
    return (
        f"There are no exemplars{of} yet: a shadow keeps them as it compares exchanges. If that goes on, look at"
        " quantdrift_shadow_exemplars_total."
    )


def _show_text(exemplars_read: Sequence[Exemplar], *, as_json: bool) -> None:
    """Show where answers left the reference, the worst first."""
    worst = sorted(
        exemplars_read,
        key=lambda one: max((item.divergence or 0.0 for item in one.items), default=0.0),
        reverse=True,
    )
    found = {(token.exchange, token.item): token for one in worst for token in divergent_tokens(one)}
    if as_json:
        emit({"divergent_tokens": list(found.values())})
        return
    for token in found.values():
        click.echo(
            f"{token.exchange}, token {token.position}\n"
            f"  prompt     {plain(token.prompt)}\n"
            f"  answer     {plain(token.before)}[{plain(token.served)}]{plain(token.after)}\n"
            f"  expected   [{plain(token.expected)}], which the FP32 model says with {token.expected_p:.1%};"
            f" [{plain(token.served)}] with {'less than 0.1%' if token.served_p < _LEAST_SHOWN else f'{token.served_p:.1%}'}"
        )
    if exemplars_read and not found:
        click.echo("None of these answers has a token where the FP32 model clearly prefers another one.")


def _shown(one: Exemplar) -> dict[str, Any]:
    return {
        "exchange": one.exchange.id,
        "kind": one.kind,
        "captured_at": one.exchange.captured_at,
        "compared_at": one.compared_at,
        "version": one.exchange.stored_version,
        "reference_digest": one.reference_digest,
        "items": one.items,
        "probability": one.probability,
        "pi": one.pi,
        "inputs": [_shape(tensor) for tensor in one.exchange.inputs],
        "outputs": [_shape(tensor) for tensor in one.exchange.outputs],
        "reference_outputs": [_shape(tensor) for tensor in one.reference],
    }


def _row(one: Exemplar) -> tuple[str, ...]:
    divergences = [item.divergence for item in one.items if item.divergence is not None]
    return (
        one.exchange.id,
        one.kind.value,
        _time(one.exchange.captured_at),
        plain(one.exchange.stored_version),
        str(len(one.items)),
        str(sum(bool(item.flip) for item in one.items)),
        f"{max(divergences):.3g}" if divergences else "-",
        "-" if one.pi is None else f"{one.pi:.3g}",
        ", ".join(_shape(tensor) for tensor in one.exchange.inputs),
    )


def _shape(tensor: Tensor) -> str:
    return f"{plain(tensor.name)} {tensor.datatype}{list(tensor.shape)}"


def _time(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M}"
