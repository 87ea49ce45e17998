"""A small clustering that tests may use."""

import numpy as np

from quantdrift.core.clusters import Anchors, Clustering

CLUSTERING = Clustering(
    model="digits",
    reference_digest="d" * 64,
    version=3,
    space="pool",
    columns=(),
    ids=(4, 0, 9),
    centroids=np.array([[0, 0], [4, 0], [0, 8]], np.float32),
    radii=np.array([1, 1, 3], np.float32),
    centre=np.array([10, 20], np.float32),
    scale=np.array([2, 2], np.float32),
    spreads=np.array([0.5, 0.5, 1.5], np.float32),
    gaps=False,
    vocabulary={"header.x-scanner": frozenset({"a", "b"})},
    former=Anchors(ids=(2,), centres=np.array([[1, 1]], np.float32), spreads=np.array([0.25], np.float32)),
    next_id=10,
    expected_novel=0.005,
)
