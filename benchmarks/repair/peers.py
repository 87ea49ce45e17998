"""How others rank the sites of a quantised model: ONNX Runtime by the error of a tensor, NNCF by what a group of sites loses.

`onnxruntime.quantization.qdq_loss_debug` compares tensors of the candidate with those of the reference, and its documentation says to
look at the smallest ratios of signal to noise. The error that reaches an activation from before counts there, too.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from quantdrift.models.tensors.arrays import Array
from quantdrift.release.sites import Site, SiteKind, SwitchableCopy

_SUBSET: Final = 300  # NNCF's default


def ratios(copy: SwitchableCopy, inputs: Mapping[str, Array], kind: SiteKind) -> dict[str, float]:
    """Return the ratio of signal to noise, in decibels, of each site of a kind."""
    from onnxruntime.quantization.qdq_loss_debug import (  # noqa: PLC0415 - a second of imports
        compute_signal_to_quantization_noice_ratio as signal_to_noise,
    )

    if kind is SiteKind.ACTIVATION:
        served, whole = copy.raw(inputs), copy.raw(inputs, copy.everywhere)
        return {
            copy.sites[number].name: float(signal_to_noise([raw], [served[number]]))
            for number, raw in whole.items()
        }
    found: dict[str, float] = {}
    largest: dict[int, int] = {}
    for weight in copy.weights:  # the weight of a site is larger than its bias
        if weight.raw.size > largest.get(weight.site, 0):
            largest[weight.site] = weight.raw.size
            noise = signal_to_noise([weight.raw.reshape(-1)], [weight.served.reshape(-1)])
            found[copy.sites[weight.site].name] = float(noise)
    return found


def groups(sites: Sequence[Site]) -> list[list[int]]:
    """Return the numbers of the sites that NNCF removes together: those that feed an operator, with all that share an operator with them."""
    left = dict(enumerate(sites))
    found = []
    while left:
        first = min(left)
        group, nodes = [first], set(left.pop(first).nodes)
        while more := [number for number, site in left.items() if nodes & set(site.nodes)]:
            for number in more:
                nodes |= set(left.pop(number).nodes)
            group += more
        found.append(sorted(group))
    return found


def best_group(copy: SwitchableCopy, inputs: Mapping[str, Array], output: str) -> list[int] | None:
    """Return the group of sites that NNCF would put into FP32 first; None where it is not installed.

    As `quantize_with_accuracy_control` ranks groups of quantisers, with the share of right decisions as the metric: each group is
    removed alone, and judged on the 300 items with the largest loss of the metric.
    """
    try:
        from nncf.quantization.algorithms.accuracy_control.subset_selection import (  # noqa: PLC0415
            select_subset,
        )
    except ImportError:
        return None
    truth = copy.expected(inputs)[output].argmax(axis=1)
    right = (copy.run(inputs)[output].argmax(axis=1) == truth).astype(np.float64)
    rows = np.array(select_subset(_SUBSET, np.ones(len(right)).tolist(), right.tolist(), operator.sub))
    part = {name: array[rows] for name, array in inputs.items()}
    ranked = [
        (float((copy.run(part, group)[output].argmax(axis=1) == truth[rows]).mean()), group)
        for group in groups(copy.sites)
    ]
    return max(ranked, key=lambda one: one[0])[1]
