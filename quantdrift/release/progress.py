"""How far a call is, and what it has noticed on the way."""

from collections.abc import Callable

import msgspec


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What a call does now, as its `progress` is told.

    Parameters
    ----------
    text
        What it does, or the note.
    done, total
        How much of it is done; a `total` of 0: it is not counted.
    is_note
        Whether it is something to know of; it stands in `notes` of the result, too.
    """

    text: str
    done: int = 0
    total: int = 0
    is_note: bool = False


OnProgress = Callable[[Progress], object]
"""Called with each step, share and note; an exception that it raises ends the call."""


class Watch:
    """Tells the progress of one call, and keeps its notes."""

    def __init__(self, progress: OnProgress | None) -> None:
        self._progress = progress
        self.notes: list[str] = []

    def step(self, text: str) -> None:
        """Tell what begins."""
        self._tell(Progress(text=text))

    def note(self, text: str) -> None:
        """Tell, and keep, something to know of."""
        self.notes.append(text)
        self._tell(Progress(text=text, is_note=True))

    def counted(self, text: str, total: int) -> Callable[[int], None]:
        """Tell what begins, and return what is called with how much more of it is done."""
        done = 0

        def more(n: int) -> None:
            nonlocal done
            done += n
            self._tell(Progress(text=text, done=done, total=total))

        more(0)
        return more

    def shares(self, text: str) -> Callable[[int, int], None]:
        """Return what is called with how much is done, and how much there is at most."""
        return lambda done, total: self._tell(Progress(text=text, done=done, total=total))

    def _tell(self, progress: Progress) -> None:
        if self._progress is not None:
            self._progress(progress)
