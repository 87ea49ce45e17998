"""The reader of Triton's classification extension: top classes as a list of texts, `value:index[:label]`."""

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.models.comparators.protocol import Values
from quantdrift.models.tensors.arrays import Array, output_error


class TopLabels(msgspec.Struct, frozen=True, kw_only=True):
    """The k largest values of each item, the largest first.

    Parameters
    ----------
    classes
        Their classes : (items, k), int64, no class twice.
    values
        As printed : (items, k), float64, never rising; may include NaN and infinities.
    """

    classes: npt.NDArray[np.int64]
    values: Values

    @property
    def k(self) -> int:
        """Number of listed classes."""
        return int(self.classes.shape[1])

    def spread(self, n_classes: int) -> Values:
        """Return the values of all classes : (items, classes); all of them must have been listed."""
        values = np.empty((len(self.classes), n_classes))
        np.put_along_axis(values, self.classes, self.values, axis=1)
        return values


def read_listed(texts: Array, n_classes: int) -> TopLabels:
    """Return the listed classes and values.

    Parameters
    ----------
    texts
        (items, k), bytes.
    n_classes
        Number of classes of the model.

    Raises
    ------
    QuarantineError
        Reason `output`: they are not such lists, or list classes that the model does not have.
    """
    if texts.ndim != 2 or not 1 <= texts.shape[1] <= n_classes:
        raise output_error(
            f"the candidate's output is text{list(texts.shape)}, which is not a list of at most {n_classes} classes"
        )
    pairs = [_pair(text) for text in texts.ravel().tolist()]
    values = np.array([value for value, _ in pairs]).reshape(texts.shape)
    classes = np.array([index for _, index in pairs], dtype=np.int64).reshape(texts.shape)
    ordered = np.sort(classes, axis=1)
    if classes.max(initial=0) >= n_classes or (ordered[:, 1:] == ordered[:, :-1]).any():
        raise output_error(
            f"the candidate lists a class twice, or one not below the {n_classes} classes of the reference"
        )
    if (values[:, 1:] > values[:, :-1]).any():
        raise output_error("the candidate's list of classes does not begin with the largest value")
    return TopLabels(classes=classes, values=values)


def _pair(text: bytes) -> tuple[float, int]:
    value, _, rest = text.partition(b":")
    index = rest.partition(b":")[0]
    if index.isdigit() and len(index) < 10:
        try:
            return float(value), int(index)
        except ValueError:
            pass
    raise output_error(
        "the candidate's output is text, but not a list of `value:index:label`: labels alone cannot be compared. Have the "
        "model return its logits or probabilities too, and name them in `models.output`"
    )
