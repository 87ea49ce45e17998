"""Money: what changed answers and replays cost, at the prices of `[cost]`. Without a price there is no figure, and nothing is called a cost."""

from collections.abc import Mapping
from datetime import datetime

import msgspec
from msgspec.structs import replace

from quantdrift.core.notation import estimated, number
from quantdrift.facts.estimate import Estimate
from quantdrift.facts.figures import Figure, FigureName, Subject, Window

_HOUR_S = 3600.0
_WHOLE = 100.0  # from here on an amount is written without decimals


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """What the requests of one model and the time of the device are worth.

    Parameters
    ----------
    per_request
        What a request costs when its answer changes; of requests that `by_value` does not name.
    attribute, by_value
        Recorded attribute that says what a request is worth, and the worth by its value; empty: all are worth the same.
    device_hour
        Price of an hour of the device on which references run; 0: not known.
    """

    currency: str
    per_request: float = 0.0
    attribute: str = ""
    by_value: Mapping[str, float] = {}
    device_hour: float = 0.0

    @property
    def most(self) -> float:
        """The largest worth of a request; 0: no request has a price."""
        return max([self.per_request, *self.by_value.values()])


def cost_of_changed(share: Figure, prices: Prices) -> Figure | None:
    """Return what the answers that a share counts cost: share x requests in its window x what one is worth.

    Every request counts with `Prices.per_request`; `quantdrift.storage.cost` reads what each one is worth where requests differ.

    Returns
    -------
    Figure | None
        None without a price, or where it is not known for how many requests the share stands.
    """
    return cost_figure(share, share.estimate, prices, prices.per_request)


def cost_figure(share: Figure, mean: Estimate, prices: Prices, per_request: float = 1.0) -> Figure | None:
    """Return the cost of the answers of a share, from a mean over all requests of the same window, times `per_request`."""
    if not prices.most or share.weight is None:
        return None
    factor = share.weight * per_request
    return replace(
        share,
        name=FigureName.COST,
        value=factor * mean.mean,
        low=None if mean.low is None else factor * mean.low,
        high=None if mean.high is None else factor * mean.high,
        unit=prices.currency,
    )


def cost_of_replays(
    n: int, seconds: float, prices: Prices, *, model: str, window: Window, as_of: datetime
) -> Figure | None:
    """Return what `n` replays of a model cost: `seconds` of the device, at its price; None without a price.

    Its subject has no version and no slice, since a replay serves all slices.
    """
    if not prices.device_hour:
        return None
    return Figure(
        name=FigureName.COST,
        value=seconds / _HOUR_S * prices.device_hour,
        unit=prices.currency,
        n=n,
        window=window,
        of=Subject(model=model, version="", slice=""),
        as_of=as_of,
    )


def money(value: float, currency: str) -> str:
    """Return an amount with two significant digits: `1,200 EUR`, `0.35 EUR`."""
    size = abs(value)
    text = f"{estimated(size):,}" if size >= _WHOLE else number(size)
    return f"{'-' if value < 0 and text != '0' else ''}{text} {currency}".rstrip()


def money_of(cost: Figure) -> str:
    """Return a cost with its interval: `about 1,200 EUR (900 EUR to 1,500 EUR)`."""
    about = f"about {money(cost.value, cost.unit)}"
    if cost.low is None or cost.high is None:
        return about
    return f"{about} ({money(cost.low, cost.unit)} to {money(cost.high, cost.unit)})"
