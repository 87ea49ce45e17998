"""A reference that is held to its canaries: once when it is opened, and again and again where nobody can see what it is."""

import logging
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import Model, Reference
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.shadow.runtimes.canaries.canaries import Canaries, read_canaries, trouble
from quantdrift.shadow.runtimes.protocol import Artefact, ReferenceRuntime, WrappedRuntime
from quantdrift.shadow.tensors.arrays import Array

_LOG = logging.getLogger(__name__)


class CanaryOutcome(StrEnum):
    """What a check came to."""

    REPRODUCED = "reproduced"
    FAILED = "failed"


Told = Callable[[str, CanaryOutcome], None]


def canaries_of(model: Model, reference: Reference, runtime: ReferenceRuntime) -> Canaries | None:
    """Return the canaries of a reference, which it has reproduced; None where it has none.

    Raises
    ------
    OperatorError
        They cannot be read, or it does not reproduce them.
    RetryError
        What computes is away for now.
    """
    if not reference.canaries:
        return None
    canaries = read_canaries(Path(reference.canaries))
    if problem := trouble(runtime, canaries, reference.canary_tolerance):
        raise OperatorError(
            f"the reference {reference.where(model.name)} does not reproduce its canaries {reference.canaries}: {problem}. "
            "It is another model than they were recorded with, or computes otherwise: give the right one, or record "
            "them anew with `quantdrift reference record`"
        )
    return canaries


class CanaryCheckedRuntime(WrappedRuntime):
    """A reference at a server, held to its canaries while it works.

    A check follows a replay, at most every `interval_s`. Where it fails, what was just replayed is not given out,
    and nothing is until the canaries are reproduced again: exchanges wait, as they do for a server that is away. What was
    given out since the last check that held may be another model's; the log says between when and when.

    Parameters
    ----------
    model, reference
        As configured.
    runtime
        What computes; it has reproduced them.
    canaries
        The set.
    interval_s
        As described; infinite for a file, which stays what it was when it was loaded.
    clock
        When a check is due.
    told
        Called after each check, with the model's name.
    """

    def __init__(
        self,
        *,
        model: Model,
        reference: Reference,
        runtime: ReferenceRuntime,
        canaries: Canaries,
        interval_s: float,
        clock: Clock,
        told: Told,
    ) -> None:
        self._model = model.name
        self._where = reference.where(model.name)
        self._tolerance = reference.canary_tolerance
        self._interval_s = interval_s
        super().__init__(runtime)
        self._canaries = canaries
        self._clock = clock
        self._told = told
        self._held_s = clock.monotonic_s()
        self._held = clock.now()
        self._failing = False

    @property
    def artefact(self) -> Artefact:
        """What was loaded, with the digest of its canaries."""
        return msgspec.structs.replace(self._runtime.artefact, canaries=self._canaries.digest)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return every output by name; errors as of the runtime that computes.

        Raises
        ------
        RetryError
            It does not reproduce its canaries now, or what computes is away.
        """
        if self._failing:
            self._check()
        outputs = self._runtime.run(inputs)
        if self._clock.monotonic_s() - self._held_s >= self._interval_s:
            self._check()
        return outputs

    def _check(self) -> None:
        problem = trouble(self._runtime, self._canaries, self._tolerance)
        self._told(self._model, CanaryOutcome.FAILED if problem else CanaryOutcome.REPRODUCED)
        if problem:
            if not self._failing:
                _LOG.error(
                    "the reference %s no longer reproduces its canaries: %s. Exchanges wait until it does. What was compared "
                    "between %s and %s may have been compared with another model",
                    self._where,
                    problem,
                    self._held.isoformat(timespec="seconds"),
                    self._clock.now().isoformat(timespec="seconds"),
                )
            self._failing = True
            raise RetryError(f"{self._where} does not reproduce its canaries ({problem})")
        if self._failing:
            _LOG.warning("the reference %s reproduces its canaries again", self._where)
        self._failing = False
        self._held_s, self._held = self._clock.monotonic_s(), self._clock.now()


def held(
    model: Model, reference: Reference, runtime: ReferenceRuntime, *, clock: Clock, told: Told
) -> ReferenceRuntime:
    """Return a reference that has reproduced its canaries, and is held to them on if it is at a server.

    Raises
    ------
    OperatorError
        It does not reproduce them.
    RetryError
        What computes is away for now.
    """
    canaries = canaries_of(model, reference, runtime)
    if canaries is None:
        return runtime
    told(model.name, CanaryOutcome.REPRODUCED)
    return CanaryCheckedRuntime(
        model=model,
        reference=reference,
        runtime=runtime,
        canaries=canaries,
        interval_s=reference.canary_interval_s if reference.url else float("inf"),
        clock=clock,
        told=told,
    )
