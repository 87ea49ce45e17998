"""What a cell of a notebook shows: the paragraphs and tables of a result, with the components of page and report."""

import re
from collections.abc import Sequence

from quantdrift.core.records import Verdict
from quantdrift.core.text import Table
from quantdrift.show.rendering import environment, style


def html(blocks: Sequence[str | Table], *, colour: Verdict | None, notes: Sequence[str]) -> str:
    """Return an element with a style of its own, which changes nothing of the notebook around it.

    Parameters
    ----------
    blocks
        Paragraphs and tables; an empty paragraph only parts others.
    colour
        The status whose colour the edge has; None: it has no coloured edge.
    notes
        Sentences that stand below, smaller.
    """
    scoped = re.sub(r":root\b|(?<!\w)body(?= \{)", "&", style())
    template = environment("report").get_template("cell.html")
    return template.render(
        style=scoped, blocks=[block for block in blocks if block], colour=colour, notes=notes
    )
