"""The prices of changed answers and of replays, and where each request has its own."""

import csv
from collections.abc import Iterator, Mapping
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from quantdrift.core.config.section import Section, about
from quantdrift.core.errors import OperatorError

_MOST_ROWS: Final = 1_000_000


class Cost(Section, frozen=True, kw_only=True):
    """Prices. Without them quantdrift shows counts, and nothing is called a cost."""

    currency: Annotated[
        str,
        about("Currency of all prices, e.g. EUR."),
        Meta(pattern=r"^[^\s\d.,-]{0,8}$"),
    ] = ""
    value_per_request: Annotated[
        float,
        about(
            "What a request costs you when its answer changes. models.value_per_request overrides it for a model. 0: not known, "
            "and no money is shown.",
            ge=0,
            le=1e12,
        ),
    ] = 0.0
    attribute: Annotated[
        str,
        about(
            "Recorded attribute that says what a request is worth, e.g. `header.x-customer`, by the table in values_file. Empty: "
            "all requests of a model are worth the same."
        ),
    ] = ""
    values_file: Annotated[
        str,
        about(
            "CSV file with a header line and two columns: a value of the attribute, and the value of such a request. Requests "
            "with another value are worth value_per_request. It is read each time that money is shown."
        ),
    ] = ""
    device_hour: Annotated[
        float,
        about(
            "Price of an hour of the device on which references run. 0: not known, and replays are shown without a price.",
            ge=0,
            le=1e9,
        ),
    ] = 0.0


def cost_problems(cost: Cost, of_models: Mapping[str, float | None]) -> Iterator[str]:
    """Return the contradictions in the section, each as a sentence that says what to change.

    Parameters
    ----------
    of_models
        The price that a model has of its own.
    """
    for name, value in of_models.items():
        if value is not None and not 0 <= value < inf:
            yield f"models `{name}`: value_per_request is {value:g}: write an amount of at least 0"
    if bool(cost.attribute) != bool(cost.values_file):
        named, other = ("attribute", "values_file") if cost.attribute else ("values_file", "attribute")
        yield f"cost.{named} is set and cost.{other} is not: the file says what a request with each value of the attribute is worth"
    prices = (cost.value_per_request, cost.device_hour, *of_models.values())
    if (any(prices) or cost.values_file) and not cost.currency:
        yield 'a price is set and cost.currency is not: write the currency of all prices, e.g. currency = "EUR"'


def read_values(file: str) -> dict[str, float]:
    """Return what a request is worth by the value of its attribute.

    Raises
    ------
    OperatorError
        The file cannot be read, or a line of it is not a text and a number of at least 0.
    """
    values: dict[str, float] = {}
    try:
        with Path(file).open(encoding="utf-8-sig", newline="") as text:
            lines = csv.reader(text)
            next(lines, None)
            for number, line in enumerate(lines, start=2):
                if not line:
                    continue
                name, value = _row(file, number, line)
                if name in values:
                    raise OperatorError(
                        f"cost.values_file: line {number} of {file} names `{name[:64]}` a second time"
                    )
                if len(values) >= _MOST_ROWS:
                    raise OperatorError(f"cost.values_file: {file} has more than {_MOST_ROWS:,} rows")
                values[name] = value
    except (UnicodeDecodeError, csv.Error) as error:
        raise OperatorError(f"cost.values_file: {file} is no CSV file in UTF-8: {error}") from error
    except OSError as error:
        raise OperatorError(f"cost.values_file: {file} cannot be read: {error.strerror}") from error
    return values


def _row(file: str, number: int, line: list[str]) -> tuple[str, float]:
    try:
        name, text = line
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0):
        raise OperatorError(
            f"cost.values_file: line {number} of {file} is not a value of the attribute, a comma, and a number of at least 0"
        )
    return name, value
