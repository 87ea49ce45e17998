"""The comparison of two versions, two periods or two models, slice by slice, worst first."""

from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from quantdrift.core.errors import OperatorError
from quantdrift.core.notation import listed
from quantdrift.core.text import Table
from quantdrift.facts.words.comparison import MOST_ROWS, comparison_text
from quantdrift.release.blocking import wait_for
from quantdrift.release.result import Result
from quantdrift.release.setting import File, Setting
from quantdrift.report.compare import DAYS, Sides, Span, compare_models, compare_periods
from quantdrift.report.compare import compare as compare_versions
from quantdrift.report.figures import VersionComparison
from quantdrift.storage.database import Database
from quantdrift.storage.figures.estimates import STATEMENT_S
from quantdrift.storage.snapshot import reading
from quantdrift.storage.versions import versions_now

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

Time: TypeAlias = datetime | date | str
"""A time or a day; as a text `2026-11-11` or `2026-11-11T08:00`."""
Period: TypeAlias = tuple[Time, Time]
"""[begin, end)."""


class CompareResult(Result, frozen=True, kw_only=True):
    """What differs between two versions, periods or models.

    Parameters
    ----------
    comparison
        The figures of both sides and their differences, new minus old, of all traffic and of each slice.
    """

    comparison: VersionComparison

    def blocks(self) -> Sequence[str | Table]:
        """Return a sentence, the table, and what only one side has."""
        compared = self.comparison
        sides = (compared.old, compared.only_old), (compared.new, compared.only_new)
        return comparison_text(
            (compared.sentence, compared.old.basis, compared.new.basis),
            compared.table(MOST_ROWS) if compared.aggregate or compared.slices else None,
            left_out=[(gap.begin, gap.end) for gap in compared.not_in],
            cost=compared.cost,
            warning=compared.warning,
            n_more=len(compared.slices) - MOST_ROWS,
            only=[(version.label or version.version, names) for version, names in sides],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what the command prints with `--json`."""
        record: dict[str, Any] = msgspec.to_builtins(self.comparison)
        return record


def compare(
    old: str | Period | None = None,
    new: str | Period | None = None,
    *,
    config: File = "config.toml",
    data: File | None = None,
    model: str = "",
    version: str = "",
    with_model: str = "",
    with_version: str = "",
    not_in: Sequence[Time | Period] = (),
    timezone: str = "UTC",
    days: int = DAYS,
) -> CompareResult:
    """Compare two versions, two periods or two models, slice by slice, worst first.

    A difference is new minus old, with a 95 % interval for one look. A slice is called worse or better where that allows for the number of
    slices (Holm).

    Parameters
    ----------
    old, new
        Two versions; or two periods of one version; or, with `with_model`, `new` alone may be a period. Without any of them: the version
        that was seen last, and the one that was seen last before it.
    config, data
        The configuration file, and the data directory of a running `quantdrift up`, whose Postgres is used.
    model, version
        The model and, of periods or models, its version; empty: the only model, and the newest version that was compared.
    with_model, with_version
        The model that `model` is compared with, in the same hours.
    not_in
        Days and periods that are left out on both sides.
    timezone
        Of times that have none, and of days.
    days
        Without periods: of each version at most this many of its newest days.

    Raises
    ------
    OperatorError
        Something must be changed by a person; the sentence is the one that the command prints.
    RetryError
        The database is away.
    """
    zone = _zone(timezone)
    left_out = tuple(_left_out(time, zone) for time in not_in)
    before = None if old is None or isinstance(old, str) else _span("--old-from", "--old-to", old, zone)
    after = None if new is None or isinstance(new, str) else _span("--from", "--to", new, zone)
    if with_model and (not model or old is not None or isinstance(new, str)):
        raise OperatorError("--with-model needs --model, and times for --from and --to if there are any")
    are_newest = not (old or new or with_model)
    is_of_versions = are_newest or (isinstance(old, str) and isinstance(new, str) and bool(old and new))
    if not with_model and not is_of_versions and (before is None or after is None):
        raise OperatorError(
            "give two versions (--from OLD --to NEW), two periods (--old-from, --old-to, --from, --to), or two models"
            " (--model, --with-model)"
        )
    setting = Setting.of(config, data)
    options = setting.config()
    secrets = setting.secrets(options)

    async def ask() -> VersionComparison:
        async with (
            Database(secrets.dsn, statement_timeout_s=STATEMENT_S) as database,
            reading(database) as connection,
        ):
            if with_model:
                within = Sides(begin=after and after[0], end=after and after[1], not_in=left_out)
                pair = {"old": (with_model, with_version), "new": (model, version)}
                return await compare_models(connection, options, **pair, days=days, within=within)
            if before and after:
                return await compare_periods(
                    connection, options, old=before, new=after, model=model, version=version, not_in=left_out
                )
            two = await _newest(connection, model) if are_newest else (model, old, new)
            return await compare_versions(
                connection,
                options,
                model=two[0],
                old=str(two[1]),
                new=str(two[2]),
                days=days,
                within=Sides(not_in=left_out),
            )

    return CompareResult(comparison=wait_for(ask()))


async def _newest(connection: "AsyncConnection", model: str) -> tuple[str, str, str]:
    """Return the model, and the two of its versions that were seen last, the older one first."""
    seen: dict[str, list[str]] = {}
    for version in await versions_now(connection):
        names = seen.setdefault(version.model, [])
        if version.last_at is not None and version.version not in names and model in {"", version.model}:
            names.append(version.version)
    pairs = [(name, names[1], names[0]) for name, names in seen.items() if len(names) > 1]
    if len(pairs) == 1:
        return pairs[0]
    if pairs:
        raise OperatorError(f"{listed([pair[0] for pair in pairs])} have several versions: give --model")
    raise OperatorError(
        "there are no two versions to compare yet: give two periods (--old-from, --old-to, --from, --to), or two models"
        " (--model, --with-model)"
    )


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise OperatorError(f"--timezone `{name[:64]}` is not a time zone such as Europe/Berlin") from error


def _time(option: str, at: Time, zone: ZoneInfo) -> datetime:
    if isinstance(at, datetime):
        parsed = at
    elif isinstance(at, str):
        try:
            parsed = datetime.fromisoformat(at)
        except ValueError:
            raise OperatorError(
                f"{option} `{at[:64]}` is not a time such as 2026-11-11 or 2026-11-11T08:00"
            ) from None
    else:
        parsed = datetime.combine(at, time())
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=zone)


def _span(begin: str, end: str, period: Period, zone: ZoneInfo) -> Span:
    """Return a period; `begin` and `end` are the names of its options."""
    for option, at in zip((begin, end), period, strict=True):
        if not at:
            raise OperatorError(f"{option} is missing: a period has a begin and an end")
    span = _time(begin, period[0], zone).astimezone(UTC), _time(end, period[1], zone).astimezone(UTC)
    if span[0] >= span[1]:
        raise OperatorError(f"{begin} is not before {end}")
    return span


def _left_out(at: Time | Period, zone: ZoneInfo) -> Span:
    """Return a day or a time to leave out; a day of the time zone may have 23 or 25 hours."""
    if isinstance(at, tuple):
        return _span("--not-in", "--not-in", at, zone)
    day = _time("--not-in", at, zone)
    return day.astimezone(UTC), (day + timedelta(days=1)).astimezone(UTC)
