"""Errors for exchanges that cannot be used."""

from quantdrift.core.errors import QuantdriftError
from quantdrift.core.records import Loss


class LostError(QuantdriftError):
    """A sampled exchange is lost, and counted under `loss`.

    Parameters
    ----------
    loss
        The counted reason.
    detail
        A description of the fault, without any payload.
    """

    def __init__(self, loss: Loss, detail: str) -> None:
        super().__init__(f"{loss.value}: {detail}")
        self.loss = loss
        self.detail = detail


class UnknownModelError(LostError):
    """An exchange of a model that is not in the configuration.

    Parameters
    ----------
    model
        The name on the wire. It is not in the message, because clients choose it.
    """

    def __init__(self, model: str) -> None:
        super().__init__(Loss.UNKNOWN_MODEL, "no such model in the configuration")
        self.model = model
