"""Single options that are set by their path, as `--set` does."""

import pytest

from quantdrift.cli.decide.backtest import assign
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.errors import OperatorError

pytestmark = pytest.mark.unit

CONFIG = Config(models=(Model(name="digits"),))


def test_an_option_is_called_by_its_path_and_a_list_entry_by_its_name() -> None:
    """Numbers are JSON, text needs no quotes, and everything else stays."""
    found = assign(
        CONFIG,
        ["monitor.pages_per_30_days=1", "models.digits.budget.flip=0.02", "telemetry.trace_url=Q1 = fine"],
    )
    assert found.monitor.pages_per_30_days == 1
    assert found.models[0].budget.flip == 0.02
    assert found.telemetry.trace_url == "Q1 = fine"
    assert found.sampling == CONFIG.sampling
    assert assign(CONFIG, []) == CONFIG


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("monitor.pages=1", "did you mean `pages_per_30_days`"),
        ("monitr.tolerance=1", "unknown option `monitr`: did you mean `monitor`"),
        ("models.digit.budget.flip=0.1", "unknown option `models.digit`: did you mean `digits`"),
        ("monitor.tolerance.x=1", "unknown option `monitor.tolerance.x`"),
        ("monitor.pages_per_30_days=99", "at most 30"),
        ("monitor.pages_per_30_days=often", "does not fit"),
        ("models.digits.budget.flip=x", "does not fit: `x` is not a number"),
        ("monitor.discovery=yes", "does not fit: `yes` is not true or false"),
        ("slices=x", "does not fit: `x` is not a list or table as JSON"),
        ("models.digits=1", "not a single option"),
        ("monitor=1", "does not fit"),
        ("models.digits.budget.divergence=3", "budget.divergence must be below budget.cap"),
        ("monitor", "KEY=VALUE"),
    ],
)
def test_what_cannot_be_set_is_refused_with_what_to_write_instead(assignment: str, said: str) -> None:
    """The nearest name, the bound, or the contradiction."""
    with pytest.raises(OperatorError) as error:
        assign(CONFIG, [assignment])
    assert said in str(error.value)
