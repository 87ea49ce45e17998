"""How the capture process says that an exchange cannot be used."""

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


class UnknownModelError(LostError):
    """An exchange of a model that is not in the configuration.

    Parameters
    ----------
    model
        The name on the wire, as the client chose it: kept apart from the message.
    """

    def __init__(self, model: str) -> None:
        super().__init__(Loss.UNKNOWN_MODEL, "no such model in the configuration")
        self.model = model
