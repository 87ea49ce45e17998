"""How large an alert is: when it paged, and now."""

from quantdrift.core.notation import count_of
from quantdrift.facts.figures import Figure, shown


def size_parts(
    when_paged: Figure | None,
    now: Figure | None,
    *,
    is_page: bool = True,
    is_over: bool = False,
    changed: Figure | None = None,
    requests: Figure | None = None,
    basis: str = "",
) -> tuple[str | Figure, ...]:
    """Return both shares of changed answers, each with its window, and how many answers that is; empty: nothing is known.

    Surfaces lay out the figures; the texts between them are the same everywhere.

    Parameters
    ----------
    is_page, is_over
        Whether it paged or opened a ticket, and whether `now` is its end.
    changed, requests, basis
        Changed answers and requests now, as rates of a day or as counts, and what they rest on: `so far` where they are counts.
    """
    parts: list[str | Figure] = []
    if when_paged is not None:
        opened = "paged" if is_page else "opened"
        parts += [when_paged, f" of answers changed when it {opened} ({count_of(when_paged.n, 'answer')})"]
    if now is not None:
        when = "at its end" if is_over else "now"
        what = f" {when}" if parts else f" of answers changed {when}"
        parts += [", "] if parts else []
        parts += [now, f"{what} ({count_of(now.n, 'answer')})"]
        if changed is not None and requests is not None:
            rate = "" if basis == "so far" else " a day"
            parts += [": ", changed, f" changed answers{rate}, of ", requests, " requests"]
            parts += [f", {basis}"] if basis else []
    return tuple(parts)


def size(
    when_paged: Figure | None, now: Figure | None, *, is_page: bool = True, is_over: bool = False
) -> str:
    """Return both shares as text: `33 % of answers changed when it paged (23 answers), 19 % now (1,240 answers)`."""
    parts = size_parts(when_paged, now, is_page=is_page, is_over=is_over)
    texts = [part if isinstance(part, str) else str(shown(part)) for part in parts]
    return "".join(texts) or "not known how many answers changed"
