"""The phases of a demo's run: a look every second, until something is so, or until Ctrl-C."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Protocol

from quantdrift.demo.otlp_receiver import Event, OtlpReceiver
from quantdrift.demo.outcome import slice_of
from quantdrift.demo.screen import Screen, ScreenView
from quantdrift.demo.watch import DemoWatch, Moment

_LOOK_S: Final = 1.0


class Traffic(Protocol):
    """What clients send; `failed` counts what got no proper answer."""

    failed: Counter[Any]


class Phases:
    """What the phases of all demos have in common, seen from where the clients and the collector are.

    Parameters
    ----------
    screen
        What is shown.
    receiver
        Where alerts come.
    watch
        Reads what the monitor says.
    traffic
        What is sent.

    Attributes
    ----------
    snapshot
        What the monitor said at the last look.
    """

    def __init__(self, screen: Screen, receiver: OtlpReceiver, watch: DemoWatch, traffic: Traffic) -> None:
        self._screen, self._receiver, self._watch, self._sent = screen, receiver, watch, traffic
        self._clock = asyncio.get_running_loop().time
        self._began = self._clock()
        self._shown = 0
        self.snapshot = Moment()

    async def until(self, done: Callable[[Moment], bool], longest_s: float, phase: str) -> bool:
        """Look once a second and show it, until `done` says so or for `longest_s`; return whether it said so."""
        deadline = self._clock() + longest_s
        while True:
            self.snapshot = await self._watch.look()
            self._screen.show(
                ScreenView(
                    phase=phase,
                    elapsed_s=self._clock() - self._began,
                    snapshot=self.snapshot,
                    failed=self._sent.failed.total(),
                )
            )
            for event in self._new_events():
                self._screen.settle()
                self._screen.event(event)
            if done(self.snapshot):
                return True
            if self._clock() >= deadline:
                return False
            await asyncio.sleep(_LOOK_S)

    async def until_interrupted(self, *addresses: str) -> None:
        """Say where everything is, and go on until the task is cancelled; that is the end that was asked for, and no failure."""
        self._screen.say("\n[bold]Still running[/] (Ctrl-C ends it)\n" + "\n".join(addresses))
        try:
            await self.until(lambda _: False, math.inf, "running")
        except asyncio.CancelledError:
            if task := asyncio.current_task():
                task.uncancel()
        self._screen.settle()

    def _new_events(self) -> list[Event]:
        events = self._receiver.events[self._shown :]
        self._shown += len(events)
        return [event for event in events if slice_of(event)]  # the head of the audit is about no slice
