"""The `quantdrift` command. Each subcommand imports only the packages that it needs."""

import sys
from typing import Any, Final, NoReturn

import click

from quantdrift.cli.interrupt import INTERRUPTED, interruptible
from quantdrift.cli.options import LazyGroup
from quantdrift.core.errors import OperatorError, QuantdriftError, RetryError

_COMMANDS: Final = {
    "alerts": "look.alerts:alerts",
    "audit": "admin.audit:audit",
    "backtest": "decide.backtest:backtest",
    "baseline": "decide.baseline:baseline",
    "compare": "look.compare:compare",
    "config": "admin.config:config_",
    "db": "admin.db:db",
    "demo": "run.demo:demo",
    "diagnose": "release.diagnose:diagnose",
    "exemplars": "release.exemplars:exemplars",
    "export": "look.export:export",
    "gate": "release.gate:gate",
    "incidents": "look.incidents:incidents",
    "keys": "admin.keys:keys",
    "labels": "decide.labels:labels",
    "monitor": "run.serve:monitor",
    "pause": "decide.pause:pause",
    "plan": "decide.plan:plan",
    "policy": "decide.policy:policy",
    "privacy": "admin.privacy:privacy",
    "reference": "release.reference:reference_",
    "repair": "release.repair:repair",
    "report": "look.report:report",
    "resume": "decide.pause:resume",
    "setup": "run.setup:setup",
    "shadow": "run.serve:shadow",
    "sidecar": "run.serve:sidecar",
    "slices": "look.slices:slices",
    "status": "look.status:status",
    "triage": "look.triage:triage",
    "up": "run.serve:up",
    "web": "run.web:web",
}
_EXTRAS: Final = {
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
    "db": "storage",
    "setup": "storage",
    "privacy": "storage",
    "web": "web",
    "up": "all",
    "config": "shadow",
    "reference": "shadow",
    "gate": "shadow",
    "diagnose": "shadow",
    "repair": "shadow",
    "exemplars": "shadow",
    "demo": "demo",
}


class _Group(LazyGroup):
    """Prints our own errors without a traceback; exit code 2 if a person must act, 1 if a retry may succeed.

    Ctrl-C ends a command with exit code 130, after it has closed what it opened.
    """

    def invoke(self, ctx: click.Context) -> Any:
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
    click.secho(f"quantdrift: {message}", fg="red", err=True)
    sys.exit(code)


@click.group(
    cls=_Group,
    lazy=_COMMANDS,
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
