"""The rows of a file of labels."""

import csv
from datetime import UTC, datetime
from pathlib import Path

import pytest

from quantdrift.core.config.schema import Model
from quantdrift.core.errors import OperatorError
from quantdrift.report.label_rows import TooManyRowsError, rows_of_file, rows_of_text, write_wanted
from quantdrift.storage.labels import WantedLabel

pytestmark = pytest.mark.unit

MODEL = Model(name="digits", labels=("zero", "one"))


def test_a_request_has_the_rows_of_a_file_with_the_same_text(tmp_path: Path) -> None:
    """A character that only some readers take for the end of a line is part of its cell; a quoted new line too."""
    text = 'key,label\r\na\u2028b,one\nc\x85d,1\n"e\nf",zero\n\n'
    (tmp_path / "truth.csv").write_bytes(text.encode())
    rows, wrong = rows_of_text(text, MODEL, "key", "label", most=3)
    assert [row.key for row in rows] == ["a\u2028b", "c\x85d", "e\nf"]
    assert (rows, wrong) == rows_of_file(tmp_path / "truth.csv", MODEL, "key", "label")


def test_a_row_that_the_database_could_not_take_is_left_out_with_its_reason() -> None:
    """A NUL character, and numbers with more digits than Python reads."""
    long = "1" * 5_000
    text = f"key,label,item\na\0b,1,0\nc,{long},0\nd,1,{long}\ne,1,0\n"
    rows, wrong = rows_of_text(text, MODEL, "key", "label", most=10)
    assert [row.key for row in rows] == ["e"]
    assert list(wrong.values()) == [1, 1, 1]
    assert "with a key that has a NUL character" in wrong
    assert "with an item that is no number from 0 to 32767" in wrong


def test_more_rows_than_are_read_at_once_are_refused() -> None:
    """The error names the limit and says what to do."""
    with pytest.raises(TooManyRowsError, match="more than 2 rows: split it"):
        rows_of_text("key,label\na,1\nb,1\nc,1\n", MODEL, "key", "label", most=2)


def test_answers_that_were_drawn_are_no_formulas_in_a_spreadsheet_and_are_read_again(tmp_path: Path) -> None:
    """A request id of a stranger stays text; without labels no row can be used, with one it has the slice it was drawn for."""
    drawn = WantedLabel(
        captured_at=datetime(2026, 11, 24, tzinfo=UTC),
        exchange_id="00000000-0000-0000-0000-000000000001",
        item=2,
        model_version_id=1,
        request_id='=HYPERLINK("http://evil.example")',
        trace="",
        reference=0,
        candidate=7,
    )
    file = tmp_path / "wanted.csv"
    write_wanted(file, [drawn], 5, MODEL, "")
    text = file.read_text()
    (row,) = csv.DictReader(text.splitlines())
    assert row["request_id"] == '\'=HYPERLINK("http://evil.example")'
    assert row["candidate"] == "7"
    assert rows_of_file(file, MODEL, "exchange", "label") == ([], {"without a label": 1})
    with pytest.raises(OperatorError, match=r"wanted.csv exists: somebody may have filled it in"):
        write_wanted(file, [drawn], 5, MODEL, "")
    file.write_text(text.replace(",5,,", ",5,3,"))
    ((found,), wrong) = rows_of_file(file, MODEL, "exchange", "label")
    assert (found.key, found.item, found.number, found.drawn_for, wrong) == (drawn.exchange_id, 2, 3, 5, {})
