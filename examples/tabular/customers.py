"""Customers who ask for a loan: rows of a table, and whether they paid it back."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]
COLUMNS = ("age", "income", "debt", "amount", "employed", "region", "savings", "late")
"""Years, a year's income, debt as a share of it, the loan, years in the job, a number from 0 to 5, savings (often not known: NaN), late payments."""
RICH = 90_000.0
"""Incomes from here on are some 4 % of all, and were left out when the thresholds of the candidate were set."""
CHANNELS = ("web", "branch", "partner")
SHARES = (0.7, 0.2, 0.1)


def draw(n: int, seed: int) -> tuple[Rows, NDArray[Any]]:
    """Return customers and whether each paid the loan back.

    Returns
    -------
    rows
        (n, columns), float32, NaN where savings are not known.
    paid
        (n,), 0 or 1.
    """
    rng = np.random.default_rng(seed)
    income = np.exp(rng.normal(10.4, 0.56, n))
    age = rng.uniform(18, 88, n)
    debt = rng.gamma(2.0, 0.25, n)
    amount = income * rng.gamma(2.0, 0.4, n)
    employed = np.minimum(rng.exponential(6, n), age - 16)
    region = rng.integers(0, 6, n)
    savings = np.where(rng.random(n) < 0.15, np.nan, income * rng.exponential(0.5, n))
    late = rng.poisson(0.6, n)
    # The rich live of other things than others: from RICH on, it is the income that decides, band by band.
    band = np.sin(np.log(np.maximum(income, RICH) / RICH) * 14)
    score = (
        0.8
        + 0.9 * (np.log(income) - 10.4)
        - 1.1 * debt
        - 0.5 * (amount / income - 0.8)
        + 0.05 * employed
        - 0.7 * late
        + 0.4 * np.nan_to_num(savings / income, nan=0.2)
        + 0.15 * (region == 3)
        - 0.01 * np.abs(age - 50)
        + np.where(income > RICH, 3.0 * band - 0.8, 0.0)
    )
    rows = np.column_stack([age, income, debt, amount, employed, region, savings, late]).astype(np.float32)
    return rows, (rng.random(n) < 1 / (1 + np.exp(-2 * score))).astype(np.int64)
