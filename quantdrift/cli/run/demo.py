"""The command `quantdrift demo`, which runs the whole loop on real input."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from quantdrift.cli.interrupt import INTERRUPTED

if TYPE_CHECKING:
    from quantdrift.demo.screen import Screen
    from quantdrift.demo.story import Options


@click.command()
@click.option("--keep", is_flag=True, help="Leave everything running until Ctrl-C.")
@click.option(
    "--fast", is_flag=True, help="A larger share of drifted pages and shorter phases, without the repair."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Longest wait for the alert.  [default: 120]",
)
@click.option("--seed", type=int, default=2, show_default=True, help="Of training and traffic.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out/demo"),
    show_default=True,
    help="Directory that is written to.",
)
def demo(*, keep: bool, fast: bool, seconds: float | None, seed: int, out: Path) -> None:
    """Run the whole loop on handwritten digits: an alert, its cause, and a repair.

    It trains a small FP32 model, quantises it with a calibration set that lacks one of five scanners, serves it, and sends traffic
    through a sidecar. It brings its own Postgres and NATS, needs no GPU, and takes some five minutes.

    Exit code 0 only if the one bad slice has paged, no other slice has, and the verdict on all traffic is still `ok`; 2 if something
    could not be started.

    \b
    Examples:
      quantdrift demo
      quantdrift demo --fast --keep
    """
    from rich.console import Console

    from quantdrift.demo.screen import Screen
    from quantdrift.demo.services import ServiceError
    from quantdrift.demo.story import Options, Plan

    plan = Plan.fast() if fast else Plan()
    if seconds is not None:
        plan = msgspec.structs.replace(plan, drift_s=seconds)
    console = Console()
    with Screen(console) as screen:
        try:
            code = asyncio.run(_interruptible(Options(out=out, seed=seed, plan=plan, keep=keep), screen))
        except asyncio.CancelledError:
            screen.settle()
            screen.say("interrupted")
            code = INTERRUPTED
        except ServiceError as error:
            screen.settle()
            console.print(f"The demo could not go on: {error}", style="red", markup=False, highlight=False)
            code = 2
    sys.exit(code)


async def _interruptible(options: "Options", screen: "Screen") -> int:
    """Run, and let the first SIGINT or SIGTERM end everything in order, the second at once."""
    from quantdrift.demo.story import run

    task = asyncio.create_task(run(options, screen))
    asked = False

    def ask() -> None:
        nonlocal asked
        if asked:
            os._exit(INTERRUPTED)
        asked = True
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ask)
    return await task
