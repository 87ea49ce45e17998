"""The audit: who changed what and when, in a chain of hashes to which entries can only be added.

The function `audit_add` of the database writes an entry, if the role of its caller may say that it did so: the user that Postgres authenticated, the server's clock, the next
number, and the SHA-256 of the entry together with the hash of the entry before. Whoever calls it in the transaction of the
action cannot have one without the other. No role may write the table, and a trigger refuses changes even to its owner.

The owner of the database can remove that trigger. `verify` then finds the first entry that was changed, removed or moved.
An owner who computes all later hashes again, or removes the newest entries, is found by a head that was kept elsewhere.
"""

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Self

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.errors import OperatorError

_ADD: Final = text("""
    select audit_add(:action, :model, :subject, cast(:before as jsonb), cast(:after as jsonb), :note)
""")
_WHO: Final = text("select session_user")
_LIST: Final = text("""
    select seq, at, actor, action, model, subject, before, after, note from audit
    where (cast(:since as timestamptz) is null or at >= :since) and (:by = '' or actor = :by)
        and (:action = '' or action = :action)
    order by seq
""")
_NEWEST: Final = text("""
    select seq, at, actor, action, model, subject, before, after, note from audit
    where action = any(:actions) and (:subject = '' or subject = :subject) order by seq desc limit 1
""")
_LATEST: Final = text("""
    select seq, at, actor, action, model, subject, before, after, note from audit
    where (cast(:begin as timestamptz) is null or at >= :begin) and (cast(:end as timestamptz) is null or at < :end)
        and (:model = '' or model in ('', :model)) and action <> all(:without)
    order by seq desc limit :most
""")
_PAGE: Final = 1000
_LEAST: Final = -(1 << 63)
_CHAIN: Final = text(
    """
    select seq, (extract(epoch from at) * 1000000)::bigint as at_us, actor, action, model, subject,
        before::text as before, after::text as after, note, hash
    from audit where seq > :after_seq order by seq limit :most
""".replace("::", "\\:\\:")
)
MOST_FINDINGS: Final = 100
_LONGEST_STATE: Final = 200_000  # characters; `audit_add` refuses more than 256 KiB, spaces and all
_LEAST_PART: Final = 100


class Action(StrEnum):
    """What was done, as the command is called."""

    PAUSE = "pause"
    RESUME = "resume"
    PAUSE_SEEN = (
        "pause seen"  # a pause or its end that the monitor found in NATS, without an entry of its command
    )
    PAUSE_LOCAL = "pause local"  # at one process, by its socket or its file; it reported so itself
    BASELINE_ACCEPT = "baseline accept"
    BASELINE_FREEZE = "baseline freeze"
    BASELINE_KEEP = "baseline keep"
    BASELINE_IMPORT = "baseline import"
    SLICES_RETIRE = "slices retire"
    SLICES_RESTORE = "slices restore"
    SLICES_FORGET = "slices forget"
    SLICES_FIT = "slices fit"
    CONFIGURATION = "configuration"
    SETUP_NATS = "setup nats"
    DB_UPGRADE = "db upgrade"
    LABELS_LOAD = "labels load"
    SETUP_POSTGRES = "setup postgres"
    EXEMPLARS_ERASE = "exemplars erase"
    PRIVACY_ERASE = "privacy erase"
    ALERT_ACK = "alert ack"
    ALERT_UNACK = "alert unack"
    ALERT_NOTE = "alert note"
    GATE = "gate"  # the verdict of a gate on live traffic; the database's function `gate_end` adds it
    ALERT_CLOSE = "alert close"
    INCIDENT_MITIGATE = "incident mitigate"
    INCIDENT_REOPEN = "incident reopen"
    INCIDENT_CLOSE = "incident close"
    STREAM_DROP = "stream drop"


SET_UP: Final = (Action.DB_UPGRADE, Action.SETUP_POSTGRES, Action.SETUP_NATS, Action.PAUSE_SEEN)
"""What decides about no verdict: the set-up of the database and of NATS."""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry, as people read it.

    Parameters
    ----------
    actor
        The user that Postgres authenticated.
    subject
        What was changed; may be empty.
    before, after
        Former and new state; None: there is none, or it is unknown.
    note
        The person's reason, or empty.
    """

    seq: int
    at: datetime
    actor: str
    action: str
    model: str
    subject: str
    before: Any
    after: Any
    note: str


class ChainHead(msgspec.Struct, frozen=True, kw_only=True):
    """Number and hash of the newest entry; 0 and no bytes before the first one."""

    seq: int = 0
    hash: bytes = b""

    def __str__(self) -> str:
        return f"{self.seq}:{self.hash.hex()}"

    @classmethod
    def parse(cls, written: str) -> Self:
        """Return the head that `str` has written.

        Raises
        ------
        OperatorError
            It is none.
        """
        number, _, digest = written.partition(":")
        try:
            head = cls(seq=int(number), hash=bytes.fromhex(digest))
        except ValueError:
            head = cls(seq=-1)
        if head.seq < 0 or len(head.hash) != (32 if head.seq else 0):
            raise OperatorError(
                f"`{written[:80]}` is not a head of the audit: give the last line of an earlier `quantdrift audit verify`,"
                " such as 12:0f3a..."
            )
        return head


class BrokenLink(msgspec.Struct, frozen=True, kw_only=True):
    """A place where the chain is broken.

    Parameters
    ----------
    seq
        The first entry that does not fit.
    problem
        In words.
    """

    seq: int
    problem: str


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a verification; the chain is intact if there are no findings."""

    n: int
    head: ChainHead
    findings: tuple[BrokenLink, ...]


class ChainRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row, with every value in the form in which it is hashed."""

    seq: int
    at_us: int
    actor: str
    action: str
    model: str
    subject: str
    before: str | None
    after: str | None
    note: str
    hash: bytes


def canonical(row: ChainRow, previous: bytes) -> bytes:
    """Return the bytes whose SHA-256 is the hash of `row`, after an entry with the hash `previous`.

    Each field is its length in bytes, a colon and its bytes, or `-` for null. So no two different rows, or different
    predecessors, have the same bytes.
    """
    fields = (
        previous.hex(),
        str(row.seq),
        str(row.at_us),
        row.actor,
        row.action,
        row.model,
        row.subject,
        row.before,
        row.after,
        row.note,
    )
    return b"".join(
        b"-" if field is None else b"%d:%b" % (len(encoded := field.encode()), encoded) for field in fields
    )


async def add(
    connection: AsyncConnection,
    action: Action,
    *,
    model: str = "",
    subject: str = "",
    before: Any = None,
    after: Any = None,
    note: str = "",
) -> int:
    """Add an entry in the transaction of the action itself, and return its number.

    Call it last: from here to the end of the transaction every other entry waits.

    Parameters
    ----------
    subject
        What is changed, by its id: an entry is never deleted, and names of slices may be values of clients.
    before, after
        Former and new state, as JSON can say it: no payload, and no secret.
    note
        The person's reason.

    Raises
    ------
    OperatorError, RetryError
        As `Database.begin`: the transaction cannot be committed any more.
    """
    values = {
        "action": action.value,
        "model": model,
        "subject": subject,
        "before": _json(before),
        "after": _json(after),
        "note": note,
    }
    return int(await connection.scalar(_ADD, values) or 0)


async def who(connection: AsyncConnection) -> str:
    """Return the user that Postgres authenticated, as `actor` of an entry."""
    return str(await connection.scalar(_WHO))


async def entries(
    connection: AsyncConnection, *, since: datetime | None = None, by: str = "", action: str = ""
) -> list[AuditEntry]:
    """Return entries, oldest first: since a time (aware), of one actor, of one action."""
    rows = await connection.execute(_LIST, {"since": since, "by": by, "action": action})
    return [AuditEntry(**row) for row in rows.mappings()]


async def latest(
    connection: AsyncConnection,
    most: int,
    *,
    begin: datetime | None = None,
    end: datetime | None = None,
    model: str = "",
    without: Sequence[Action] = (),
) -> list[AuditEntry]:
    """Return the newest entries, newest first: of a time, about one model or about none, without some actions."""
    values = {"begin": begin, "end": end, "model": model, "without": list(without), "most": most}
    return [AuditEntry(**row) for row in (await connection.execute(_LATEST, values)).mappings()]


async def newest(
    connection: AsyncConnection, actions: Sequence[Action], subject: str = ""
) -> AuditEntry | None:
    """Return the newest entry of any of the actions, about `subject` if it is not empty; None: there is none."""
    wanted = {"actions": [action.value for action in actions], "subject": subject}
    row = (await connection.execute(_NEWEST, wanted)).mappings().one_or_none()
    return None if row is None else AuditEntry(**row)


async def verify(connection: AsyncConnection, from_head: ChainHead | None = None) -> Verified:
    """Compute every hash again, and return where the chain is broken: at most `MOST_FINDINGS` places.

    Parameters
    ----------
    from_head
        The head of an earlier verification, kept outside of the database; its entry must be there unchanged.
    """
    head, n = ChainHead(), 0
    findings: list[BrokenLink] = []
    kept = from_head or ChainHead()
    async for row in _rows(connection):
        n += 1
        if row.seq < 1:
            findings.append(BrokenLink(seq=row.seq, problem=f"entry {row.seq}: numbers begin with 1"))
            continue
        if row.seq != head.seq + 1:
            findings.append(_missing(head.seq + 1, row.seq - 1))
        elif hashlib.sha256(canonical(row, head.hash)).digest() != row.hash:
            findings.append(
                BrokenLink(
                    seq=row.seq,
                    problem=f"entry {row.seq} was changed, or the one before was: its hash does not fit",
                )
            )
        if row.seq == kept.seq and row.hash != kept.hash:
            findings.append(
                BrokenLink(
                    seq=row.seq,
                    problem=f"entry {row.seq} has another hash than when its head was kept: it, or one before, was written"
                    " again",
                )
            )
        head = ChainHead(seq=row.seq, hash=row.hash)
    if head.seq < kept.seq:
        findings.append(_missing(head.seq + 1, kept.seq))
    return Verified(n=n, head=head, findings=tuple(findings[:MOST_FINDINGS]))


def _missing(first: int, last: int) -> BrokenLink:
    which = f"entry {first} is" if first == last else f"entries {first} to {last} are"
    return BrokenLink(seq=first, problem=f"{which} missing")


async def _rows(connection: AsyncConnection) -> AsyncIterator[ChainRow]:
    last = _LEAST
    while True:
        page = (await connection.execute(_CHAIN, {"after_seq": last, "most": _PAGE})).mappings().all()
        for row in page:
            yield ChainRow(**row)
        if len(page) < _PAGE:
            return
        last = page[-1]["seq"]


def _json(state: Any) -> str | None:
    """Return a state as JSON; the largest parts of one that is longer than the audit keeps are left out, with their length."""
    if state is None:
        return None
    written = msgspec.json.encode(state).decode()
    parts = dict(state) if isinstance(state, Mapping) else {}
    while len(written) > _LONGEST_STATE and parts:
        lengths = {name: len(msgspec.json.encode(part)) for name, part in parts.items()}
        longest = max(lengths, key=lengths.__getitem__)
        if lengths[longest] < _LEAST_PART:
            break
        parts[longest] = f"left out: {lengths[longest]} bytes"
        written = msgspec.json.encode(parts).decode()
    return written
