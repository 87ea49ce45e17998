"""The `quantdrift` command. Each subcommand imports only the packages that it needs."""

import difflib
import logging
import sys
from typing import Any, Final, NoReturn

import click

from quantdrift.cli.interrupt import INTERRUPTED, interruptible
from quantdrift.cli.options import LazyGroup
from quantdrift.core.errors import OperatorError, QuantdriftError, RetryError
from quantdrift.core.logs import logs_json

_LOG = logging.getLogger(__name__)
_COMMANDS: Final = {
    "init": ("run.init:init", "Write a config.toml that fits a model, its server and its traffic."),
    "up": ("run.serve:up", "Run everything on this host, with its own Postgres and NATS."),
    "demo": ("run.demo:demo", "Run the whole loop on digits: an alert, its cause, a repair."),
    "sidecar": ("run.serve:sidecar", "Relay inference traffic and capture a sample of it."),
    "shadow": ("run.serve:shadow", "Replay captured exchanges through the reference; compare."),
    "monitor": ("run.serve:monitor", "Watch the comparisons for drift; send alerts."),
    "web": ("run.web:web", "Serve the live page."),
    "setup": ("run.setup:setup", "Create users with the least rights at NATS and Postgres."),
    "status": ("look.status:status", "Show how far exchanges come, and what blocks them."),
    "triage": ("look.triage:triage", "List the slices with the strongest evidence of drift."),
    "incidents": ("look.incidents:incidents", "Show and close incidents."),
    "alerts": ("look.alerts:alerts", "Show, acknowledge, annotate and close alerts."),
    "slices": ("look.slices:slices", "Show, search, retire and fit slices."),
    "compare": ("look.compare:compare", "Compare two versions, periods or models, slice by slice."),
    "report": ("look.report:report", "Write the report of a week, or of any other time."),
    "export": ("look.export:export", "Export compared items to Parquet files, one for each day."),
    "plan": ("decide.plan:plan", "Predict detection delays and replay rates for each slice."),
    "baseline": ("decide.baseline:baseline", "Show and change the baselines that slices are compared with."),
    "labels": ("decide.labels:labels", "Draw, load and use true labels."),
    "policy": ("decide.policy:policy", "Show the sampling policy that the monitor publishes."),
    "pause": ("decide.pause:pause", "Pause sampling in the whole fleet, or of one model."),
    "resume": ("decide.pause:resume", "Resume sampling."),
    "backtest": ("decide.backtest:backtest", "Replay the stored history with another configuration."),
    "quantise": (
        "release.quantise:quantise",
        "Build the cheapest quantised model that passes on every slice.",
    ),
    "gate": ("release.gate:gate", "Judge whether a candidate is good enough on every slice."),
    "load": ("release.load_test:load", "Drive an endpoint in the shape of production, past its knee."),
    "diagnose": ("release.diagnose:diagnose", "Name the places of a candidate that damage a slice."),
    "repair": ("release.repair:repair", "Build and measure repairs of a candidate."),
    "reference": ("release.reference:reference_", "Record canaries of references, and check references."),
    "exemplars": (
        "release.exemplars:exemplars",
        "Show and erase exchanges that are kept with their payload.",
    ),
    "config": ("admin.config:config_", "Check the configuration, and print it."),
    "stream": ("admin.stream:stream", "Drop what waits in the stream."),
    "db": ("admin.db:db", "Create and upgrade the database schema."),
    "keys": ("admin.keys:keys", "Create and rotate key files; no command prints a key."),
    "audit": ("admin.audit:audit", "Show who changed what, and check that nothing was removed."),
    "privacy": ("admin.privacy:privacy", "Find and erase what is stored of a person or an exchange."),
    "uninstall": ("admin.uninstall:uninstall", "Remove what `quantdrift up` keeps on this host."),
}
"""By name, in the order of the help: where it is, and what it does in a line."""
_TITLES: Final = {
    "run": "Run",
    "look": "Look at what was found",
    "decide": "Decide",
    "release": "Build, judge, explain and repair a candidate",
    "admin": "Operate",
}
"""By the folder of a command."""
_EXTRAS: Final = {
    "init": "shadow",
    "shadow": "shadow",
    "monitor": "monitor",
    "report": "report",
    "slices": "monitor",
    "baseline": "monitor",
    "triage": "storage",
    "alerts": "storage",
    "incidents": "storage",
    "backtest": "report",
    "labels": "report",
    "compare": "report",
    "export": "frames",
    "plan": "storage",
    "audit": "storage",
    "stream": "storage",
    "db": "storage",
    "setup": "storage",
    "privacy": "storage",
    "web": "web",
    "up": "monitor,web,embedded",
    "config": "shadow",
    "reference": "shadow",
    "quantise": "shadow",
    "gate": "shadow",
    "load": "report",
    "diagnose": "shadow",
    "repair": "shadow",
    "exemplars": "shadow",
    "demo": "demo",
}


class MainGroup(LazyGroup):
    """Prints our own errors without a traceback; exit code 2 if a person must act, 1 if a retry may succeed.

    Ctrl-C ends a command with exit code 130, after it has closed what it opened.
    """

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in groups, each in the order in which they are needed."""
        lines = {name: line for name, (_, line) in _COMMANDS.items()}
        lines |= {name: command.get_short_help_str(80) for name, command in self.commands.items()}
        width = max(map(len, lines))
        for title, names in self.groups(ctx).values():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), lines[name]) for name in names])

    def groups(self, ctx: click.Context) -> dict[str, tuple[str, list[str]]]:
        """Return the groups of commands by their folder: the title, and the names in the order in which they are needed."""
        of = {name: where.partition(".")[0] for name, (where, _) in _COMMANDS.items()}
        of |= dict.fromkeys(self.commands, "admin")
        return {
            folder: (title, [name for name, group in of.items() if group == folder])
            for folder, title in _TITLES.items()
        }

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that was typed; an unknown one is refused with the nearest name."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            ctx.fail(f"No such command '{args[0]}'." + (f" Did you mean '{near[0]}'?" if near else ""))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what ends it becomes a line and an exit code."""
        try:
            with interruptible():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except OperatorError as error:
            _fail(str(error), 2)
        except RetryError as error:
            _fail(f"{error} (try again)", 1)
        except QuantdriftError as error:
            _fail(str(error), 1)
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get(ctx.invoked_subcommand or "")
            if extra is None:
                raise
            _fail(f"this command needs {error.name}: pip install 'quantdrift[{extra}]'", 2)


def _fail(message: str, code: int) -> NoReturn:
    if logs_json() and not sys.stderr.isatty():
        _LOG.error("%s", message)
    else:
        click.secho(f"quantdrift: {message}", fg="red", err=True)
    sys.exit(code)


@click.group(
    cls=MainGroup,
    lazy={name: where for name, (where, _) in _COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="quantdrift")
def main() -> None:
    """Find the input slices on which a quantised model has become worse than its FP32 reference.

    A sidecar samples live traffic, a shadow replays the samples through the FP32 reference, and a monitor watches the
    divergence of each input slice and sends alerts by OpenTelemetry.

    Exit codes: 0 success, 1 a failure that a retry may solve, 2 a person must act; the message says what to do;
    130 interrupted with Ctrl-C.

    \b
    See the whole loop, some 5 min:  quantdrift demo
    Run everything on this host:     quantdrift up --config config.toml
    Check the configuration:         quantdrift config check
    See how far exchanges come:      quantdrift status
    Write the weekly report:         quantdrift report --week
    """


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    Example:
      quantdrift completion bash > ~/.local/share/bash-completion/completions/quantdrift
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise OperatorError(f"no completion for {shell}")
    click.echo(kind(main, {}, "quantdrift", "_QUANTDRIFT_COMPLETE").source())
