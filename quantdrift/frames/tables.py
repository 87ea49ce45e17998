"""The tables that data scientists read, each as one function."""

import json
import re
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pyarrow as pa

from quantdrift.frames.connection import SnapshotConnection
from quantdrift.frames.estimates import estimate
from quantdrift.storage.worst import worst_keys

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

FrameT = TypeVar("FrameT")
Step = Literal["hour", "day"]
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_WEEK: Final = timedelta(days=7)


class Tables(Generic[FrameT]):
    """The drift tables of one database, as frames of one kind. Use it as a context manager, or call `close`.

    Every function that takes `start` and `end` reads [start, end): by default the last seven days. A time without a zone is UTC.
    The columns are those of the view that the function names; `docs/reference/database.md` explains each.

    Parameters
    ----------
    connection
        Of a user with the role `quantdrift_reader`, at least.
    convert
        Makes a frame of an Arrow table.
    """

    def __init__(self, connection: SnapshotConnection, convert: Callable[[pa.Table], FrameT]) -> None:
        self._connection = connection
        self._convert = convert

    def __enter__(self) -> "Tables[FrameT]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def sql(self, query: str, *parameters: Any) -> FrameT:
        """Return the rows of a query of your own, with `$1`, `$2`, ... for the parameters. It can change nothing.

        Raises
        ------
        OperatorError
            Postgres refuses the query; the message says why.
        RetryError
            The connection was lost, or the query took longer than the time limit.
        """
        return self._convert(self._connection.table(query, parameters))

    def slices(self, *, model: str = "", version: str = "") -> FrameT:
        """Return the state of each slice now, the strongest evidence first (view `slice_now`)."""
        return self._select(
            "slice_now", {"model": model, "candidate_version": version}, "evidence_ratio desc nulls last"
        )

    def history(
        self,
        model: str,
        *,
        slice: str = "all",  # noqa: A002 -- the word of the product
        version: str = "",
        step: Step = "hour",
        start: datetime | None = None,
        end: datetime | None = None,
    ) -> FrameT:
        """Return a slice's divergence over time, with budget and interval (views `slice_history` and `slice_day`)."""
        view, column = ("slice_history", "hour") if step == "hour" else ("slice_day", "day")
        where = {"model": model, "slice": slice, "candidate_version": version}
        return self._select(view, where, column, (column, start, end))

    def items(
        self,
        model: str,
        *,
        slice: str = "all",  # noqa: A002
        version: str = "",
        start: datetime | None = None,
        end: datetime | None = None,
        columns: Sequence[str] = (),
        attributes: Sequence[str] = (),
    ) -> FrameT:
        """Return every compared item of a slice with its weight in it (view `item`).

        Means and quantiles of the traffic need `weight`: `weighted_mean(items["flip"], items["weight"])`.

        Parameters
        ----------
        columns
            All, or these alone: a week of a busy model has millions of rows.
        attributes
            Recorded attributes, such as `header.x-user`: each becomes a column of texts with its name; None where a request had none.
        """
        where = {"model": model, "slice": slice, "candidate_version": version}
        texts = [f"attributes ->> {_literal(name)} as {_quoted(name)}" for name in attributes]
        return self._select(
            "item", where, "captured_at", ("captured_at", start, end), columns=columns, more=texts
        )

    def trend(
        self,
        model: str,
        *,
        slices: Sequence[str] = ("all",),
        version: str = "",
        step: Literal["day", "week"] = "day",
        timezone: str = "UTC",
        not_in: Sequence[date | tuple[datetime, datetime]] = (),
        value: Literal["flip", "divergence"] = "flip",
        cap: float = 1.0,
        start: datetime | None = None,
        end: datetime | None = None,
    ) -> FrameT:
        """Return the mean of each slice by local day or week with its 95 % interval, as `estimate` makes it of the items.

        It reads the items, some seconds for a million of them; `history` reads hours and days of UTC from the roll-ups at once.

        Parameters
        ----------
        slices
            Their names, such as all customers.
        timezone
            Whose days and weeks they are; a time without a zone is of this one. Weeks begin on Monday.
        not_in
            Local days, or times [begin, end), that are left out, such as a holiday.
        cap
            Of a single divergence: the model's `budget.cap`.

        Returns
        -------
        The columns `candidate_version`, `slice`, `day` (the first of a week), `n` items, `n_clusters` people, `mean`, `low`, `high`.

        Raises
        ------
        ValueError
            There is no such time zone, step or value.
        """
        if step not in {"day", "week"} or value not in {"flip", "divergence"}:
            raise ValueError("step is day or week, and value is flip or divergence")
        try:
            zone = ZoneInfo(timezone)
        except (ZoneInfoNotFoundError, OSError) as error:
            raise ValueError(f"there is no time zone `{timezone}`") from error
        begin, until = _range(_zoned(start, zone) if start else None, _zoned(end, zone) if end else None)
        parameters: list[Any] = [model, begin, until, timezone, version, *slices]
        named = ", ".join(f"${number}" for number in range(6, 6 + len(slices)))
        local = "(captured_at at time zone $4)"
        conditions = [f"model = $1 and ($5 = '' or candidate_version = $5) and slice in ({named})"]
        for left_out in not_in:
            if isinstance(left_out, tuple):
                parameters += [_zoned(left_out[0], zone), _zoned(left_out[1], zone)]
                first = len(parameters) - 1
                conditions.append(f"not (captured_at >= ${first} and captured_at < ${first + 1})")
            else:
                conditions.append(f"{local}::date <> {_literal(f'{left_out:%Y-%m-%d}')}::date")
        items = self._connection.table(
            f"select candidate_version, slice, date_trunc('{step}', {local})::date as day, {value}, weight, group_key, exchange_id"  # noqa: S608 -- numbers, quoted dates and constants
            f" from items($2, $3) where {' and '.join(conditions)}",
            parameters,
        )
        return self._convert(estimate(items, value=value, by=["candidate_version", "slice", "day"], cap=cap))

    def labelled_items(
        self,
        model: str,
        *,
        slice: str = "all",  # noqa: A002
        version: str = "",
        start: datetime | None = None,
        end: datetime | None = None,
    ) -> FrameT:
        """Return the items of a slice that have a true label, with what the quantised model did to each (view `item`, table `label`).

        The column `did` is `hurt`: only the reference was right; `helped`: only the candidate was; `did not matter`: the answer
        changed, and both or none were right; `wrong`: the answer did not change, and it is wrong; `right`.
        """
        begin, until = _range(start, end)
        return self.sql(
            "select i.*, l.label, l.reference_right, l.candidate_right, l.drawn_for, case"
            " when l.reference_right and not l.candidate_right then 'hurt'"
            " when l.candidate_right and not l.reference_right then 'helped'"
            " when i.flip then 'did not matter' when l.candidate_right then 'right' else 'wrong' end as did"
            " from (select array_agg(k.captured_at) as times, array_agg(k.exchange_id) as ids"
            " from label k join model_version v on v.id = k.model_version_id"
            " where v.model = $1 and ($3 = '' or v.candidate_version = $3) and k.captured_at >= $4 and k.captured_at < $5) key"
            # Postgres inlines the function only if its arguments are columns, not subqueries.
            " cross join lateral items_of(key.times, key.ids) i"
            " join label l on l.captured_at = i.captured_at and l.exchange_id = i.exchange_id and l.item = i.item"
            " where i.model = $1 and i.slice = $2 and ($3 = '' or i.candidate_version = $3)"
            " order by i.captured_at, i.exchange_id, i.item",
            model,
            slice,
            version,
            begin,
            until,
        )

    def worst(
        self,
        model: str,
        *,
        slice: str = "all",  # noqa: A002
        version: str = "",
        start: datetime | None = None,
        end: datetime | None = None,
        n: int = 20,
    ) -> FrameT:
        """Return the `n` items of a slice with the largest divergence (view `item`)."""
        begin, until = _range(start, end)
        slices, versions = self._keys(model, slice, version)
        keys = worst_keys(
            slices=slices, versions=versions, begin="$1", end="$2", n=str(int(n)), changed_first=False
        )
        return self.sql(
            f"with {keys} select i.* from worst w"  # noqa: S608 -- numbers
            " cross join lateral items(w.captured_at, w.captured_at + interval '1 microsecond') i"
            f" where i.exchange_id = w.exchange_id and i.item = w.item and i.slice_id = any({slices}) order by i.divergence desc nulls last, i.captured_at limit {int(n)}",
            begin,
            until,
        )

    def request(self, request_id: str, *, header: str = "x-request-id") -> FrameT:
        """Return what was compared of the request whose recorded header `header` has this value (view `item`).

        Only x-request-id has an index: another header is searched in all comparisons.
        """
        name = header.lower()
        column = f"attributes ->> {_literal(f'header.{name}')}"
        # Of condensed days only the blocks that may have it are read whole.
        if name == "x-request-id" and _UUID.fullmatch(request_id):
            may_have, looked_for = "$2::uuid = any(b.request_id)", request_id
        else:
            may_have, looked_for = (
                "strpos(array_to_string(b.attributes, ' '), $2) > 0",
                json.dumps(request_id, ensure_ascii=False),
            )
        return self.sql(
            f"with found as ("  # noqa: S608 -- quoted
            f"select captured_at, exchange_id, item from comparison where {column} = $1 union all"
            " select r.captured_at, r.exchange_id, r.item from condensed_block b cross join lateral block_rows(b) r"
            f" where {may_have} and r.{column} = $1)"
            " select i.* from found cross join lateral items(found.captured_at, found.captured_at + interval '1 microsecond') i"
            " where i.exchange_id = found.exchange_id and i.item = found.item and i.slice = 'all' order by captured_at, item",
            request_id,
            looked_for,
        )

    def direction(
        self,
        model: str,
        *,
        slice: str = "all",  # noqa: A002
        version: str = "",
        start: datetime | None = None,
        end: datetime | None = None,
    ) -> FrameT:
        """Return which answer of the reference became which other answer of the candidate, the most frequent change first.

        `n` items, and their share by weight of all changed answers that are shown; `tie` tells apart the changes between entries
        that share the largest score.
        """
        begin, until = _range(start, end)
        slices, versions = self._keys(model, slice, version)
        return self.sql(
            "select reference_class, candidate_class, tie, count(*) as n, sum(weight) / sum(sum(weight)) over () as share"  # noqa: S608 -- numbers
            f" from some_items($1, $2, {slices}, true, '{{slice_ids,in_slices,pi1,pi2,flip,tie,detail}}') where slice_ids && {slices} and slice_id = any({slices}) and model_version_id = any({versions})"
            " and flip and reference_class is not null"
            " group by reference_class, candidate_class, tie order by share desc, reference_class, candidate_class",
            begin,
            until,
        )

    def alerts(
        self, *, model: str = "", start: datetime | None = None, end: datetime | None = None
    ) -> FrameT:
        """Return the alerts that were open at some moment of a time, whenever they opened; the newest first.

        An alert that is still open has no `resolved_at`.
        """
        begin, until = _range(start, end)
        return self.sql(
            "select a.id, mv.model, mv.candidate_version, s.name as slice, a.severity, a.metric, a.onset_at, a.opened_at,"
            " a.resolved_at, a.ended from alert a join model_version mv on mv.id = a.model_version_id join slice s on s.id = a.slice_id"
            " where ($1 = '' or mv.model = $1) and a.opened_at < $3 and (a.resolved_at is null or a.resolved_at >= $2)"
            " order by a.opened_at desc, a.id desc",
            model,
            begin,
            until,
        )

    def coverage(self, *, start: datetime | None = None, end: datetime | None = None) -> FrameT:
        """Return how much of the traffic was sampled, lost and compared, by hour (view `coverage_hour`)."""
        return self._select("coverage_hour", {}, "hour", ("hour", start, end))

    def incidents(
        self, *, model: str = "", start: datetime | None = None, end: datetime | None = None
    ) -> FrameT:
        """Return what happened: the alerts of one cause, with a state and whom it hit, by beginning (view `incidents`)."""
        return self._select("incidents", {"model": model}, "began_at desc", ("began_at", start, end))

    def not_observed(self, *, model: str = "", period: timedelta = timedelta(days=1)) -> FrameT:
        """Return what nobody looked at from `period` ago until now: of a model, and what was lost before its model was known.

        The columns are those of the view `not_observed`.
        """
        return self.sql(
            "select * from not_observed_in(make_interval(secs => $2)) where $1 = '' or model = $1 or model is null"
            " order by requests desc nulls last",
            model,
            period.total_seconds(),
        )

    def releases(self, *, model: str = "") -> FrameT:
        """Return each release beside the one before it, slice by slice (view `release_compare`)."""
        return self._select("release_compare", {"model": model})

    def changes(self, *, start: datetime | None = None, end: datetime | None = None) -> FrameT:
        """Return who changed what, when and why, the newest first (view `change_log`)."""
        return self._select("change_log", {}, "at desc", ("at", start, end))

    def _keys(self, model: str, of_slice: str, version: str) -> tuple[str, str]:
        """Return the keys of the slices of a name, and of a version or all, as expressions."""
        return (
            self._ids("select id from slice where model = $1 and name = $2", model, of_slice),
            self._ids(
                "select id from model_version where model = $1 and ($2 = '' or candidate_version = $2)",
                model,
                version,
            ),
        )

    def _ids(self, query: str, *parameters: str) -> str:
        """Return the ids that a query finds, as an expression: Postgres plans better with numbers than with another query."""
        ids = self._connection.table(query, parameters)["id"].to_pylist()
        return f"array[{', '.join(map(str, ids))}]::integer[]"

    def _select(
        self,
        view: str,
        where: dict[str, str],
        order: str = "",
        span: tuple[str, datetime | None, datetime | None] | None = None,
        *,
        columns: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> FrameT:
        """Return rows of a view: those whose columns equal what is given (an empty text: any)."""
        conditions, parameters = [], list[Any]()
        for column, value in where.items():
            if value:
                parameters.append(value)
                conditions.append(f"{column} = ${len(parameters)}")
        if span:
            column, start, end = span
            parameters += _range(start, end)
            conditions += [f"{column} >= ${len(parameters) - 1}", f"{column} < ${len(parameters)}"]
        names = ", ".join([*(map(_quoted, columns) if columns else "*"), *more])
        query = f"select {names} from {view}"  # noqa: S608 -- names are quoted, values are parameters
        query += f" where {' and '.join(conditions)}" if conditions else ""
        query += f" order by {order}" if order else ""
        return self.sql(query, *parameters)


def arrow(dsn: str) -> Tables[pa.Table]:
    """Return the tables as Arrow tables.

    Parameters
    ----------
    dsn
        `postgresql://user:password@host:port/name`. A server on another machine needs `sslmode`, as everywhere in quantdrift.

    Raises
    ------
    OperatorError
        The address cannot be read, or the server refuses the user.
    RetryError
        The server cannot be reached.
    """
    return Tables(SnapshotConnection(dsn), lambda table: table)


def pandas(dsn: str) -> "Tables[pd.DataFrame]":
    """Return the tables as pandas data frames; parameters and errors are those of `arrow`."""
    import pandas as _  # noqa: F401, PLC0415, ICN001 -- it is missing now, not at the first query

    return Tables(SnapshotConnection(dsn), lambda table: table.to_pandas())


def polars(dsn: str) -> "Tables[pl.DataFrame]":
    """Return the tables as Polars data frames; parameters and errors are those of `arrow`."""
    import polars  # noqa: PLC0415, ICN001

    def convert(table: pa.Table) -> "pl.DataFrame":
        frame = polars.from_arrow(table)
        assert isinstance(frame, polars.DataFrame)
        return frame

    return Tables(SnapshotConnection(dsn), convert)


def _range(start: datetime | None, end: datetime | None) -> tuple[datetime, datetime]:
    """Return [start, end) with zones: the last week if nothing is given."""
    until = _zoned(end) if end else datetime.now(UTC)
    begin = _zoned(start) if start else until - _WEEK
    if begin >= until:
        raise ValueError(f"start {begin} is not before end {until}")
    return begin, until


def _zoned(time: datetime, zone: tzinfo = UTC) -> datetime:
    return time if time.tzinfo else time.replace(tzinfo=zone)


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
