"""The ranking that ONNX Runtime's debugger of quantised models gives: by the error of each tensor.

`onnxruntime.quantization.qdq_loss_debug` compares tensors of the candidate with those of the reference, and its documentation says to
look at the smallest ratios of signal to noise. The error that reaches an activation from before counts there, too.
"""

from collections.abc import Mapping

from quantdrift.shadow.repair.sites import SiteKind, SwitchableCopy
from quantdrift.shadow.tensors.arrays import Array


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
