"""The task `forecast`: what a flip and the divergence are, its options, and its comparator."""

from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from quantdrift.plugins.tasks import Comparator, Measure, Model, SingleOutput, TaskPlugin


class ForecastOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`[models.options]` of a model that forecasts quantiles.

    Parameters
    ----------
    levels
        The quantiles in the last dimension of the output, rising.
    tolerance
        A forecast flips when its divergence is above this.
    floor
        Smallest level of a forecast, in the unit of the output, that its loss is divided by.
    """

    levels: tuple[Annotated[float, Meta(gt=0, lt=1)], ...] = (0.1, 0.5, 0.9)
    tolerance: Annotated[float, Meta(ge=0)] = 0.02
    floor: Annotated[float, Meta(gt=0)] = 1e-3

    def __post_init__(self) -> None:
        if not self.levels or any(low >= high for low, high in pairwise(self.levels)):
            raise ValueError("`levels` must be one or more quantiles that rise")


def _comparator(_: Model, options: ForecastOptions) -> Comparator:
    from quantdrift_forecast.pinball import PinballComparator  # noqa: PLC0415 - the page reads only the words

    return SingleOutput(PinballComparator(options))


FORECAST = TaskPlugin(
    measure=Measure(
        flip="the pinball loss is above the tolerance, or quantiles cross that did not", name="pinball loss"
    ),
    options=ForecastOptions,
    comparator=_comparator,
    types="fiu",
)
