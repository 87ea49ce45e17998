"""What a database knows: figures, incidents and compared items, without a configuration file."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import msgspec

from quantdrift.core.config.load import load
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import OperatorError
from quantdrift.core.text import Table, plain
from quantdrift.facts import figures as windows
from quantdrift.facts.figures import Figure, Window, shown
from quantdrift.facts.incidents import Incident
from quantdrift.facts.words.incident import incident_table
from quantdrift.release.blocking import wait_for
from quantdrift.release.result import Result
from quantdrift.release.setting import File
from quantdrift.storage.address import PostgresAddress
from quantdrift.storage.database import Database
from quantdrift.storage.figures.figures import SliceFigures, in_window, versions
from quantdrift.storage.incidents.incidents import list_incidents, with_costs
from quantdrift.storage.snapshot import reading
from quantdrift.storage.versions import Version, candidate_versions

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

    from quantdrift.frames.tables import Tables

FrameT = TypeVar("FrameT")
Library = Literal["pandas", "polars", "arrow"]


class FiguresResult(Result, frozen=True, kw_only=True):
    """The figures of one version of a model in one window.

    Parameters
    ----------
    model, version, window
        What they are of.
    slices
        The figures of each slice, by its name: of all traffic first, then by the share of changed answers.
    """

    model: str
    version: str
    window: Window
    slices: dict[str, SliceFigures]

    def blocks(self) -> Sequence[str | Table]:
        """Return what they are of, and a row for each slice."""
        rows = tuple(
            (
                plain(name),
                _shown(slice_.changed_share),
                _shown(slice_.divergence),
                _shown(slice_.requests),
                slice_.basis or "a day",
                f"{slice_.n:,}",
            )
            for name, slice_ in self.slices.items()
        )
        head = ("slice", "changed answers", "divergence", "requests", "requests of", "answers compared")
        begin, end = self.window.begin.astimezone(UTC), self.window.end.astimezone(UTC)
        of = f"{plain(self.model)} {plain(self.version)}"
        return [f"{of}, {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC.", Table(head, rows)]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as builtin types."""
        record: dict[str, Any] = msgspec.to_builtins(self)
        return record


class IncidentsResult(Result, frozen=True, kw_only=True):
    """Incidents: open ones first, then those that ended last."""

    incidents: tuple[Incident, ...]

    def blocks(self) -> Sequence[str | Table]:
        """Return the table of `quantdrift incidents list`."""
        return [incident_table(self.incidents)] if self.incidents else ["No incidents."]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as builtin types."""
        record: dict[str, Any] = msgspec.to_builtins(self)
        return record


class Connection(Generic[FrameT]):
    """The database of one address. No connection is kept: each call opens one and closes it.

    Parameters
    ----------
    dsn
        `postgresql://user:password@host:port/name` of a user with the role `quantdrift_reader`, at least.
    tables
        Opens the tables as frames.
    config
        The configuration file with the prices; None: nothing has a price.
    """

    def __init__(
        self, dsn: str, tables: "Callable[[str], Tables[FrameT]]", config: File | None = None
    ) -> None:
        PostgresAddress.of(dsn)
        self._dsn, self._tables, self._config = dsn, tables, config

    def figures(
        self,
        model: str,
        *,
        version: str = "",
        begin: datetime | None = None,
        end: datetime | None = None,
    ) -> FiguresResult:
        """Return what is measured of each slice.

        Parameters
        ----------
        version
            Empty: the one with the newest exchange.
        begin, end
            [begin, end) with a time zone, of whole hours; without them: the last 24 hours with data.

        Raises
        ------
        OperatorError
            There is no such model or version, or nothing of it was compared in this time.
        RetryError
            The database is away.
        """
        if (begin is None) is not (end is None):
            raise OperatorError("a period has a begin and an end: give both, or none")

        async def ask() -> FiguresResult:
            as_of = datetime.now(UTC)
            async with Database(self._dsn) as database:
                async with reading(database) as connection:
                    of_model = [each for each in await candidate_versions(connection) if each.model == model]
                chosen = [each.id for each in of_model if version in ("", each.candidate_version)]
                async with database.begin() as connection:
                    measured = await versions(connection, chosen, end)
                    if not measured:
                        raise OperatorError(_unknown(model, version, of_model))
                    newest = max(measured.values(), key=lambda each: each.last_at)
                    window = (
                        windows.last_day(newest.last_at)
                        if begin is None or end is None
                        else windows.period(begin, end)
                    )
                    figures = await in_window(connection, newest, window, as_of)
            slices = {slice_.requests.of.slice: slice_ for slice_ in figures.values()}
            if not slices:
                raise OperatorError(f"nothing of {model} {newest.version} was compared in this time")
            order = sorted(slices.items(), key=lambda item: (item[0] != "all", -_share(item[1]), item[0]))
            return FiguresResult(model=model, version=newest.version, window=window, slices=dict(order))

        return wait_for(ask())

    def incidents(self, *, model: str = "", with_ended: bool = True) -> IncidentsResult:
        """Return incidents: open ones first, then those that ended last. With a configuration that has prices each has its cost.

        Parameters
        ----------
        with_ended
            Also those that ended more than a day ago.
        """
        prices = Config() if self._config is None else load(Path(self._config))

        async def ask() -> list[Incident]:
            async with Database(self._dsn) as database, database.begin() as connection:
                listed = await list_incidents(connection, model=model, with_ended=with_ended)
                return await with_costs(connection, listed, prices)

        return IncidentsResult(incidents=tuple(wait_for(ask())))

    def items(
        self,
        model: str,
        *,
        slice: str = "all",  # noqa: A002 -- the word of the product
        version: str = "",
        start: datetime | None = None,
        end: datetime | None = None,
        columns: Sequence[str] = (),
        attributes: Sequence[str] = (),
    ) -> FrameT:
        """Return every compared item of a slice as a frame, with its weight; parameters as of `quantdrift.frames`."""
        with self._tables(self._dsn) as tables:
            return tables.items(
                model,
                slice=slice,
                version=version,
                start=start,
                end=end,
                columns=columns,
                attributes=attributes,
            )


@overload
def connect(dsn: str, *, config: File | None = None) -> "Connection[pd.DataFrame]": ...
@overload
def connect(
    dsn: str, *, library: Literal["pandas"], config: File | None = None
) -> "Connection[pd.DataFrame]": ...
@overload
def connect(
    dsn: str, *, library: Literal["polars"], config: File | None = None
) -> "Connection[pl.DataFrame]": ...
@overload
def connect(dsn: str, *, library: Literal["arrow"], config: File | None = None) -> "Connection[pa.Table]": ...
def connect(dsn: str, *, library: Library = "pandas", config: File | None = None) -> "Connection[Any]":
    """Return what a database knows: its `figures`, `incidents` and `items`.

    Parameters
    ----------
    dsn
        `postgresql://user:password@host:port/name` of a user with the role `quantdrift_reader`, at least. The address of `quantdrift up` is
        in the file `dsn` of its data directory.
    library
        What `items` returns its rows as.
    config
        The configuration file whose prices say what incidents cost, such as `config.toml`; None: nothing has a price.

    Raises
    ------
    OperatorError
        The address cannot be read.
    """

    def tables(address: str) -> "Tables[Any]":
        from quantdrift import frames  # noqa: PLC0415 - figures and incidents need no Arrow

        opened: Tables[Any] = getattr(frames, library)(address)
        return opened

    return Connection(dsn, tables, config)


def _shown(figure: Figure | None) -> str:
    if figure is None:
        return "not known"
    rounded = shown(figure)
    return f"{rounded} [{rounded.interval}]" if rounded.interval else str(rounded)


def _share(slice_: SliceFigures) -> float:
    return slice_.changed_share.value if slice_.changed_share else 0.0


def _unknown(model: str, version: str, of_model: Sequence[Version]) -> str:
    """Return why there are no figures."""
    if not of_model:
        return f"nothing of model `{model}` was captured"
    of = f" {version}" if version else ""
    names = ", ".join(dict.fromkeys(each.candidate_version for each in of_model))
    return f"nothing of `{model}`{of} was compared; its versions are: {names}"
