"""The newest report of each sidecar and shadow worker about itself, and what of it the audit has.

Whoever stores tallies stores those of sidecars; a shadow worker stores its own. The leading monitor adds the entries to the
audit, from the newest reports only: a process that changes faster than the monitor looks leaves no entry in between.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.config.state import changed_options
from quantdrift.core.records import ProcessState
from quantdrift.storage.audit import Action, add
from quantdrift.storage.database import Database

SIDECAR: Final = "sidecar"
SHADOW: Final = "shadow"

_STORE: Final = text("""
    insert into process_report (role, source, reported_at, digest, options, pause)
    values (:role, :source, :at, :digest, cast(:options as jsonb), cast(:pause as jsonb))
    on conflict (role, source) do update set
        reported_at = excluded.reported_at,
        seen_at = now(),
        digest = excluded.digest,
        options = excluded.options,
        pause = excluded.pause
    where excluded.reported_at >= process_report.reported_at and (
        excluded.digest <> process_report.digest
        or excluded.pause is distinct from process_report.pause
        or process_report.seen_at < now() - interval '1 hour'
    )
""")
_UNAUDITED: Final = text("""
    select role, source, stored_by, digest, options, pause, audited_digest, audited_options, audited_pause
    from process_report
    where (audited_digest is distinct from digest or audited_pause is distinct from pause)
        and role || ' ' || source <> all(:without)
    order by reported_at, role, source limit :most
""")
_WAITING: Final = text("""
    select count(*) from process_report
    where audited_digest is distinct from digest or audited_pause is distinct from pause
""")
_SAME: Final = text("""
    select exists (select from process_report where role = :role and audited_digest = :digest)
""")
_LAST: Final = text("""
    select source, audited_digest, audited_options from process_report
    where role = :role and audited_options is not null order by reported_at desc, source limit 1
""")
_MARK: Final = text("""
    update process_report set
        audited_digest = :digest, audited_options = cast(:options as jsonb), audited_pause = cast(:pause as jsonb)
    where role = :role and source = :source
""")


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """A report that the audit does not have yet; fields as the columns of `process_report`."""

    role: str
    source: str
    stored_by: str
    digest: str
    options: dict[str, Any]
    pause: dict[str, Any] | None
    audited_digest: str | None
    audited_options: dict[str, Any] | None
    audited_pause: dict[str, Any] | None


class _Audited(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one process, as the audit has them."""

    source: str
    digest: str
    options: dict[str, Any]


async def store_reports(
    database: Database, role: str, reports: Iterable[tuple[str, ProcessState, datetime]]
) -> None:
    """Store reports of processes in one transaction: the name of the process, its state, and when the stream took it.

    Raises
    ------
    RetryError, OperatorError
        As `Database.begin`: nothing is stored.
    """
    # In one order everywhere, so that two workers never wait for each other.
    rows = [
        {
            "role": role,
            "source": source,
            "at": at,
            "digest": state.digest,
            "options": _json(state.options),
            "pause": _json(state.pause),
        }
        for source, state, at in sorted(reports, key=lambda report: (report[0], report[2]))
    ]
    if rows:
        async with database.begin() as connection:
            await connection.execute(_STORE, rows)


async def audit_reports(
    connection: AsyncConnection, most: int, without: Collection[str] = ()
) -> Counter[str]:
    """Add entries to the audit about at most `most` reports that it does not have; return how many of each process.

    A process that is new, with a configuration that the audit has of another one of its role, gets no entry about it: pods
    come and go, and entries stay for ever.

    Parameters
    ----------
    without
        Processes whose reports wait, as the subjects of their entries: `sidecar pod-1`.
    """
    entries: list[_New] = []
    wanted = {"most": most, "without": list(without)}
    for row in (await connection.execute(_UNAUDITED, wanted)).mappings().all():
        report = _Report(**row)
        entries += await _entries_of(connection, report)
        await connection.execute(
            _MARK,
            {
                "role": report.role,
                "source": report.source,
                "digest": report.digest,
                "options": _json(report.options),
                "pause": _json(report.pause),
            },
        )
    for entry in entries:
        await add(
            connection,
            entry.action,
            subject=entry.subject,
            before=entry.before,
            after=entry.after,
            note=entry.note,
        )
    return Counter(entry.subject for entry in entries)


async def count_waiting(connection: AsyncConnection) -> int:
    """Return how many processes have a report that the audit does not have."""
    return int(await connection.scalar(_WAITING) or 0)


class _New(msgspec.Struct, frozen=True, kw_only=True):
    """An entry to be added, as the parameters of `quantdrift.storage.audit.add`."""

    action: Action
    subject: str
    before: Any
    after: Any
    note: str


async def _entries_of(connection: AsyncConnection, report: _Report) -> list[_New]:
    subject = f"{report.role} {report.source}"
    note = f"no person is known: reported by the process itself, stored by {report.stored_by}"
    entries = []
    if report.digest != report.audited_digest and not await _is_known(connection, report):
        last = await _last_audited(connection, report)
        former = {} if last is None else last.options
        changed = changed_options(former, report.options)
        after: dict[str, Any] = {
            "digest": report.digest,
            "changed": changed,
            "options": {name: report.options[name] for name in changed if name in report.options},
        }
        if last is not None and last.source != report.source:
            after["compared_with"] = f"{report.role} {last.source}"
        before = None
        if last is not None:
            before = {
                "digest": last.digest,
                "options": {name: former[name] for name in changed if name in former},
            }
        entries.append(
            _New(action=Action.CONFIGURATION, subject=subject, before=before, after=after, note=note)
        )
    if report.pause != report.audited_pause:
        entries.append(
            _New(
                action=Action.PAUSE_LOCAL,
                subject=subject,
                before=report.audited_pause,
                after=report.pause,
                note=note,
            )
        )
    return entries


async def _is_known(connection: AsyncConnection, report: _Report) -> bool:
    """Return whether the process is new, and the audit has its configuration of another process of its role."""
    if report.audited_digest is not None:
        return False
    return bool(await connection.scalar(_SAME, {"role": report.role, "digest": report.digest}))


async def _last_audited(connection: AsyncConnection, report: _Report) -> _Audited | None:
    """Return the former options of the process; if it is new, of the process of its role that reported last."""
    if report.audited_digest is not None:
        return _Audited(
            source=report.source, digest=report.audited_digest, options=report.audited_options or {}
        )
    row = (await connection.execute(_LAST, {"role": report.role})).one_or_none()
    if row is None:
        return None
    return _Audited(source=row.source, digest=row.audited_digest, options=row.audited_options)


def _json(state: Any) -> str | None:
    return None if state is None else msgspec.json.encode(state).decode()
