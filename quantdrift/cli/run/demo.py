"""The command `quantdrift demo`, which runs the whole loop on real input."""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Final

import click
import msgspec

from quantdrift.cli.interrupt import INTERRUPTED

_OUT: Final = Path("out/demo")
_TEXT_OUT: Final = Path("out/demo-text")


@click.command()
@click.option("--keep", is_flag=True, help="Leave everything running until Ctrl-C.")
@click.option(
    "--fast", is_flag=True, help="A larger share of drifted pages and shorter phases, without the repair."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Longest wait for the alert.  [default: 120, with --text 240]",
)
@click.option("--seed", type=int, default=2, show_default=True, help="Of training and traffic.")
@click.option(
    "--text", is_flag=True, help="The same with a language model of four languages behind llama.cpp's server."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory that is written to.  [default: out/demo, or out/demo-text]",
)
def demo(*, keep: bool, fast: bool, seconds: float | None, seed: int, text: bool, out: Path | None) -> None:
    """Run the whole loop on handwritten digits: an alert, its cause, and a repair. Or with --text on a language model.

    It trains a small FP32 model, quantises it with a calibration set that lacks one of five scanners, serves it, and sends traffic
    through a sidecar. It brings its own Postgres and NATS, needs no GPU, and takes some five minutes.

    With --text it trains a small language model of four languages and rounds it to 4 bits, which damages German. llama.cpp's server answers chats, the alert
    names `language=de`, and the page of its incident shows the first token that differs. That needs `pip install 'quantdrift[demo-text]'`.

    Exit code 0 only if the one bad slice has paged, no other slice has, and the verdict on all traffic is still `ok`, or with --text on
    the repaired model; 2 if something could not be started.

    \b
    Examples:
      quantdrift demo
      quantdrift demo --fast --keep
      quantdrift demo --text
    """
    from rich.console import Console

    from quantdrift.demo.screen import Screen
    from quantdrift.demo.services import ServiceError
    from quantdrift.demo.story import Options, Plan, run

    if text and fast:
        raise click.UsageError("--fast is of the demo without --text")
    console = Console()
    with Screen(console) as screen:
        if text:
            from quantdrift.demo.text import story as of_text

            text_plan = of_text.TextPlan()
            if seconds is not None:
                text_plan = msgspec.structs.replace(text_plan, drift_s=seconds)
            story = of_text.run(
                of_text.TextOptions(out=out or _TEXT_OUT, seed=seed, plan=text_plan, keep=keep), screen
            )
        else:
            plan = Plan.fast() if fast else Plan()
            if seconds is not None:
                plan = msgspec.structs.replace(plan, drift_s=seconds)
            story = run(Options(out=out or _OUT, seed=seed, plan=plan, keep=keep), screen)
        try:
            code = asyncio.run(_interruptible(story))
        except asyncio.CancelledError:
            screen.settle()
            screen.say("interrupted")
            code = INTERRUPTED
        except ServiceError as error:
            screen.settle()
            console.print(f"The demo could not go on: {error}", style="red", markup=False, highlight=False)
            code = 2
    sys.exit(code)


async def _interruptible(story: Coroutine[None, None, int]) -> int:
    """Run, and let the first SIGINT or SIGTERM end everything in order, the second at once."""
    task = asyncio.create_task(story)
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
