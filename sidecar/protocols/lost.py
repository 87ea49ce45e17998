"""The one way in which the capture process says that an exchange cannot be used."""

from quantdrift.core.errors import QuantdriftError
from quantdrift.core.records import Loss


class LostError(QuantdriftError):
    """An exchange that was taken is let go of, counted under `loss`.

    Parameters
    ----------
    loss
        The counted reason.
    detail
        What was wrong, in words, without any payload.
    """

    def __init__(self, loss: Loss, detail: str) -> None:
        super().__init__(f"{loss.value}: {detail}")
        self.loss = loss
        self.detail = detail
