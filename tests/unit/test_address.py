"""What a Postgres address may say, and what is refused by name."""

from pathlib import Path

import pytest

from quantdrift.core.config.load import load
from quantdrift.core.errors import OperatorError
from quantdrift.storage.address import Address

pytestmark = pytest.mark.unit

PLACE = "postgresql://u:hunter2@h:5433/d"


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("sslmode=prefer", "falls back to plaintext: write sslmode=verify-full"),
        ("sslmode=allow", "falls back to plaintext"),
        ("sslmode=verify_full", "one of disable, require, verify-ca, verify-full"),
        ("sslmode=", "`sslmode` in the Postgres address is empty"),
        ("sslmode=require&sslmode=disable", "`sslmode` is given twice"),
        ("ssl=require", r"`ssl` in the Postgres address is not understood: write sslmode=disable\|require"),
        ("ssl=", "`ssl` in the Postgres address is not understood"),
        ("sslcrl=/x", "`sslcrl` in the Postgres address is not understood: remove it"),
        ("application_name=x", "`application_name` in the Postgres address is not understood"),
        ("sslmode=verify-ca", "needs sslrootcert: the file of the authority"),
        ("sslmode=require&sslrootcert=system", "needs sslmode=verify-full"),
        ("sslmode=disable&sslrootcert=/x", "contradicts sslrootcert: write sslmode=verify-full"),
        ("sslkey=/x", "without sslcert"),
        ("sslrootcert=/x&sslrootcert=/y", "given twice.*name it there once"),
    ],
)
def test_what_would_not_be_safe_or_understood_is_refused(query: str, said: str) -> None:
    """The message names it, and the right form, and shows no password."""
    with pytest.raises(OperatorError, match=said) as raised:
        Address.of(f"{PLACE}?{query}")
    assert "hunter2" not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("query", "verified", "named"),
    [
        ("sslmode=require", False, False),
        ("sslmode=require&sslrootcert=/x", True, False),
        ("sslmode=verify-ca&sslrootcert=/x", True, False),
        ("sslmode=verify-full", True, True),
        ("sslmode=verify-full&sslrootcert=system", True, True),
        ("sslrootcert=/x", True, True),
        ("sslcert=/x", True, True),
    ],
)
def test_the_modes_mean_what_they_mean_to_libpq(query: str, verified: bool, named: bool) -> None:  # noqa: FBT001
    """A file without a mode is `verify-full`."""
    address = Address.of(f"{PLACE}?{query}")
    assert address.tls is not None
    assert (address.tls.verified, address.tls.named, address.plaintext) == (verified, named, False)
    assert not address.url.query


def test_without_any_word_of_tls_the_driver_decides() -> None:
    """That is the plain address; `disable` is said to the driver."""
    plain = Address.of(PLACE)
    assert (plain.tls, plain.plaintext) == (None, False)
    disabled = Address.of(f"{PLACE}?sslmode=disable")
    assert (disabled.tls, disabled.plaintext) == (None, True)


def test_the_parts_are_the_same_on_every_way() -> None:
    """Password and hosts are read once; the address shows nothing of itself."""
    address = Address.of("postgres://u:p%40ss@/d?host=a:1&host=b:2&target_session_attrs=primary")
    assert address.arguments == {
        "user": "u",
        "password": "p@ss",
        "database": "d",
        "host": ["a", "b"],
        "port": [1, 2],
        "target_session_attrs": "primary",
    }
    assert repr(address) == "Address(...)"


def test_a_key_needs_its_certificate(tmp_path: Path) -> None:
    """Said when the configuration is read."""
    (tmp_path / "config.toml").write_text('[stream]\nkey_file = "key.pem"\n')
    with pytest.raises(OperatorError, match=r"stream\.key_file is set without stream\.certificate_file"):
        load(tmp_path / "config.toml", {})
