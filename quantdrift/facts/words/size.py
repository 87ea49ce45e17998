"""How large an alert is: when it paged, and now."""

from quantdrift.core.notation import count_of
from quantdrift.facts.figures import Figure, shown


def size(when_paged: Figure | None, now: Figure | None) -> str:
    """Return both shares of changed answers, each with its window: `33 % when it paged (23 answers), 19 % now (1,240 answers)`."""
    parts = [
        f"{shown(figure)} {when} ({count_of(figure.n, 'answer')})"
        for figure, when in ((when_paged, "of answers changed when it paged"), (now, "now"))
        if figure is not None
    ]
    return ", ".join(parts) or "not known how many answers changed"
