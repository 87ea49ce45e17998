"""A game day: what a person on call sees of each fault, as one HTML page to read.

    python -m benchmarks.gameday [--out out/gameday.html] [--fault "kill nats"] [--hold 15] [--seed 1] [--no-mount]

It runs the stack of the storm (`python -m benchmarks.storm`) with the live page, lets one slice drift, and does one fault after another. While each
is in force it asks what somebody would ask who is woken: `quantdrift status`, `alerts list`, `incidents list`, the first page, and it
notes each new line of the logs and each event that the collector got. Afterwards the page says for each fault when it was over, how many requests failed, and
what was to be seen: whether the first line names the cause, and what is too much.

It decides nothing: the storm counts, this is read.
"""

import argparse
import asyncio
import contextlib
import html
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from benchmarks.storm.faults import FAULTS, Fault, Storm, Strike
from benchmarks.storm.stack import Stack, running
from benchmarks.storm.traffic import Traffic

CHOSEN: Final = (
    "kill relay worker",
    "kill sidecar supervisor",
    "break configuration",
    "kill shadow",
    "kill leading monitor",
    "away reference",
    "away collector",
    "away nats",
    "away postgres",
    "disk full",
    "kill up",
)
"""What is done by default: what an operator meets in a year."""
_N_CONNECTIONS: Final = 8
_BEFORE_S: Final = 20.0
_PATIENCE_S: Final = 120.0
_LOOK_AFTER_S: Final = 6.0
_MOST_LINES: Final = 200
_COMMANDS: Final = (("status",), ("alerts", "list"), ("incidents", "list"))
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid #ddd; }
pre { background: #f6f6f4; padding: .6rem; overflow-x: auto; white-space: pre-wrap; }
iframe { width: 100%; height: 32rem; border: 1px solid #ccc; }
summary { cursor: pointer; font-weight: 600; }
"""


class Sight(msgspec.Struct, kw_only=True):
    """What was to be seen of one fault, or of the stack without one.

    Parameters
    ----------
    title
        The fault.
    at
        When it began.
    answers
        What commands printed while it was in force, by the command.
    page
        The first page then, as HTML; empty: it did not answer.
    lines
        New lines of the logs, by process.
    events
        Names and texts of what the collector got.
    outcome
        When it was over and what it cost, in words.
    """

    title: str
    at: datetime
    answers: dict[str, str] = {}
    page: str = ""
    lines: dict[str, list[str]] = {}
    events: list[str] = []
    outcome: str = ""


class Logs:
    """The logs of a stack, read from where they ended the last time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}

    def new(self) -> dict[str, list[str]]:
        """Return the lines that have come since the last call, by process."""
        lines_by_log = {}
        for path in sorted(self._directory.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                content = file.read()
                self._read[path] = file.tell()
            if lines := content.decode(errors="replace").splitlines():
                lines_by_log[path.stem] = lines
        return lines_by_log


def main() -> int:
    """Run it, write the page, and return 1 if it could not be finished."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three faults alone")
    parser.add_argument("--out", type=Path, default=Path("out/gameday.html"))
    parser.add_argument("--fault", action="append", default=[], metavar="NAME", help="may be repeated")
    parser.add_argument("--hold", type=float, default=15.0, help="seconds that something is away")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-mount", action="store_true", help="mount nothing: no full disk")
    arguments = parser.parse_args()
    by_name = {fault.name: fault for fault in FAULTS}
    if unknown := set(arguments.fault) - set(by_name):
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    names = arguments.fault or (CHOSEN[:3] if arguments.quick else CHOSEN)
    sights: list[Sight] = []
    problem = ""
    try:
        with running(may_mount=not arguments.no_mount, keep=None, has_page=True) as stack:
            asyncio.run(
                _day(stack, [by_name[name] for name in names], arguments.hold, arguments.seed, sights)
            )
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - what was seen so far is written
        problem = f"{type(error).__name__}: {error}"
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(as_html(sights, problem), encoding="utf-8")
    print(f"{arguments.out}: {len(sights)} sights{f'; it broke: {problem}' if problem else ''}")
    return 1 if problem else 0


async def _day(stack: Stack, faults: Sequence[Fault], hold_s: float, seed: int, sights: list[Sight]) -> None:
    await stack.start()
    logs = Logs(stack.logs)
    traffic = Traffic(stack.ports["relay"], seed=seed, rate_per_s=20.0, n_connections=_N_CONNECTIONS)
    clients, keeper = asyncio.create_task(traffic.run()), asyncio.create_task(stack.keep())
    storm = Storm(stack, traffic, random=Random(seed), hold_s=hold_s, patience_s=_PATIENCE_S)
    try:
        await asyncio.sleep(_BEFORE_S)
        traffic.drifts_from_s = time.monotonic()
        sights.append(await _seen(stack, logs, "nothing: it works, and one slice drifts", _BEFORE_S))
        for fault in faults:
            watching = asyncio.create_task(_seen(stack, logs, fault.name, min(_LOOK_AFTER_S, hold_s / 2)))
            strike = await storm.strike(fault)
            sight = await watching
            for name, lines in logs.new().items():
                sight.lines.setdefault(name, []).extend(lines)
            sight.outcome = _outcome(strike, traffic)
            sights.append(sight)
            print(f"{time.strftime('%H:%M:%S')} {fault.name}: {sight.outcome}", file=sys.stderr, flush=True)
        sights.append(await _seen(stack, logs, "the end", _LOOK_AFTER_S))
    finally:
        traffic.end()
        for task in (clients, keeper):
            task.cancel()
        await asyncio.gather(clients, keeper, return_exceptions=True)


async def _seen(stack: Stack, logs: Logs, title: str, after_s: float) -> Sight:
    """Return what is to be seen some time after something has begun."""
    sight = Sight(title=title, at=datetime.now().astimezone())
    n_before = len(stack.collector.events)
    await asyncio.sleep(after_s)
    for command in _COMMANDS:
        sight.answers[" ".join(command)] = await stack.said(*command)
    with contextlib.suppress(OSError):
        sight.page = await asyncio.to_thread(_page, stack.ports["web"])
    sight.lines = logs.new()
    sight.events = [f"{event.name}: {event.body}" for event in stack.collector.events[n_before:]]
    return sight


def _page(port: int) -> str:
    """Return the first page; where the page says that it cannot be shown, what it says."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
            text: str = answer.read().decode()
    except urllib.error.HTTPError as refused:
        text = refused.read().decode()
    return text


def _outcome(strike: Strike | None, traffic: Traffic) -> str:
    if strike is None:
        return "nobody to do it to"
    failed = sum(strike.covers(failure.began_s, failure.ended_s) for failure in traffic.failures)
    note = f"; {strike.note}" if strike.note else ""
    return f"compared again after {strike.recovery_s:.1f} s, {failed} requests failed{note}"


def as_html(sights: Sequence[Sight], problem: str = "") -> str:
    """Return the page."""
    rows = "".join(
        f"<tr><td><a href='#{number}'>{html.escape(sight.title)}</a></td><td>{html.escape(sight.outcome)}</td>"
        f"<td>{html.escape(_first(sight.answers.get('status', '')))}</td>"
        f"<td>{sum(map(len, sight.lines.values()))}</td><td>{len(sight.events)}</td></tr>"
        for number, sight in enumerate(sights)
    )
    parts = "".join(_part(number, sight) for number, sight in enumerate(sights))
    broke = f"<p><strong>It broke: {html.escape(problem)}</strong></p>" if problem else ""
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Game day</title>"
        f"<style>{_STYLE}</style><h1>Game day</h1>{broke}"
        "<p>What somebody sees who is woken while a fault is in force. Read for each: does the first line name the cause, does it say what to do,"
        " and is anything said that is not true?</p>"
        "<table><tr><th>fault</th><th>what it cost</th><th>first line of status</th><th>lines of logs</th><th>events</th></tr>"
        f"{rows}</table>{parts}</html>"
    )


def _part(number: int, sight: Sight) -> str:
    answers = "".join(
        f"<h3>quantdrift {html.escape(command)}</h3><pre>{html.escape(text)}</pre>"
        for command, text in sight.answers.items()
    )
    logs = "".join(
        f"<h3>log of {html.escape(name)}</h3><pre>{html.escape(_shortened(lines))}</pre>"
        for name, lines in sight.lines.items()
    )
    events = f"<h3>events</h3><pre>{html.escape(chr(10).join(sight.events))}</pre>" if sight.events else ""
    page = (
        f"<details><summary>the first page</summary><iframe sandbox srcdoc='{html.escape(sight.page)}'></iframe></details>"
        if sight.page
        else "<p>The page did not answer.</p>"
    )
    return (
        f"<h2 id='{number}'>{html.escape(sight.title)}</h2><p>{sight.at:%H:%M:%S}. {html.escape(sight.outcome)}</p>"
        f"{answers}{events}{logs}{page}"
    )


def _first(text: str) -> str:
    """Return the first line of a text; where it ends with a colon, with the line that it announces."""
    lines = [line.strip() for line in text.splitlines() if line.strip()][:2]
    return " ".join(lines if lines and lines[0].endswith(":") else lines[:1])


def _shortened(lines: Sequence[str]) -> str:
    left_out = len(lines) - _MOST_LINES
    shown = [*lines[:_MOST_LINES], f"... {left_out} more lines"] if left_out > 0 else lines
    return "\n".join(shown)


if __name__ == "__main__":
    sys.exit(main())
