"""Records that outlive the process that wrote them: a later release must still read what this one stored or sent.

`stored_records.json` has an example of each as it was first written: JSON as it is, MessagePack in hexadecimal digits.
Once released, an example is never rewritten. A field that is added has a default and stays out of it; a record that is
new is added with the form it has then.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quantdrift.core.codec import decode_exchange, decode_tally
from quantdrift.core.records import Exchange, Policy, Predicate, Tally
from quantdrift.core.sampling.policy_message import (
    PolicyMessage,
    PolicySummary,
    decode_policy_message,
    decode_policy_summary,
)
from quantdrift.drift.detectors.protocol import LEARNERS
from quantdrift.drift.detectors.tail.pooled_histogram import TailBaseline
from quantdrift.facts.events import AlertEvent
from quantdrift.facts.explanation import Explanation
from quantdrift.facts.words.text import AlertText
from quantdrift.monitor.fold.sessions import Sessions
from quantdrift.report.figures import ReportFigures
from quantdrift.storage.fold_rows import ComparisonRow, SessionRow

pytestmark = pytest.mark.contract

FORMS: dict[str, Any] = msgspec.json.decode(
    Path(__file__).with_name("stored_records.json").read_text(encoding="utf-8")
)


def _session(wire: bytes) -> list[ComparisonRow]:
    """Return the items of an open session as the fold resumes with them."""
    row = SessionRow(model_version_id=1, policy_id=1, group_key="g", opened_us=0, items=wire, fold_seq=1)
    ((_, items, _),) = Sessions(1, (row,)).due(10)
    return list(items)


def _json(kind: Any) -> Callable[[Any], Any]:
    """Return the function that reads a column of type `jsonb`."""
    return lambda form: msgspec.convert(form, kind)


# Where it is stored, the function that reads it there, and its type.
RECORDS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "exchange in the stream": (decode_exchange, Exchange),
    "exchange with its latency": (decode_exchange, Exchange),
    "tally in the stream": (decode_tally, Tally),
    "tally with the state of its sidecar": (decode_tally, Tally),
    "policy message in the bucket": (decode_policy_message, PolicyMessage),
    "policy summary in the bucket": (decode_policy_summary, PolicySummary),
    "session.items": (_session, list[ComparisonRow]),
    "policy.definition": (_json(Policy), Policy),
    "slice.definition where": (_json(tuple[Predicate, ...]), tuple[Predicate, ...]),
    "baseline.content of change": (_json(LEARNERS["change"].record), LEARNERS["change"].record),
    "baseline.content of tail": (_json(LEARNERS["tail"].record), TailBaseline),
    "baseline.content of growth": (_json(LEARNERS["growth"].record), LEARNERS["growth"].record),
    "transition.details, the alert event": (AlertEvent.read, AlertEvent),
    "transition.details, the explanation": (_json(Explanation), Explanation),
    "transition.text": (_json(AlertText), AlertText),
    "report_run.figures": (_json(ReportFigures), ReportFigures),
}


def _read(name: str) -> Any:
    form, read = FORMS[name], RECORDS[name][0]
    return read(bytes.fromhex(form) if isinstance(form, str) else form)


def _reachable(kind: Any) -> set[type]:
    """Return the records that a type may hold, itself among them."""
    found: set[type] = set()

    def walk(node: Any) -> None:
        if isinstance(node, msgspec.inspect.StructType):
            if node.cls in found:
                return
            found.add(node.cls)
            for field in node.fields:
                walk(field.type)
        elif isinstance(node, msgspec.inspect.Metadata):
            walk(node.type)
        else:
            for name in getattr(node, "__struct_fields__", ()):
                part = getattr(node, name)
                for one in part if isinstance(part, tuple) else (part,):
                    if isinstance(one, msgspec.inspect.Type):
                        walk(one)

    walk(msgspec.inspect.type_info(kind))
    return found


def _held(value: Any) -> Iterator[type]:
    """Yield the types of the records in a value."""
    if isinstance(value, msgspec.Struct):
        yield type(value)
        for name in value.__struct_fields__:
            yield from _held(getattr(value, name))
    elif isinstance(value, dict):
        for one in value.values():
            yield from _held(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _held(one)


def _lost(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield what an old form says and the record that was read from it does not."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name, value in old.items():
            if name in new:
                yield from _lost(value, new[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}"
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _lost(one, other, f"{path}[{place}]")
    elif old != new:
        yield path


def test_each_record_has_an_old_form() -> None:
    """Nothing is listed without one, and no form is left over."""
    assert RECORDS.keys() == FORMS.keys()


@pytest.mark.parametrize("name", RECORDS)
def test_an_old_form_is_read_and_nothing_of_it_is_lost(name: str) -> None:
    """No field was added without a default, and none was renamed or dropped: its value would be lost in silence."""
    form, record = FORMS[name], _read(name)
    if isinstance(form, str):
        body = bytes.fromhex(form)
        form = msgspec.msgpack.decode(body if name == "session.items" else body[2:])
        record = msgspec.msgpack.decode(msgspec.msgpack.encode(record))
    else:
        record = record.attributes() if isinstance(record, AlertEvent) else msgspec.to_builtins(record)
    assert (
        list(_lost(form, msgspec.json.decode(msgspec.json.encode(record)) if name not in WIRES else record))
        == []
    )


WIRES = {name for name, form in FORMS.items() if isinstance(form, str)}


@pytest.mark.parametrize("kind", list({str(kind): kind for _, kind in RECORDS.values()}.values()), ids=str)
def test_the_old_forms_hold_every_kind_of_record_that_may_be_in_them(kind: Any) -> None:
    """Else a part of one could get a field without a default and nobody would notice."""
    held = {found for name, (_, one) in RECORDS.items() if one == kind for found in _held(_read(name))}
    assert _reachable(kind) <= held


@pytest.mark.parametrize("name", RECORDS)
def test_a_newer_form_is_read_by_this_release(name: str) -> None:
    """Fields that it does not know are skipped: while an upgrade rolls out, old and new run side by side."""
    for kind in _reachable(RECORDS[name][1]):
        assert not kind.__struct_config__.forbid_unknown_fields  # type: ignore[attr-defined]
