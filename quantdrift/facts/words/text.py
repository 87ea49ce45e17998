"""The text of an alert as a record: surfaces lay it out, and none writes words of its own."""

from collections.abc import Iterable
from typing import Any

import msgspec


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Something to do, with the command to type for it; empty: there is none."""

    text: str
    command: str = ""

    def __str__(self) -> str:
        """Return it as one line."""
        return f"{self.text} {self.command}".rstrip()


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the text: the question that it answers in a word or two, which may be empty, and the answer."""

    label: str = ""
    text: str

    def __str__(self) -> str:
        """Return it as people read it."""
        return f"{self.label}: {self.text}" if self.label else self.text


class AlertText(msgspec.Struct, frozen=True, kw_only=True):
    """What an alert says, worded when the alert was written.

    Parameters
    ----------
    headline
        What is wrong and where, with model and version; or that it is over.
    lines
        For whoever is woken: how many, how certain, since when, what changed.
    do_now
        At most three steps, in their order.
    tomorrow
        For the owner of the model.
    details
        For the record: statistics.
    """

    headline: str
    lines: tuple[Line, ...] = ()
    do_now: tuple[Step, ...] = ()
    tomorrow: tuple[Step, ...] = ()
    details: tuple[str, ...] = ()

    def answer(self, label: str) -> str:
        """Return the text of the line with a label; empty: there is none."""
        return next((line.text for line in self.lines if line.label == label), "")

    def plain(self, *, first: Iterable[str] = (), related: Iterable[str] = ()) -> str:
        """Return it as plain text.

        Parameters
        ----------
        first
            What became of the alert since: lines that stand before the text. It is then called that of the opening, and what was
            to be done is left out.
        related
            Lines about alerts of the same cause.
        """
        first = list(first)
        head = [*first, f"When it opened: {self.headline}"] if first else [self.headline]
        parts = ["\n".join([*head, *map(str, self.lines), *related])]
        if not first:
            parts += [_numbered("Do now", self.do_now), _numbered("Tomorrow, for the owner", self.tomorrow)]
        if self.details:
            parts.append("\n".join(["Details", *self.details]))
        return "\n\n".join(part for part in parts if part)

    def attributes(self) -> dict[str, Any]:
        """Return what is to be done, and the details, as lists of texts: attributes of the event that is sent."""
        lists = {
            "do_now": list(map(str, self.do_now)),
            "tomorrow": list(map(str, self.tomorrow)),
            "explanation": list(self.details),
        }
        return {name: texts for name, texts in lists.items() if texts}


def _numbered(title: str, steps: Iterable[Step]) -> str:
    lines = []
    for number, step in enumerate(steps, 1):
        lines.append(f"{number}. {step.text}")
        if step.command:
            lines.append(f"   {step.command}")
    return "\n".join([title, *lines]) if lines else ""
