"""A month in half an hour: the real processes of `quantdrift up` by a clock that jumps a day at a time.

    python -m benchmarks.month [--quick] [--days 30] [--traffic 15] [--rate 40] [--seed 1] [--keep DIR]

It begins with the newest release (`deploy/released.toml`). Each day clients send some hundred requests through the relay, whose answers
are compared byte for byte; when all of them are compared, folded and counted, the clock of all processes jumps by a day. In the course of
the month

- partitions are made and dropped, and what is older than a week is deleted;
- the key that encrypts exchanges is rotated, and the old one removed two days later;
- the certificate of the intake lasts ten days: it is renewed in time, and once it ends two days before that;
- one slice drifts for some days, and recovers;
- `quantdrift up` is stopped and started again as the tree.

At its end every request is accounted for, nothing was restarted, each line of the log is JSON, no line is an error but those that belong
to what was done, one alert has paged, and memory and tables have not grown since a week after the upgrade.

What is not covered: NATS has the real time (`benchmarks.shifted_clock`), so that nothing expires in the stream by its age. Each day has
some seconds of traffic, in one hour. The certificate of the embedded NATS lasts for ten years.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import asyncpg
import msgspec
import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from benchmarks.result import Goal, finish
from benchmarks.shifted_clock import ShiftedClock
from benchmarks.storm.exchanges import DRIFTING
from benchmarks.storm.stack import Stack, ended, new_directory
from benchmarks.storm.traffic import Traffic
from deploy.released import unpack
from quantdrift.core.process.states import STATES, read_states
from quantdrift.storage.schema.partitions import AHEAD_DAYS

_N_CONNECTIONS: Final = 4
_DRAIN_S: Final = 300.0
_START_S: Final = 600.0  # the first start of a tree compiles the detectors
_POLL_S: Final = 0.3
_START_HOUR: Final = 6
_CERTIFICATE_DAYS: Final = 10
_MB: Final = 1e6
_GROWS: Final = 1.15
_SPARE_MB: Final = 12.0
_SLICE: Final = f"scanner={DRIFTING}"
Figures = dict[str, float | int | str | None]

EXPECTED: Final = (
    "unverified, and without canaries",  # the reference, as it is configured
    "one answer costs .* of processor time",  # so few of them share the cost of a batch
    # For a moment, after a day.
    "no policy of the monitor is in effect: the configuration's rates are used",
    "the monitor's policy is refused, the configuration's rates are in effect: stale",
)
"""Warnings and errors that belong to what was done: no others may stand in the log."""
_CONNECT: Final = """
import socket, ssl, sys
context = ssl.create_default_context(cafile=sys.argv[2])
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10) as plain:
    try:
        context.wrap_socket(plain, server_hostname="127.0.0.1").close()
    except ssl.SSLCertVerificationError as error:
        sys.exit(error.verify_message)
"""
_COMPILE: Final = "from quantdrift.drift.detectors.protocol import compile_all; compile_all()"
_TALLIES: Final = """
    select distinct on (source, boot, stratum) source, boot, stratum, offered, taken, thinned, published, lost
    from tally order by source, boot, stratum, sequence desc
"""
_COMPARED: Final = """
    select attributes ->> 'header.x-request-id' as request from comparison where captured_at >= $1
"""
_FOLDED: Final = """
    select coalesce(sum(n_items), 0)::bigint as n from rollup_day join slice on slice.id = slice_id where predicate = 'true'
"""
_ALERTS: Final = """
    select slice.name, severity::text, opened_at, resolved_at from alert join slice on slice.id = slice_id order by opened_at
"""
_PARTITIONS: Final = """
    select child.relname as name from pg_inherits join pg_class child on child.oid = inhrelid
    where inhparent = 'comparison'::regclass order by 1
"""
_OLDEST: Final = """
    select least(
        (select min(captured_at) from comparison), (select min(stored_at) from batch), (select min(quarantined_at) from quarantine)
    ) as at
"""
_SIZES: Final = """
    select pg_database_size(current_database())::float8 as bytes, (select count(*) from comparison) as comparison,
        (select count(*) from tally) as tally, (select count(*) from batch) as batch
"""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is done, and on which day.

    Parameters
    ----------
    days
        The first one is 1.
    traffic_s, rate_per_s
        Of each day.
    retention_days
        Of the database.
    drifts, recovers
        The first day with the drift, and the first without it.
    rotates, upgrades
        The days of the new key and of the upgrade.
    renewed
        The days on which the intake gets a new certificate.
    steady
        The day from which on memory and tables must not grow.
    """

    days: int = 30
    traffic_s: float = 15.0
    rate_per_s: float = 40.0
    retention_days: int = 7
    drifts: int = 8
    recovers: int = 12
    rotates: int = 13
    upgrades: int = 15
    renewed: tuple[int, ...] = (1, 9, 21)
    steady: int = 23

    def ends(self, day: int) -> bool:
        """Return whether the certificate of the intake has ended on a day."""
        return day - max(at for at in self.renewed if at <= day) >= _CERTIFICATE_DAYS


QUICK: Final = Plan(
    days=5,
    traffic_s=4.0,
    retention_days=2,
    drifts=9,
    recovers=10,
    rotates=2,
    upgrades=3,
    renewed=(1,),
    steady=4,
)


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured at the end of a day.

    Parameters
    ----------
    number, at
        Of the day, and its end by the clock of the processes.
    memory_mb
        Of each process: what it has for itself, and its part of what it shares.
    rows
        Of the tables that retention keeps short.
    database_mb
        All of the database.
    partitions
        The days that have one.
    oldest
        The time of the oldest row that retention deletes.
    """

    number: int
    at: datetime
    memory_mb: dict[str, float]
    rows: dict[str, int]
    database_mb: float
    partitions: tuple[date, ...]
    oldest: datetime | None


class Account(msgspec.Struct, kw_only=True):
    """The counts of the whole month, collected day by day, since retention deletes what they come from.

    Parameters
    ----------
    tallies
        The newest of each start of a sidecar and stratum.
    compared
        The requests with a comparison: their ids, and how many rows.
    folded, quarantined, expired
        By the monitor; by the shadow, by reason; in the stream.
    """

    tallies: dict[tuple[str, str, str], dict[str, Any]] = {}
    compared: Counter[str] = msgspec.field(default_factory=Counter)
    folded: int = 0
    quarantined: dict[str, str] = {}
    expired: int = 0

    def total(self, name: str) -> int:
        """Return one of the counts of the sidecars."""
        return sum(int(tally[name]) for tally in self.tallies.values())

    @property
    def lost(self) -> dict[str, int]:
        """What the sidecars have lost, by reason."""
        lost: Counter[str] = Counter()
        for tally in self.tallies.values():
            lost.update({reason: int(n) for reason, n in tally["lost"].items() if int(n)})
        return dict(lost)

    @property
    def counted(self) -> int:
        """Requests that are accounted for."""
        return (
            self.total("offered") - self.total("taken") + self.total("thinned") + sum(self.lost.values())
            + len(self.compared) + len(self.quarantined) + self.expired
        )  # fmt: skip


class Month:
    """The stack, its clock, and what was seen.

    Parameters
    ----------
    directory
        For all files; other users may read it.
    before
        The code of the release that it begins with.
    """

    def __init__(self, plan: Plan, directory: Path, before: Path, seed: int) -> None:
        self._plan = plan
        self._directory = directory
        self._clock = ShiftedClock(directory)
        morning = datetime.now(UTC).replace(hour=_START_HOUR, minute=0, second=0) + timedelta(days=1)
        self._clock.shift = morning - datetime.now(UTC)
        self._keys = directory / "keys.json"
        self._authority = directory / "intake.pem"
        variables = {
            **self._clock.environment,
            "PYTHONSAFEPATH": "1",
            "QUANTDRIFT__TELEMETRY__LOG_JSON": "true",
            "QUANTDRIFT__SIDECAR__TALLY_INTERVAL_S": "1",
            "QUANTDRIFT__SAMPLING__REPLAYS_PER_S": "30",
            "QUANTDRIFT__STORAGE__RETENTION_DAYS": str(plan.retention_days),
            "QUANTDRIFT__STREAM__PAYLOAD_KEY_FILE": str(self._keys),
            "QUANTDRIFT__INTAKE__CERTIFICATE_FILE": str(self._authority),
            "QUANTDRIFT__INTAKE__KEY_FILE": str(directory / "intake.key"),
            "QUANTDRIFT_INTAKE_TOKEN": "a-token-of-the-soak",
        }
        self._path = variables["PYTHONPATH"]
        variables["PYTHONPATH"] = os.pathsep.join([str(before), self._path])
        self.stack = Stack(directory / "stack", may_mount=False, has_spares=False, variables=variables)
        self._traffic: Traffic
        self._seed = seed
        self.account = Account()
        self.days: list[Day] = []
        self.problems: list[str] = []
        self.alerts: list[asyncpg.Record] = []
        self.n_restarts = 0
        self._log_at_upgrade = 0

    async def run(self) -> None:
        """Live through all days."""
        stack, plan = self.stack, self._plan
        traffic = self._traffic = Traffic(
            stack.ports["relay"], seed=self._seed, rate_per_s=plan.rate_per_s, n_connections=_N_CONNECTIONS
        )
        await self._keys_do("new", str(self._keys))
        self._renew()
        await stack.start()
        for number in range(1, plan.days + 1):
            began_s, began_at = time.monotonic(), self._clock.now()
            await self._events(number)
            traffic.drifts_from_s = 0.0 if plan.drifts <= number < plan.recovers else float("inf")
            sending = asyncio.create_task(traffic.run())
            await asyncio.sleep(plan.traffic_s)
            traffic.end()
            await sending
            await self._drained(began_at)
            await self._maintained()
            await self._look_at_certificate(number)
            self.days.append(await self._measured(number))
            _say(self.days[-1], time.monotonic() - began_s)
            if number < plan.days:
                self._clock.shift += timedelta(days=1)
        self.n_restarts += self._restarts()
        self.alerts = await stack.rows(_ALERTS)

    async def _events(self, number: int) -> None:
        plan = self._plan
        if number == plan.rotates:
            await self._keys_do("rotate", str(self._keys), "--after", "1h")
        if number == plan.rotates + 2:
            listed = json.loads(await self._keys_do("list", str(self._keys), "--json"))
            await self._keys_do("remove", str(self._keys), listed[0]["id"])
        if number in plan.renewed and number > 1:
            self._renew()
        if number == plan.upgrades:
            self.n_restarts += self._restarts()
            up = self.stack.kept("up")
            await asyncio.to_thread(up.stop, 75.0)
            self._log_at_upgrade = (self.stack.logs / "up.log").stat().st_size
            up.environment["PYTHONPATH"] = self._path
            up.start()
            await self.stack.until(self.stack.all_ready, _START_S)

    def _restarts(self) -> int:
        """Return how often the present `quantdrift up` has started one of its processes again."""
        return sum(sum(part.restarts.values()) for part in read_states(self.stack.data / STATES).values())

    async def _keys_do(self, *arguments: str) -> str:
        """Run `quantdrift keys` by the clock of the processes, and return what it prints."""
        environment = {**os.environ, **self._clock.environment}
        command = [sys.executable, "-m", "quantdrift", "keys", *arguments]
        done = await asyncio.to_thread(
            subprocess.run, command, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr}")
        return str(done.stdout)

    def _renew(self) -> None:
        """Give the intake a certificate that lasts ten days from now."""
        key, now = ec.generate_private_key(ec.SECP256R1()), self._clock.now()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "intake")])
        address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
        certificate = (
            x509.CertificateBuilder()
            .issuer_name(name)
            .subject_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=_CERTIFICATE_DAYS) - timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(address, critical=False)
            .sign(key, hashes.SHA256())
        )
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        for path, content in (
            (self._directory / "intake.key", secret),
            (self._authority, certificate.public_bytes(serialization.Encoding.PEM)),
        ):
            new = path.with_suffix(".new")
            new.write_bytes(content)
            new.replace(path)

    async def _look_at_certificate(self, number: int) -> None:
        """Connect to the intake as a client of this day: it accepts the certificate until it ends, and again once it is renewed."""
        command = [sys.executable, "-c", _CONNECT, str(self.stack.ports["intake"]), str(self._authority)]
        environment = {**os.environ, **self._clock.environment}
        done = await asyncio.to_thread(
            subprocess.run, command, env=environment, capture_output=True, text=True, check=False
        )
        wanted = "certificate has expired" if self._plan.ends(number) else ""
        if done.stderr.strip() != wanted:
            self.problems.append(
                f"day {number}: the intake's certificate: {done.stderr.strip() or 'accepted'}"
            )

    async def _drained(self, since: datetime) -> None:
        """Wait until all that was sent is compared, folded and counted.

        Raises
        ------
        TimeoutError
            It is not, after five minutes.
        """
        until_s = time.monotonic() + _DRAIN_S
        before = Counter(self.account.compared)
        while True:
            await self._read(since, before)
            account = self.account
            ended = len(account.compared) + len(account.quarantined)
            if (
                account.total("offered") >= self._traffic.n_sent
                and account.total("published") <= ended
                and account.folded >= account.compared.total()
            ):
                return
            if time.monotonic() > until_s:
                raise TimeoutError(
                    f"{self._traffic.n_sent} sent, {account.total('offered')} offered, {account.total('published')} published,"
                    f" {ended} ended, {account.folded} folded, lost {account.lost}, {account.quarantined}"
                )
            await asyncio.sleep(_POLL_S)

    async def _read(self, since: datetime, before: Counter[str]) -> None:
        account, rows = self.account, self.stack.rows
        for row in await rows(_TALLIES):
            key = row["source"], row["boot"], row["stratum"]
            account.tallies[key] = {**dict(row), "lost": json.loads(row["lost"])}
        of_day = Counter(str(row["request"]) for row in await rows(_COMPARED, since))
        account.compared = before + of_day
        account.folded = (await rows(_FOLDED))[0]["n"]
        for row in await rows("select id::text, reason from quarantine"):
            account.quarantined[row["id"]] = row["reason"]
        account.expired = (await rows("select coalesce(sum(n), 0)::bigint as n from expiry"))[0]["n"]

    async def _maintained(self) -> None:
        """Wait until the leader has done the maintenance of this day."""
        until_s, today = time.monotonic() + _DRAIN_S, self._clock.now().date()
        ahead = f"comparison_{today + timedelta(days=AHEAD_DAYS):%Y%m%d}"
        while ahead not in {row["name"] for row in await self.stack.rows(_PARTITIONS)}:
            if time.monotonic() > until_s:
                raise TimeoutError(f"no partition {ahead} was made")
            await asyncio.sleep(_POLL_S)

    async def _measured(self, number: int) -> Day:
        sizes = (await self.stack.rows(_SIZES))[0]
        partitions = [row["name"].rpartition("_")[2] for row in await self.stack.rows(_PARTITIONS)]
        return Day(
            number=number,
            at=self._clock.now(),
            memory_mb=await asyncio.to_thread(_memory, self.stack),
            rows={name: sizes[name] for name in ("comparison", "tally", "batch")},
            database_mb=sizes["bytes"] / _MB,
            partitions=tuple(
                datetime.strptime(day, "%Y%m%d").replace(tzinfo=UTC).date()
                for day in partitions
                if day.isdigit()
            ),
            oldest=(await self.stack.rows(_OLDEST))[0]["at"],
        )

    def figures(self) -> Figures:
        """Return what the month came to."""
        account, traffic = self.account, self._traffic
        return {
            "days": len(self.days),
            "requests": traffic.n_sent,
            "failed": len(traffic.failures),
            "uncounted": len(traffic.answered) - account.counted,
            "lost": sum(account.lost.values()),
            "quarantined": len(account.quarantined),
            "expired": account.expired,
            "compared": len(account.compared),
            "doubled": account.compared.total() - len(account.compared),
            "unfolded": account.compared.total() - account.folded,
            "restarts": self.n_restarts,
            "partitions": len(self.days[-1].partitions),
            "database_mb": self.days[-1].database_mb,
            "memory_mb": sum(self.days[-1].memory_mb.values()),
        }

    def look_back(self) -> None:
        """Note what should not have been: in tables, memory, alerts and the log."""
        plan = self._plan
        for day in self.days:
            today = day.at.date()
            wanted = tuple(
                max(today - timedelta(days=plan.retention_days), day.partitions[0]) + timedelta(days=n)
                for n in range(len(day.partitions))
            )
            first = today - timedelta(days=plan.retention_days)
            if (
                day.partitions != wanted
                or day.partitions[0] < first
                or day.partitions[-1] != today + timedelta(days=AHEAD_DAYS)
            ):
                self.problems.append(
                    f"day {day.number}: the partitions are {day.partitions[0]} to {day.partitions[-1]}"
                )
            if day.oldest is not None and day.oldest < day.at - timedelta(days=plan.retention_days + 1):
                self.problems.append(f"day {day.number}: a row of {day.oldest} is kept")
        steady, last = (next(day for day in self.days if day.number == plan.steady), self.days[-1])
        for name, mb in last.memory_mb.items():
            if mb > _GROWS * steady.memory_mb.get(name, 0.0) + _SPARE_MB:
                self.problems.append(f"{name} grew from {steady.memory_mb.get(name, 0.0):.0f} to {mb:.0f} MB")
        paged = [alert for alert in self.alerts if alert["severity"] == "firing"]
        begin = self.days[0].at.date() - timedelta(days=1)
        of_drift = [
            alert for alert in paged
            if alert["name"] == _SLICE and plan.drifts <= (alert["opened_at"].date() - begin).days < plan.recovers
        ]  # fmt: skip
        if len(paged) != len(of_drift) or bool(of_drift) != (plan.drifts <= plan.days):
            self.problems.append(f"alerts: {[dict(alert) for alert in self.alerts]}")
        for line in self.unexpected():
            self.problems.append(f"log: {line}")

    def unexpected(self) -> list[str]:
        """Return the warnings and errors of the log that nothing explains, and the tree's lines that are not JSON; each once."""
        found: Counter[str] = Counter()
        content = (self.stack.logs / "up.log").read_bytes()
        n_before = content[: self._log_at_upgrade].count(b"\n")
        for number, line in enumerate(content.decode().splitlines()):
            try:
                said = json.loads(line)
                level, text = (
                    said["level"],
                    f"{said['role']} {said['level']} {said['logger']}: {said['message']}",
                )
            except (ValueError, KeyError, TypeError):
                level, text = "info" if number < n_before else "", f"not JSON: {line}"
            if level not in {"info", "debug"} and not any(re.search(one, text) for one in EXPECTED):
                found[text] += 1
        return [f"{text} ({n} times)" if n > 1 else text for text, n in found.items()]


def _memory(stack: Stack) -> dict[str, float]:
    """Return the memory of each process of the product, by its name; those of Postgres in one sum."""
    memory: defaultdict[str, float] = defaultdict(float)
    processes = stack.processes()
    # The sessions of Postgres write over their environment, by which the others are found.
    servers = [process for process in processes if _name(process) == "postgres"]
    for process in {*processes, *(session for server in servers for session in _children(server))}:
        with suppress(psutil.Error):
            memory[_name(process)] += process.memory_full_info().pss / _MB
    return {name: mb for name, mb in sorted(memory.items()) if name}


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children()
    return []


def _name(process: psutil.Process) -> str:
    line = []
    with suppress(psutil.Error):
        line = process.cmdline()
    text = " ".join(line)
    for word, name in (
        ("relay.worker", "relay"),
        ("capture.process", "capture"),
        ("intake.process", "intake"),
        ("sidecar.admin", "admin"),
        ("embedded", "keepers"),
        ("nats-server", "nats"),
        ("postgres", "postgres"),
    ):
        if word in text:
            return name
    roles = [word for word in ("sidecar", "shadow", "monitor", "up") if word in line]
    return roles[0] if "quantdrift" in text and roles else ""


def _say(day: Day, seconds: float) -> None:
    memory = " ".join(f"{name} {mb:.0f}" for name, mb in day.memory_mb.items())
    rows = " ".join(f"{name} {n:,}" for name, n in day.rows.items())
    print(
        f"day {day.number:2} {day.at:%Y-%m-%d %H:%M}  {seconds:5.1f} s  {rows}  database {day.database_mb:.0f} MB,"
        f" {len(day.partitions)} partitions  memory {sum(day.memory_mb.values()):.0f} MB: {memory}",
        flush=True,
    )


@contextmanager
def month(plan: Plan, seed: int, keep: Path | None = None) -> Iterator[Month]:
    """Unpack the newest release and prepare everything; end all processes afterwards."""
    with new_directory() as directory:
        before = unpack(_made(directory / "released"))
        for paths in (str(before), os.environ.get("PYTHONPATH", "")):
            # The monitor compiles them at its first start, with the lowest priority: minutes on a busy machine.
            environment = {**os.environ, "PYTHONPATH": paths}
            subprocess.run([sys.executable, "-P", "-c", _COMPILE], env=environment, check=True)
        _made(directory / "stack")
        month = Month(plan, directory, before, seed)
        with ended(month.stack):
            try:
                yield month
            finally:
                if keep is not None:
                    shutil.copytree(month.stack.logs, keep, dirs_exist_ok=True)


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def main() -> int:
    """Live through the month, and print what was seen; return 1 if something was not as it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="five days")
    parser.add_argument("--days", type=int, metavar="N")
    parser.add_argument("--traffic", type=float, metavar="SECONDS", help="of each day")
    parser.add_argument("--rate", type=float, metavar="PER_S")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the logs to it")
    given = parser.parse_args()
    plan = QUICK if given.quick else Plan()
    wanted = {"days": given.days, "traffic_s": given.traffic, "rate_per_s": given.rate}
    plan = msgspec.structs.replace(
        plan, **{name: value for name, value in wanted.items() if value is not None}
    )
    began_s = time.monotonic()
    with month(plan, given.seed, given.keep) as lived:
        asyncio.run(lived.run())
        lived.look_back()
    figures = lived.figures() | {
        "seconds": round(time.monotonic() - began_s),
        "problems": len(lived.problems),
    }
    for alert in lived.alerts:
        print(f"alert: {alert['name']} {alert['severity']} {alert['opened_at']:%Y-%m-%d %H:%M}")
    for problem in lived.problems:
        print(f"problem: {problem}")
    names = ("failed", "uncounted", "lost", "doubled", "unfolded", "restarts", "problems")
    goals = [Goal(name=name, value=abs(int(figures[name] or 0)), bound=0, unit="of them") for name in names]
    finish("month", figures, goals)
    return 1 if not all(goal.holds for goal in goals) else 0


if __name__ == "__main__":
    sys.exit(main())
