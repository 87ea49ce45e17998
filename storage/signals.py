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
    """Return the values of the signals that comparators give by name as a JSON object; NULL where a row has none."""
    signals = named_signals()
    names = ", ".join(f"'{signal.detail}'" for signal in signals)
    pairs = ", ".join(f"'{signal.metric}', {value_of(signal)}" for signal in signals)
    return f"case when c.detail ?| array[{names}] then jsonb_strip_nulls(jsonb_build_object({pairs})) end"


MEASURES: Final = {signal.metric.value: value_of(signal) for signal in BUILT_IN if signal.has_sums}
"""The values of the signals that roll-ups have, by metric."""
