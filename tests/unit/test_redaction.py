"""What an erasure takes out of texts and JSON, and what it leaves."""

from typing import Any

import pytest

from quantdrift.cli.admin.privacy import wanted_of
from quantdrift.core.config.schema import Capture, Config, SamplingOptions
from quantdrift.sidecar.capture.attributes import every_hash
from quantdrift.storage.privacy import Redactor

pytestmark = pytest.mark.unit

ID, OTHER = "0af7651916cd43dd8448eb211c80319c", "1bf7651916cd43dd8448eb211c80319c"
DASHED = "0af76519-16cd-43dd-8448-eb211c80319c"


@pytest.mark.parametrize(
    ("value", "text", "without"),
    [
        ("ada7", "user=ada7 flips", "user=X flips"),
        ("ada7", "user=ada77, ada7.b and b.ada7 and ada7@b", "user=ada77, ada7.b and b.ada7 and ada7@b"),
        ("ada7", "seen: ada7.", "seen: X."),
        ("a@b.org", 'header.x = "a@b.org" and y', 'header.x = "X" and y'),
        ('a"\\b', 'header.x = "a\\"\\\\b"', 'header.x = "X"'),
        ("7", "7 of 17 in 7=7", "7 of 17 in 7=X"),
        ("7", "7", "X"),
        ("été!", "nom=été! ici", "nom=X ici"),
    ],
)
def test_a_value_is_replaced_as_a_whole_word(value: str, text: str, without: str) -> None:
    """Parts of longer words stay; a short value goes only where it is certainly a value."""
    redactor = Redactor([value], set(), "X")
    assert redactor.without(text) == without


@pytest.mark.parametrize(
    ("json", "without"),
    [
        ({"examples": [ID, OTHER]}, {"examples": [OTHER]}),
        (
            {"at": [{"exchange_id": DASHED, "flip": 1}, {"exchange_id": OTHER}]},
            {"at": [{"exchange_id": OTHER}]},
        ),
        ({"text": f"see {ID}"}, {"text": "see X"}),
        ({"key": "header.x", "equals": "key"}, {"key": "header.x", "equals": "X"}),
        ({"user=key": 2, "n": 3, "none": None}, {"user=X": 2, "n": 3, "none": None}),
    ],
)
def test_ids_go_with_their_entry_and_names_of_fields_stay(json: Any, without: Any) -> None:
    """An entry of a list about the exchange goes as a whole."""
    assert Redactor(["key"], {ID}, "X").without(json) == without


def test_an_entry_with_the_value_goes_where_entries_are_about_values() -> None:
    """Weights of other values stay."""
    entries = [{"name": "user=ada7", "where": [{"equals": "ada7"}]}, {"name": "user=bob"}]
    assert Redactor(["ada7"], set(), "X").without(entries, drop=True) == entries[1:]


def test_each_form_of_a_value_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, without what is removed at capture, hashed if the attribute is hashed, and as a session."""
    monkeypatch.setenv("QUANTDRIFT_HMAC_KEY", "key")
    config = Config(
        capture=Capture(headers=("x-user",), hmac=("header.x-user",)),
        sampling=SamplingOptions(sticky_header="X-User"),
    )
    wanted = wanted_of(config, "header.x-user", "ada\x1b7")
    hashed = every_hash("ada\x1b7", b"key")[0]
    assert (wanted.values, wanted.groups) == (("ada7", hashed), (hashed,))
    assert wanted_of(config, "header.x-other", "ada").values == ("ada",)
    assert wanted_of(config, "any", "ada").values == ("ada", every_hash("ada", b"key")[0])
    trace = f"00-{ID}-00f067aa0ba902b7-01"
    assert wanted_of(config, "trace", trace).values == wanted_of(config, "trace", ID).values == (ID,)
    assert wanted_of(config, "exchange", DASHED.upper()).values == (ID,)
