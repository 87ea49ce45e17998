"""A baseline learned from stored rows: the same that a signal would have learned from them alone."""

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np

from quantdrift.core.config.schema import Config
from quantdrift.drift.detectors.protocol import GROWTH, LEARNERS
from quantdrift.drift.evidence.header import LAST_AT, N_TOTAL
from quantdrift.drift.evidence.observations import STEPS, FloatArray, ObservationBlock
from quantdrift.drift.watch import SignalKey
from quantdrift.monitor.fold.groups import (
    LATENCY_GROWTH,
    Columns,
    Observation,
    exchanges,
    scale_of,
    slice_groups,
)
from quantdrift.monitor.fold.inclusion import Rates
from quantdrift.monitor.fold.sessions import Sessions
from quantdrift.storage.fold_rows import Catalog, ComparisonRow


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """What was learned of one signal.

    Parameters
    ----------
    n_groups
        Groups with a value of the signal.
    missing
        How many more groups a baseline needs; 0 where there are enough.
    content
        The baseline, as JSON values; None where there are too few groups.
    """

    slice_id: int
    signal: SignalKey
    n_groups: int
    missing: int
    content: dict[str, object] | None


class Learning:
    """Learning from the rows of one candidate version, in the order of their capture.

    Parameters
    ----------
    config
        Caps, session length and tolerance.
    catalog
        The slices and policies that the rows refer to.
    model
        The model of the rows.
    """

    def __init__(self, config: Config, catalog: Catalog, model: str) -> None:
        self._budget = config.budget(model)
        self._tolerance = config.monitor.tolerance
        self._catalog = catalog
        self._rates = Rates()
        self._sessions = Sessions(int(config.monitor.session_s * 1_000_000))
        self._waiting: dict[tuple[int, SignalKey], list[tuple[FloatArray, int]]] = {}
        self._states: dict[tuple[int, SignalKey], FloatArray] = {}

    def add(self, rows: Sequence[ComparisonRow]) -> None:
        """Learn from more rows; the items of one exchange must be in one call."""
        observed: list[Observation] = []
        for exchange in exchanges(rows):
            at_us = exchange.rows[0].captured_us
            if exchange.rows[0].group_key:
                self._sessions.add(exchange.rows, at_us)
                over = self._sessions.due(at_us)
                observed += [Observation(exchange.order, items, at_us, closed=True) for _, items in over]
            else:
                observed.append(Observation(exchange.order, exchange.rows, at_us, closed=False))
        if observed:
            self._learn(observed)

    def result(self) -> list[Learned]:
        """Return what has been learned so far, by slice and signal."""
        for key in sorted(self._waiting):
            self._run(key)
        learned = []
        for (slice_id, signal), state in sorted(self._states.items()):
            learner = LEARNERS[signal.kind]
            # Only at the end: bounds that are fixed with all of the data are the tightest.
            learner.tend(state, mass=0.0, at_us=int(state[LAST_AT]))
            if signal == LATENCY_GROWTH and GROWTH.enough(state):
                GROWTH.freeze(state)  # a person chose the time: it need not be a week
            content = msgspec.to_builtins(learner.content(state)) if learner.live(state) else None
            learned.append(
                Learned(
                    slice_id=slice_id,
                    signal=signal,
                    n_groups=int(state[N_TOTAL]),
                    missing=learner.missing(state),
                    content=content,
                )
            )
        return learned

    def _learn(self, observed: Sequence[Observation]) -> None:
        columns = Columns(observed)
        groups = slice_groups(
            observed,
            columns,
            np.ones(len(columns.ends), dtype=np.bool_),
            np.full(len(columns.rows), self._budget.cap),
            partial(self._rates.of, self._catalog),
            grows=np.full(len(columns.rows), True) if self._budget.latency_growth else None,
        )
        for number, (_, slice_id) in enumerate(groups.keys):
            for signal in groups.signals:
                if signal.kind not in LEARNERS:
                    continue
                values, observations = groups.values(number, signal)
                for value, observation in zip(values, observations.tolist(), strict=True):
                    waiting = self._waiting.setdefault((slice_id, signal), [])
                    waiting.append((value, observed[observation].rows[0].captured_us))
                    if len(waiting) == STEPS:
                        self._run((slice_id, signal))

    def _run(self, key: tuple[int, SignalKey]) -> None:
        waiting = self._waiting.pop(key, [])
        if not waiting:
            return
        learner = LEARNERS[key[1].kind]
        state = self._states.get(key)
        if state is None:
            scale = scale_of(key[1], self._budget)
            tau = self._budget.latency_growth - 1.0 if key[1] == LATENCY_GROWTH else self._tolerance
            state = learner.fresh(tau=tau, scale=scale, mass=0.0, at_us=waiting[0][1])
        times = np.array([[at_us] for _, at_us in waiting], dtype=np.float64)
        block = ObservationBlock(
            x=np.stack([value for value, _ in waiting])[:, None, :],
            seen=np.ones_like(times, dtype=bool),
            mass=np.zeros_like(times),
            at_us=np.maximum.accumulate(times),
        )
        path = learner.run(state[None], block)
        state = path.stopped(np.array([len(waiting) - 1]))[0]
        self._states[key] = state
