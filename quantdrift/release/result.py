"""Results: records that a terminal shows as text, a notebook as HTML, and a program reads as fields."""

from collections.abc import Sequence
from typing import Any

import msgspec

from quantdrift.core.records import Verdict
from quantdrift.core.text import Table


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a call has found. `str` is the text that the command prints, and a notebook shows the same as HTML.

    Parameters
    ----------
    notes
        What was noticed on the way, in sentences; the command prints them to its standard error.
    """

    notes: tuple[str, ...] = ()

    @property
    def colour(self) -> Verdict | None:
        """The status whose colour the notebook shows it in; None: it has none."""
        return None

    def blocks(self) -> Sequence[str | Table]:
        """Return the paragraphs and tables of the text."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return what the command prints with `--json`, as builtin types."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Return what the command prints."""
        return "\n".join(map(str, self.blocks()))

    def _repr_pretty_(self, printer: Any, _: bool) -> None:  # noqa: FBT001 - as IPython calls it
        printer.text(str(self))

    def _repr_html_(self) -> str | None:
        try:
            from quantdrift.show.notebook import html  # noqa: PLC0415 - only a notebook needs the templates
        except ModuleNotFoundError:  # without Jinja, of `quantdrift[report]`, it is shown as text
            return None
        return html(self.blocks(), colour=self.colour, notes=self.notes)
