"""Money: prices of the configuration, and the figures that they make."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from quantdrift.core.config import Config, load
from quantdrift.core.config.cost import read_values
from quantdrift.core.config.models import Model
from quantdrift.core.config.schema import Cost
from quantdrift.core.errors import OperatorError
from quantdrift.facts.cost import Prices, cost_of_changed, cost_of_replays, money, money_of
from quantdrift.facts.figures import Figure, FigureName, Subject, Window, WindowName
from quantdrift.facts.words import first_screen
from quantdrift.storage.cost import prices_of

pytestmark = pytest.mark.unit

_NOON = datetime(2031, 6, 15, 12, tzinfo=UTC)
_WINDOW = Window(name=WindowName.NOW, begin=_NOON - timedelta(hours=1), end=_NOON)
_SHARE = Figure(
    name=FigureName.CHANGED_SHARE,
    value=0.02,
    low=0.01,
    high=0.04,
    n=500,
    n_people=80,
    weight=100_000.0,
    window=_WINDOW,
    of=Subject(model="digits", version="int8-1", slice="scanner=archive"),
    as_of=_NOON,
)


def test_changed_answers_cost_the_share_of_the_requests_that_the_sample_stands_for() -> None:
    """2 % of 100,000 requests at 0.5 are 1,000, with the interval of the share; window, subject and counts are those of the share."""
    cost = cost_of_changed(_SHARE, Prices(currency="EUR", per_request=0.5))
    assert cost is not None
    assert (cost.name, cost.unit) == (FigureName.COST, "EUR")
    assert (cost.value, cost.low, cost.high) == pytest.approx((1000.0, 500.0, 2000.0))
    assert (cost.window, cost.of, cost.n, cost.n_people) == (_SHARE.window, _SHARE.of, 500, 80)
    assert money_of(cost) == "about 1,000 EUR (500 EUR to 2,000 EUR)"


def test_without_a_price_there_is_no_cost() -> None:
    """Neither of changed answers nor of replays."""
    assert cost_of_changed(_SHARE, Prices(currency="EUR")) is None
    assert cost_of_changed(_SHARE, Prices(currency="", device_hour=2.0)) is None
    assert (
        cost_of_replays(9, 60.0, Prices(currency="EUR"), model="digits", window=_WINDOW, as_of=_NOON) is None
    )


def test_replays_cost_the_time_of_the_device() -> None:
    """Half an hour at 3 an hour."""
    prices = Prices(currency="USD", device_hour=3.0)
    cost = cost_of_replays(1_200, 1_800.0, prices, model="digits", window=_WINDOW, as_of=_NOON)
    assert cost is not None
    assert cost.value == pytest.approx(1.5)
    assert (cost.unit, cost.n) == ("USD", 1_200)
    assert cost.of == Subject(model="digits", version="", slice="")
    changed = cost_of_changed(_SHARE, Prices(currency="USD", per_request=0.5))
    assert changed is not None
    assert first_screen.costs([changed, cost]) == (
        "About 1,000 USD (500 USD to 2,000 USD) for changed answers of int8-1; about 1.5 USD for replays."
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 EUR"), (0.346, "0.35 EUR"), (12.34, "12 EUR"), (68_178, "68,000 EUR"), (-1234.0, "-1,200 EUR")],
)
def test_an_amount_has_two_digits(value: float, text: str) -> None:
    """No more is known of an estimate; below 0 it is a gain."""
    assert money(value, "EUR") == text


def test_a_model_may_have_a_price_of_its_own(tmp_path: Path) -> None:
    """Its price replaces that of `[cost]`, also by 0; the file has the price of each value of the attribute."""
    file = tmp_path / "values.csv"
    file.write_text("customer,value\nacme,12.5\nbirch,0\n\n")
    config = Config(
        cost=Cost(
            currency="EUR", value_per_request=2.0, attribute="header.x-customer", values_file=str(file)
        ),
        models=(Model(name="digits", value_per_request=0.0), Model(name="faces")),
    )
    assert prices_of(config, "faces").per_request == 2.0
    prices = prices_of(config, "digits")
    assert (prices.per_request, prices.by_value, prices.most) == (0.0, {"acme": 12.5, "birch": 0.0}, 12.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("customer,value\nacme,many\n", "line 2 of"),
        ("customer,value\nacme,1\nbirch\n", "line 3 of"),
        ("customer,value\nacme,-1\n", "at least 0"),
        ("customer,value\nacme,nan\n", "at least 0"),
        ("customer,value\nacme,1\nacme,2\n", "names `acme` a second time"),
    ],
)
def test_a_wrong_line_of_the_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    """With its number, and what it should be."""
    file = tmp_path / "values.csv"
    file.write_text(text)
    with pytest.raises(OperatorError, match=message):
        read_values(str(file))
    with pytest.raises(OperatorError, match="cannot be read: No such file"):
        read_values(str(tmp_path / "absent.csv"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cost]\nvalue_per_request = 1\n", "write the currency of all prices"),
        ('[[models]]\nname = "m"\nvalue_per_request = 1\n', "write the currency of all prices"),
        ('[cost]\ncurrency = "EUR"\nattribute = "header.x-customer"\n', "cost.values_file is not"),
        ('[cost]\ncurrency = "1 EUR"\n', "cost.currency"),
        ('[cost]\ncurrency = "EUR"\nvalue_per_request = -1\n', "cost.value_per_request"),
    ],
)
def test_prices_that_contradict_each_other_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """The error says which option to change."""
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(OperatorError, match=message):
        load(path, {})


def test_the_file_is_found_beside_the_configuration(tmp_path: Path) -> None:
    """As every other file that an option names."""
    path = tmp_path / "config.toml"
    path.write_text('[cost]\ncurrency = "EUR"\nattribute = "header.x-customer"\nvalues_file = "values.csv"\n')
    assert load(path, {}).cost.values_file == str(tmp_path / "values.csv")
