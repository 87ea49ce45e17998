"""`python -m examples.digits`: the whole loop on real input."""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from examples.digits.screen import Screen
from examples.digits.services import ServiceError
from examples.digits.story import Options, Plan, run

_INTERRUPTED = 130


def main() -> int:
    """Run the demo; return its exit code."""
    options = _options()
    console = Console()
    with Screen(console) as screen:
        try:
            return asyncio.run(_interruptible(options, screen))
        except asyncio.CancelledError:
            screen.settle()
            screen.say("interrupted")
            return _INTERRUPTED
        except ServiceError as error:
            screen.settle()
            console.print(f"The demo could not go on: {error}", style="red", markup=False, highlight=False)
            return 2


async def _interruptible(options: Options, screen: Screen) -> int:
    """Run, and let the first SIGINT or SIGTERM end everything in order, the second at once."""
    task = asyncio.create_task(run(options, screen))
    asked = False

    def ask() -> None:
        nonlocal asked
        if asked:
            os._exit(_INTERRUPTED)
        asked = True
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ask)
    return await task


def _options() -> Options:
    parser = argparse.ArgumentParser(prog="python -m examples.digits", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave everything running until Ctrl-C")
    parser.add_argument("--seconds", type=float, help="longest wait for the alert (default 120)")
    parser.add_argument("--seed", type=int, default=2, help="of training and traffic")
    parser.add_argument("--fast", action="store_true", help="a larger share of drifted pages, shorter phases")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="directory that is written to")
    arguments = parser.parse_args()
    plan = Plan.fast() if arguments.fast else Plan()
    if arguments.seconds is not None:
        plan = msgspec.structs.replace(plan, drift_s=arguments.seconds)
    return Options(out=arguments.out, seed=arguments.seed, plan=plan, keep=arguments.keep)


if __name__ == "__main__":
    sys.exit(main())
