"""What a block has of the ids in comparisons: those in the usual form as numbers of 128 bits, all others as text."""

from datetime import UTC, datetime
from typing import Any

import pytest

from quantdrift.storage.comparisons.blocks import BETWEEN, Blocks, insertion
from quantdrift.storage.comparisons.copy import COLUMNS, Columns

pytestmark = pytest.mark.unit

N = 8
HASH = "0123456789abcdef" * 2
REQUEST = "01234567-89ab-cdef-0123-456789abcdef"
TRACE = f"00-{HASH}-0123456789abcdef-01"


def _values_of(**last: Any) -> dict[str, Any]:
    """Return the values of a block whose comparisons have them in the usual form, but for the last one."""
    columns: Columns = {name: [None] * N for name in COLUMNS} | {
        "captured_at": [datetime(2026, 3, 1, tzinfo=UTC)] * N,
        "exchange_id": [f"{number:032x}" for number in range(N)],
        "item": [0] * N,
        "model_version_id": [1] * N,
        "slice_ids": [[1]] * N,
        "n_items": [1] * N,
        "pi1": [1.0] * N,
        "pi2": [1.0] * N,
        "group_key": [HASH] * N,
        "attributes": [{"header.x-request-id": REQUEST}] * N,
        "features": [{}] * N,
        "trace": [TRACE] * N,
    }
    for name, value in last.items():
        columns[name] = [*columns[name][:-1], value]
    (values,) = Blocks(columns).blocks
    names = insertion("$1", 2).partition("(")[2].partition(")")[0].split(", ")[1:]
    return dict(zip(names, values, strict=True))


def _with_last(usual: str, last: str) -> str:
    return f"{{{','.join([usual] * (N - 1) + [last])}}}"


def test_ids_in_the_usual_form_are_numbers() -> None:
    """All of a batch are, nearly always."""
    values = _values_of()
    assert values["group_id"] == values["trace_id"] == _with_last(HASH, HASH)
    assert values["request_id"] == _with_last(REQUEST, REQUEST)
    assert values["span_id"] == _with_last("81985529216486895", "81985529216486895")
    assert values["group_text"] is values["trace_text"] is None
    assert values["attributes"] == BETWEEN.join(["{}"] * N)


@pytest.mark.parametrize(
    "key", [HASH.upper(), HASH[:-1], HASH + "0", HASH[:-1] + " ", HASH[:-1] + "g", HASH[:-1] + "٣", "anna"]
)
def test_one_other_group_is_text(key: str) -> None:
    """The others of its batch stay numbers."""
    values = _values_of(group_key=key)
    assert values["group_id"] == _with_last(HASH, "NULL")
    assert values["group_text"] == BETWEEN.join(["\x02"] * (N - 1) + [key])


@pytest.mark.parametrize(
    "request_id",
    [
        REQUEST.upper(),
        REQUEST[:-1],
        REQUEST[:-1] + " ",
        REQUEST.replace("-", "0"),
        f"0{REQUEST[:9]}{REQUEST[10:]}",
    ],
)
def test_one_other_request_stays_an_attribute(request_id: str) -> None:
    """A UUID in another form would come back in the usual one."""
    values = _values_of(attributes={"header.x-request-id": request_id, "a": "b"})
    assert values["request_id"] == _with_last(REQUEST, "NULL")
    assert values["attributes"].split(BETWEEN)[-1] == f'{{"header.x-request-id":"{request_id}","a":"b"}}'
    assert values["attributes"].split(BETWEEN)[0] == "{}"


@pytest.mark.parametrize(
    "trace",
    [
        TRACE.upper(),
        TRACE[:-1] + "0",
        "01" + TRACE[2:],
        TRACE[:-1],
        TRACE.replace("-0123", "0-123"),
        TRACE[:40] + "-" + TRACE[41:],
        TRACE[:40] + " " + TRACE[41:],
    ],
)
def test_one_other_trace_is_text(trace: str) -> None:
    """Another version, other flags, or other digits."""
    values = _values_of(trace=trace)
    assert values["trace_id"] == _with_last(HASH, "NULL")
    assert values["span_id"] == _with_last("81985529216486895", "null")
    assert values["trace_text"] == BETWEEN.join(["\x02"] * (N - 1) + [trace])
