"""The drift tables as pandas or Polars frames, or as Arrow tables, with the right weights.

from quantdrift import frames

with frames.pandas("postgresql://reader:password@localhost/quantdrift?sslmode=disable") as drift:
    drift.slices(model="digits")
"""

from quantdrift.frames.estimates import difference, estimate
from quantdrift.frames.tables import Tables, arrow, pandas, polars
from quantdrift.frames.weights import divergence_edges, weighted_mean, weighted_quantile

__all__ = [
    "Tables",
    "arrow",
    "difference",
    "divergence_edges",
    "estimate",
    "pandas",
    "polars",
    "weighted_mean",
    "weighted_quantile",
]
