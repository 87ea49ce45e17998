"""Write the pages that are generated from the code: `python docs/generate.py`, or `make docs`.

A test compares each page with what this module returns.
"""

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from quantdrift.cli.main import main
from quantdrift.core import telemetry
from quantdrift.core.config.render import default_toml, reference_markdown
from quantdrift.storage.admin.database_docs import page as database_markdown
from quantdrift.storage.monitor.events import NoiseEvent
from quantdrift.storage.monitor.explanation import Explanation

ROOT = Path(__file__).resolve().parent.parent


def pages() -> dict[str, str]:
    """Return the text of every generated file, keyed by its path from the root."""
    return {
        "config.toml": default_toml(),
        "docs/reference/configuration.md": reference_markdown(),
        "docs/reference/database.md": database_markdown(),
        "docs/reference/telemetry.md": telemetry_markdown(),
        "docs/reference/command-line.md": command_markdown(),
    }


def telemetry_markdown() -> str:
    """Return the page of instruments."""
    lines = [
        "# Telemetry reference",
        "",
        "Generated from the code by `make docs`. Every role serves its instruments on its admin port at `/metrics`",
        "(Prometheus names: dots become underscores, the unit and `_total` are appended); the monitor also exports by",
        "OTLP (gRPC) to `telemetry.otlp_endpoint`.",
        "",
        "Alert events are OTLP log records named `quantdrift.slice.transition`, one per change of verdict, sent at",
        "least once, with the fields of the `transition` table as flat `quantdrift.*` attributes. Severity is ERROR",
        "when a slice fires, WARN for a warning, INFO when it is resolved. The body is the text for the person on call",
        "([how to read it](../how-to/alerts.md#read-it)); the time is that of the traffic that decided, and the observed time",
        "is when the event was sent. The attributes below explain an alert that",
        "opens or escalates. Unknown values are left out; a part of a move has the unit of the metric that decided.",
        "",
        "An event named `quantdrift.noise` says that a reference or candidate differs from itself by more than",
        "half of a budget (WARN), or no longer does (INFO). Its attributes, with the same prefix:",
        f"{', '.join(f'`{name}`' for name in NoiseEvent.__struct_fields__)}.",
        "",
        "An event named `quantdrift.audit.head`, once a day, has the [head of the audit](../how-to/audit.md) in `quantdrift.head`,",
        "the number of entries in `quantdrift.n`, and in `quantdrift.intact` whether all hashes fit; its severity is ERROR if not.",
        "",
        "| attribute | meaning |",
        "|---|---|",
        *(f"| `quantdrift.{name}` | {meaning} |" for name, meaning in _explained()),
        "",
        "| instrument | kind | unit | meaning |",
        "|---|---|---|---|",
    ]
    instruments = (value for value in vars(telemetry).values() if isinstance(value, telemetry.Instrument))
    lines += [f"| `{i.name}` | {i.kind.value} | `{i.unit}` | {i.description} |" for i in instruments]
    return "\n".join(lines) + "\n"


def _explained() -> Iterator[tuple[str, str]]:
    """Yield the attributes of an explanation with their meanings."""
    fields = msgspec.json.schema(Explanation)["$defs"][Explanation.__name__]["properties"]
    for name, field in fields.items():
        yield name, field["description"]


def command_markdown() -> str:
    """Return the page of commands: each one's own help text."""
    lines = [
        "# Command line reference",
        "",
        "Generated from the help texts by `make docs`. Exit codes: 0 done, 1 a failure that may pass, 2 a person must",
        "act (the message says what to do). Each option `--NAME` of the configuration is in `configuration.md`.",
        "",
    ]
    for path, command, context in _commands(main, _context(main, "quantdrift", None)):
        lines += [f"## `{path}`", "", "```text", command.get_help(context), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _commands(
    command: click.Command, context: click.Context
) -> Iterator[tuple[str, click.Command, click.Context]]:
    yield context.command_path, command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if inner := command.get_command(context, name):
                yield from _commands(inner, _context(inner, name, context))


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    return click.Context(
        command, info_name=name, parent=parent, terminal_width=96, help_option_names=["-h", "--help"]
    )


if __name__ == "__main__":
    for path, text in pages().items():
        (ROOT / path).write_text(text, encoding="utf-8")
        click.echo(f"wrote {path}")
