"""The values of signals in rows of `comparison c`, as SQL."""

from typing import Final

from quantdrift.core.signals import BUILT_IN, Signal, SignalForm, named_signals

_COLUMNS: Final = {
    SignalForm.CHANGED: "c.{}::int",
    # Not `least` alone: of NULL and the cap that is the cap.
    SignalForm.DIVERGENCE: "case when c.{0} <> 'NaN' then least(c.{0}, side.cap) end",
    SignalForm.SHARE: "case when jsonb_typeof(c.detail -> '{0}') = 'number'"
    " then least(greatest(cast(c.detail ->> '{0}' as double precision), 0), 1) end",
}


def value_of(signal: Signal) -> str:
    """Return the value of a signal, which is NULL where a row has none; that of a divergence needs `side.cap`."""
    return _COLUMNS[signal.form].format(signal.column or signal.detail)


def named_values() -> str:
    """Return the values of the signals of plug-ins as a JSON object by name; NULL where there are none."""
    pairs = [f"'{signal.metric}', {value_of(signal)}" for signal in named_signals()]
    return f"jsonb_strip_nulls(jsonb_build_object({', '.join(pairs)}))" if pairs else "null"


MEASURES: Final = {signal.metric.value: value_of(signal) for signal in BUILT_IN if signal.has_sums}
"""The values of the signals that roll-ups have, by metric."""
