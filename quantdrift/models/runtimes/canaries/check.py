"""The check of a reference against its canaries: when it is opened, and at intervals if it is at a server."""

import logging
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import Model, Reference
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.models.runtimes.canaries.canaries import Canaries, canary_problem, read_canaries
from quantdrift.models.runtimes.protocol import Artefact, ReferenceRuntime, WrappedRuntime
from quantdrift.models.tensors.arrays import Array

_LOG = logging.getLogger(__name__)


class CanaryOutcome(StrEnum):
    """The outcome of a check; the values are labels of a metric."""

    REPRODUCED = "reproduced"
    FAILED = "failed"


OnCheck = Callable[[str, CanaryOutcome], None]


def checked_canaries(model: Model, reference: Reference, runtime: ReferenceRuntime) -> Canaries | None:
    """Return the canaries of a reference, after checking that it reproduces them; None if it has none.

    Raises
    ------
    OperatorError
        They cannot be read, or the reference does not reproduce them.
    RetryError
        Its server is unreachable.
    """
    if not reference.canaries:
        return None
    canaries = read_canaries(Path(reference.canaries))
    if problem := canary_problem(runtime, canaries, reference.canary_tolerance):
        raise OperatorError(
            f"the reference {reference.where(model.name)} does not reproduce its canaries {reference.canaries}: {problem}. "
            "It is another model than the recorded one, or computes differently: configure the right reference, or record "
            "new canaries with `quantdrift reference record`"
        )
    return canaries


class CanaryCheckedRuntime(WrappedRuntime):
    """A reference at a server that is checked against its canaries at intervals.

    A check follows a replay, at most every `interval_s`. If it fails, the outputs of that replay are dropped, and none are
    returned until the canaries are reproduced again: exchanges wait, as they do for an unreachable server. Outputs returned
    since the last passed check may be another model's; the log gives the time range.

    Parameters
    ----------
    runtime
        The reference; it has reproduced its canaries.
    interval_s
        As described; infinite for a file, which cannot change after it was loaded.
    on_check
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
        on_check: OnCheck,
    ) -> None:
        self._model = model.name
        self._where = reference.where(model.name)
        self._tolerance = reference.canary_tolerance
        self._interval_s = interval_s
        super().__init__(runtime)
        self._canaries = canaries
        self._clock = clock
        self._on_check = on_check
        self._passed_s = clock.monotonic_s()
        self._passed_at = clock.now()
        self._failing = False

    @property
    def artefact(self) -> Artefact:
        """The files that it was loaded from, with the digest of its canaries."""
        return msgspec.structs.replace(self._runtime.artefact, canaries=self._canaries.digest)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return every output by name; errors as of the wrapped runtime.

        Raises
        ------
        RetryError
            It does not reproduce its canaries at present, or its server is unreachable.
        """
        if self._failing:
            self._check()
        outputs = self._runtime.run(inputs)
        if self._clock.monotonic_s() - self._passed_s >= self._interval_s:
            self._check()
        return outputs

    def _check(self) -> None:
        problem = canary_problem(self._runtime, self._canaries, self._tolerance)
        self._on_check(self._model, CanaryOutcome.FAILED if problem else CanaryOutcome.REPRODUCED)
        if problem:
            if not self._failing:
                _LOG.error(
                    "the reference %s no longer reproduces its canaries: %s. Check which model its server serves; exchanges wait "
                    "until it reproduces them. Comparisons between %s and %s may have used another model",
                    self._where,
                    problem,
                    self._passed_at.isoformat(timespec="seconds"),
                    self._clock.now().isoformat(timespec="seconds"),
                )
            self._failing = True
            raise RetryError(f"{self._where} does not reproduce its canaries ({problem})")
        if self._failing:
            _LOG.warning("the reference %s reproduces its canaries again", self._where)
        self._failing = False
        self._passed_s, self._passed_at = self._clock.monotonic_s(), self._clock.now()


def with_canary_checks(
    model: Model, reference: Reference, runtime: ReferenceRuntime, *, clock: Clock, on_check: OnCheck
) -> ReferenceRuntime:
    """Return the reference, checked against its canaries now, and at intervals if it is at a server.

    Raises
    ------
    OperatorError
        It does not reproduce them.
    RetryError
        Its server is unreachable.
    """
    canaries = checked_canaries(model, reference, runtime)
    if canaries is None:
        return runtime
    on_check(model.name, CanaryOutcome.REPRODUCED)
    return CanaryCheckedRuntime(
        model=model,
        reference=reference,
        runtime=runtime,
        canaries=canaries,
        interval_s=reference.canary_interval_s if reference.url else float("inf"),
        clock=clock,
        on_check=on_check,
    )
